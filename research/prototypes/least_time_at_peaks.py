"""Predicted step time of `least_time` at the peak of each other policy, over that policy's own.

    python research/prototypes/least_time_at_peaks.py [TRACE...] [--policy P]... [--json OUT]

TRACE is a file or a bundled name; without any, all bundled steps in training. Policies that take a budget are planned
without one, and within half of what keeping all takes. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpusim.errors import PlanError
from gpusim.formats.hardware import load_hardware
from gpusim.memplan.evaluate import MemoryEvaluator, Outcome
from gpusim.memplan.policies.base import Setting
from gpusim.memplan.policies.least_time import LeastTime
from gpusim.memplan.policies.registry import MEMORY_POLICIES
from gpusim.plan.graph import OpGraph
from gpusim.trace.store import bundled_traces, read_trace


def rows(name: str, policies: list[str]) -> list[dict[str, Any]]:
    """One row for each plan of the other policies that takes less memory than keeping all."""
    trace = read_trace(bundled_traces().get(name, Path(name)))
    evaluator = MemoryEvaluator(OpGraph.build(trace, load_hardware("h200")))
    setting = Setting(evaluator.graph, evaluator.storages)
    planner = LeastTime(setting, evaluator)
    found = []
    half = replace(setting, budget_bytes=setting.keep_all_bytes // 2)
    for policy in policies:
        registered = MEMORY_POLICIES[policy]
        for asked in (setting, half) if registered.takes_budget else (setting,):
            try:
                other = evaluator.evaluate(registered(asked))
            except PlanError:
                continue
            if other.peak_bytes < setting.keep_all_bytes:
                found.append(row(planner, evaluator, f"{policy}{' half' if asked is half else ''}", other))
    return found


def row(planner: LeastTime, evaluator: MemoryEvaluator, policy: str, other: Outcome) -> dict[str, Any]:
    """Compare one plan with that of `least_time` within its peak."""
    entry: dict[str, Any] = {
        "trace": evaluator.graph.trace.name,
        "policy": policy,
        "keep_all_ns": evaluator.keep_all_ns,
    }
    entry |= {"peak_bytes": other.peak_bytes, "step_ns": other.step_ns}
    began = time.process_time()
    try:
        ours = evaluator.evaluate(planner.best(other.peak_bytes))
    except PlanError as error:
        entry["problem"] = str(error)
    else:
        entry |= {"least_time_ns": ours.step_ns, "copies": len(ours.plan.offloads), "recompute_ns": ours.recompute_ns}
        entry["least_time_peak_bytes"] = ours.peak_bytes
    return entry | {"planning_s": time.process_time() - began}


def main() -> None:
    """Print a table for each step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="*")
    parser.add_argument("--policy", action="append")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    policies = asked.policy or [name for name in MEMORY_POLICIES if name not in ("keep_all", "least_time")]
    every = []
    for name in asked.traces or [name for name in bundled_traces() if "-train-" in name]:
        for each in rows(name, policies):
            ratio = f"{each['least_time_ns'] / each['step_ns']:.4f}" if "least_time_ns" in each else "no plan"
            peak = f"{each['peak_bytes'] / 2**20:10,.1f} MiB"
            ours = f"{each.get('copies', 0):4} copies {each['planning_s']:5.1f} s"
            other = f"{each['policy']:25} {peak} {each['step_ns'] / 1e3:10,.1f} us"
            print(f"{each['trace']:24} {other} {ratio} {ours}", flush=True)
            every.append(each)
    if asked.json:
        asked.json.write_text(json.dumps(every, indent=1))


if __name__ == "__main__":
    main()
