"""What the dashboard reaches: the front door and what shows results; the rest is listed here, and gets no longer."""

from __future__ import annotations

import ast
from pathlib import Path

APP = Path(__file__).parent.parent / "app"
#: The front door, what shows results, and what every layer may use.
OPEN = (
    "gpusim",
    "gpusim.api",
    "gpusim.defaults",
    "gpusim.errors",
    "gpusim.file_limits",
    "gpusim.files",
    "gpusim.maintain",
    "gpusim.report",
    "gpusim.resources",
    "gpusim.text",
    "gpusim.units",
)
#: What has no public name: searches that can be stopped, uploads, what-if sliders, and types of values.
BENEATH = {
    "gpusim.hardware",
    "gpusim.hardware.model",
    "gpusim.plan.graph",
    "gpusim.plan.measurement",
    "gpusim.plan.schedule",
    "gpusim.plan.tasks",
    "gpusim.policies.registry",
    "gpusim.search",
    "gpusim.search.background",
    "gpusim.search.choices",
    "gpusim.search.critical",
    "gpusim.search.explore",
    "gpusim.search.interrupt",
    "gpusim.search.searches",
    "gpusim.search.simulation",
    "gpusim.search.whatif",
    "gpusim.trace.schema",
    "gpusim.trace.store",
}


def imported(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    modules = {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    modules |= {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    return {module for module in modules if module.split(".")[0] == "gpusim"}


def test_dashboard_reaches_the_front_door_and_what_is_listed() -> None:
    reached = set().union(*(imported(path) for path in APP.rglob("*.py")))
    beneath = {module for module in reached if not any(module == o or module.startswith(f"{o}.") for o in OPEN[1:])}
    assert beneath - {"gpusim"} == BENEATH, "what is no longer reached leaves the list"


def test_dashboard_explores_simulates_and_finds_limits_through_the_front_door() -> None:
    called = {
        node.attr
        for path in APP.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "gpusim"
    }
    assert {"load", "explore", "simulate", "limits"} <= called
