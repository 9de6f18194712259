"""`gpusim validate` without a GPU: a real run of a recipe, with capture and replay replaced as in `test_recipes`.

Processes and folders are the real ones.
"""

from __future__ import annotations

from pathlib import Path

from gpusim.formats.recipe import Case, Recipe
from gpusim.validation import run as run_module
from tests.validation.test_recipes import capture, pairs, replay


def main() -> None:
    run_module.capture_case = capture
    run_module.replay_chosen = replay
    run_module.measure_pairs_of = pairs
    case = Case(spec="m.py:net", mode="infer", batch=1)
    recipe = Recipe(name="r", case=(case,), policies=("wavefront",), counts=(2, 3), pairs=2)
    run_module.run_recipe(recipe, Path(), "gpusim validate r.toml", lambda line: None, trust_code=True)


if __name__ == "__main__":
    main()
