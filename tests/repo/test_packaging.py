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
    """Traces of a recipe are one set (`scripts/pack_traces.py`), and tables of results are made on reading."""
    tracked = [path for path in (ROOT / "validate").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert len([path for path in tracked if path.suffix != ".md"]) <= 90
