"""Metadata of the package is consistent."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import gpusim

ROOT = Path(__file__).parents[2]
NEWEST_HEADING = re.compile(r"^## v?(\d\S*)", re.MULTILINE)


def test_version_is_the_changelogs_newest() -> None:
    newest = NEWEST_HEADING.search((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    assert newest is not None, "CHANGELOG.md has no heading of the form '## 0.1.0'"
    assert newest[1] == gpusim.__version__


def test_package_is_marked_as_typed() -> None:
    assert (Path(gpusim.__file__).parent / "py.typed").is_file()


def test_tests_do_not_install_torch() -> None:
    """README's test command names the torch build; an extra that names it too could replace it with another."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    assert [name for name in wanted if name.startswith(("torch", "timm"))] == []


def test_what_recipes_need_and_measured_stays_in_few_files() -> None:
    """Traces of a recipe are one set (`scripts/pack_traces.py`); a day's results are one file, and one of its plans.

    Tables of results are made on reading, and not tracked.
    """
    validate = ROOT / "validate"
    recipes = {path.stem for path in validate.glob("*.toml")}
    assert {path.stem for path in (validate / "traces").iterdir()} <= recipes
    scripts = {"parallel", "parallel_ddp", "parallel_steps", "parallel_exchanges"}  # validate/layerwise
    named = re.compile(r"(?P<recipe>\w+)_h200_\d{8}(\.(schedules|plans)\.json\.gz|(\.pairs)?\.json|\.md)")
    names = [named.fullmatch(path.name) for path in (validate / "results").iterdir() if path.is_file()]
    assert all(names)
    assert {name["recipe"] for name in names if name} <= recipes | scripts
