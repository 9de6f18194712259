"""Errors of replayed plans that copy, by five rules for copies to the host where no kernel runs.

    python research/prototypes/copy_rules.py OUT.json RESULTS.json ...

Rules: `all`, today's: each copy out is slow. `during`: while kernels run. `beside`: from when a kernel has run beside
it. `after`: from the first one of the step that a kernel has run beside. `none`: no copy in either direction is. Copies
back are slow while kernels run, but for `none`. By the reference engine. Prints a row for each plan whose prediction
differs between rules by more than 0.05 %, and writes all.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpusim.engine.reference as reference
from gpusim.formats.results import read_results
from gpusim.memplan.evaluate import MemoryEvaluator
from gpusim.memplan.plan import MemoryPlan
from gpusim.plan.graph import OpGraph
from gpusim.rules import copies
from gpusim.trace.store import read_trace
from gpusim.validation.again import trace_files
from gpusim.validation.chosen import hardware_of
from gpusim.validation.memory_again import plans_path, read_replayed_plans

RULES = ("all", "during", "beside", "after", "none")
UPDATE = reference._Device._update_copies


class Slow:
    """A rule in place of the reference engine's."""

    rule = "all"

    def __init__(self) -> None:
        self.started: dict[tuple[int, str], int] = {}
        self.beside: set[tuple[int, str]] = set()

    def update(self, device: Any) -> None:
        """Start copies as the engine does, then set the rates by the rule."""
        UPDATE(device)
        kernels = bool(device.pool.indices)
        rates = device.hardware.copies
        both = all(copy.active is not None for copy in device.copies.values())
        for direction, copy in device.copies.items():
            place = (id(device), direction)
            if copy.active is None:
                continue
            if self.started.get(place) != copy.active:
                self.started[place] = copy.active
                if self.rule != "after":
                    self.beside.discard(place)
            if kernels:
                self.beside.add(place)
            out = {"all": True, "during": kernels, "none": False}.get(self.rule, place in self.beside)
            slow = (kernels and self.rule != "none") if direction == "h2d" else out
            alone = copies.bytes_per_ns(rates, True, both, False) / copies.full_bytes_per_ns(rates, True)
            full = copies.full_bytes_per_ns(rates, direction == "h2d")
            copy.rate = full * alone / (1.0 + (rates.copy_slowdown if slow else 0.0))

    def as_method(self) -> Callable[[Any], None]:
        """Return `update` as a method of the engine's device."""
        return lambda device: self.update(device)


def errors_of(evaluator: MemoryEvaluator, plan: MemoryPlan, barriers_first: bool, measured_ns: int) -> list[float]:
    """Return the error of a plan's predicted time by each rule."""
    program = evaluator.program(plan, barriers_first=barriers_first)
    errors = []
    for Slow.rule in RULES:
        slow = Slow()
        reference._Device._update_copies = slow.as_method()  # type: ignore[method-assign, assignment]
        errors.append(evaluator.choosing(plan).time(program).makespan_ns / measured_ns - 1)
    return errors


def main() -> None:
    """Print and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("results", type=Path, nargs="+")
    chosen = parser.parse_args()
    rows = []
    for results in chosen.results:
        files, evaluators = trace_files(results), {}
        for case, replayed in zip(read_results(results).cases, read_replayed_plans(plans_path(results)), strict=True):
            if case.trace not in evaluators:
                trace = read_trace(files[case.trace])
                evaluators[case.trace] = MemoryEvaluator(OpGraph.build(trace, hardware_of(trace)), "reference")
            evaluator = evaluators[case.trace]
            plan = MemoryPlan.from_document(replayed.plan, evaluator.graph.trace)
            if not plan.has_copies:
                continue
            errors = errors_of(evaluator, plan, replayed.barriers_first, case.measured_ns)
            row = {"results": results.stem, "trace": case.trace, "policy": case.policy}
            rows.append(row | {"errors": dict(zip(RULES, (round(each, 5) for each in errors), strict=True))})
            if max(errors) - min(errors) > 0.0005:
                said = " ".join(f"{name} {100 * each:+5.1f}" for name, each in zip(RULES, errors, strict=True))
                print(f"{results.stem:36} {case.trace:22} {case.policy:22} {said}", flush=True)
    chosen.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
