"""`gpusim validate` without a GPU: its own run of a recipe, with capture and replay replaced as in `test_recipes`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpusim.recipes import run as run_module
from gpusim.recipes.recipe import Case, Recipe
from tests.test_recipes import capture, pairs, replay


def _here(work: Callable[..., Any], *args: object) -> Any:
    return work(*args)


def main() -> None:
    run_module.alone = _here
    run_module._capture = capture
    run_module._replay = replay
    run_module._pairs = pairs
    cases = tuple(Case(spec=f"m.py:net{number}", mode="infer", batch=1) for number in range(3))
    recipe = Recipe(name="r", case=cases, policies=("wavefront",), counts=(2, 3), pairs=2, traces="kept")
    run_module.run_recipe(recipe, Path(), "gpusim validate r.toml", lambda line: None)


if __name__ == "__main__":
    main()
