"""Agreement of docs and code: files, layers, headings and quoted numbers."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from gpusim.formats.hardware import bundled_hardware
from gpusim.rules import anchor

ROOT = Path(__file__).parents[2]
DESIGN = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")


def section(heading: str) -> str:
    """The text of docs/design.md under a heading of any level."""
    return re.split(r"^#+ .*$", DESIGN.split(f"# {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def test_every_file_that_the_design_names_exists() -> None:
    named = set(re.findall(r"`((?:gpusim|hwmodels|validate)/[\w./]*)`", DESIGN))
    assert len(named) > 20
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_the_map_of_optimize_names_all_its_modules() -> None:
    package = ROOT / "gpusim" / "gpu" / "optimize"
    text = (package / "__init__.py").read_text(encoding="utf-8")
    modules = {path.stem for path in package.glob("*.py")} - {"__init__"}
    assert modules - set(re.findall(r"`(\w+)`", text)) == set()


def test_every_layer_of_the_import_contract_exists() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    missing = []
    for contract in (each for each in contracts if each["type"] == "layers"):
        (container,) = contract["containers"]
        package = ROOT / container.replace(".", "/")
        names = re.findall(r"\w+", " ".join(contract["layers"]))
        missing += [name for name in names if not (package / name).is_dir() and not (package / f"{name}.py").is_file()]
    assert missing == []


def test_layers_that_the_design_draws_are_those_of_the_import_contract() -> None:
    drawn = set(re.findall(r"\w+", DESIGN.split("```\ncli -> ", 1)[1].split("```", 1)[0]))
    packages = {path.parent.name for path in (ROOT / "gpusim").glob("*/__init__.py")}
    assert drawn | {"cli"} == packages | {"step", "units", "errors"}


def test_rules_of_the_engines_are_in_the_table_of_hardware_rules() -> None:
    table = section("Where it lives")
    for module in sorted((ROOT / "gpusim" / "rules").glob("[a-z]*.py")):
        assert f"`gpusim/rules/{module.name}`" in table
    for module in ("placement", "pool"):
        assert f"`gpusim/engine/{module}.py`" in table
    for rule in ("sharing exponent", "cross load", "fork", "start interference", "shared memory"):
        assert rule in table.lower()


def test_design_does_not_deny_that_blocks_are_placed_sm_by_sm() -> None:
    assert "single SMs" not in section("What is not modelled")


def test_range_of_the_anchors_factor_in_the_design_is_the_codes() -> None:
    text = " ".join(section("Why the sequential time is anchored").split())
    assert f"within {anchor.MIN_GAP_NS:g} to {anchor.MAX_GAP_NS:g} ns" in text
    assert f"within {anchor.MIN_SCALE:g} to {anchor.MAX_SCALE:g}:" in text


@pytest.mark.parametrize("name", sorted(bundled_hardware()))
def test_headings_that_sources_of_a_hardware_model_cite_exist(name: str) -> None:
    sources: dict[str, str] = json.loads(bundled_hardware()[name].read_text(encoding="utf-8"))["sources"]
    for text in sources.values():
        for page, heading in re.findall(r"((?:docs|research)/[\w-]+\.md)(?:, '([^']+)')?", text):
            found = (ROOT / page).read_text(encoding="utf-8")
            assert not heading or re.search(rf"^#+ {re.escape(heading)}$", found, re.MULTILINE), (page, heading)


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: f"{page.parent.name}-{page.stem}"
)
def test_no_paragraph_of_a_page_begins_in_the_middle_of_a_sentence(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    begun = [part.lstrip() for part in text.split("\n\n")]
    assert [part[:60] for part in begun if re.match(r"(and|or|but|which) ", part)] == []


@pytest.mark.parametrize("folder", ["gpusim", "app", "scripts", "benchmarks", "tests"])
def test_pages_that_sources_name_exist(folder: str) -> None:
    named = {
        (path.relative_to(ROOT).as_posix(), page)
        for path in (ROOT / folder).rglob("*.py")
        for page in re.findall(r"\b(?:docs|research)/[\w/-]+\.md", path.read_text(encoding="utf-8"))
    }
    assert [where for where in sorted(named) if not (ROOT / where[1]).is_file()] == []
