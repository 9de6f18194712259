"""The dashboard imports only the front door and the reports, and nothing below them."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
APP = ROOT / "app"
#: Modules for the dashboard: the front door, the reports, and what every layer may use.
OPEN = (
    "gpusim.api",
    "gpusim.defaults",
    "gpusim.errors",
    "gpusim.io.decoding",
    "gpusim.io.file_limits",
    "gpusim.io.files",
    "gpusim.report",
    "gpusim.text",
    "gpusim.units",
)


def imported(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    modules = {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    modules |= {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    return {module for module in modules if module.split(".")[0] == "gpusim"}


def test_dashboard_reaches_the_front_door_and_nothing_beneath_it() -> None:
    reached = set().union(*(imported(path) for path in APP.rglob("*.py"))) - {"gpusim"}
    assert {module for module in reached if not any(f"{module}.".startswith(f"{o}.") for o in OPEN)} == set()


def test_dashboard_explores_simulates_and_finds_limits_through_the_front_door() -> None:
    called = {
        node.attr
        for path in APP.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "gpusim"
    }
    assert {"load", "explore", "simulate", "limits"} <= called


# --- One default, one definition ---

#: Parameters and fields with one meaning everywhere; their defaults are in `gpusim.defaults`.
WATCHED = {"streams", "seed", "budget_s", "engine", "policy", "hardware", "launch"}
#: Same names with another meaning: streams of a profile or of a microbenchmark, the search of a recipe's cases.
OTHERS = {
    ("gpusim/formats/trace.py", "streams"),
    ("gpusim/gpu/calibrate/microbench.py", "streams"),
    ("gpusim/formats/recipe.py", "budget_s"),
}


def literal_defaults(path: Path) -> set[str]:
    """Return watched names of a module's parameters and fields whose default is a literal number or text."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        pairs: list[tuple[str, ast.expr | None]] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = node.args
            placed = [*given.posonlyargs, *given.args]
            pairs += [
                (a.arg, d) for a, d in zip(placed[len(placed) - len(given.defaults) :], given.defaults, strict=True)
            ]
            pairs += [(a.arg, d) for a, d in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            pairs.append((node.target.id, node.value))
        found |= {
            name
            for name, value in pairs
            if name in WATCHED and isinstance(value, ast.Constant) and value.value not in (None, "", ...)
        }
    return found


def test_each_default_stands_once() -> None:
    wrong = {
        (path.relative_to(ROOT).as_posix(), name)
        for folder in ("gpusim", "app")
        for path in (ROOT / folder).rglob("*.py")
        for name in literal_defaults(path)
    }
    assert wrong - OTHERS == set()
