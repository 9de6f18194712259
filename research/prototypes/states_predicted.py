"""Predictions of `critical_path` in both states of launches, each anchored to the sequential graph in that state.

    python research/prototypes/states_predicted.py

The measured times are those of `research/data/state_kick_h200_20261129.json`.
"""

from __future__ import annotations

import json
from pathlib import Path

from gpusim.engine.fast import FastEngine
from gpusim.plan.anchor import anchored_to
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.policies.registry import policy_by_name
from gpusim.trace.store import read_trace
from gpusim.validation.chosen import hardware_of

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "research" / "data" / "state_kick_h200_20261129.json"
STREAMS = 8
FOLDERS = {
    "inception_v3-infer-b1": "search_inference",
    "googlenet-train-b8": "search_training",
    "experts_small-infer-b2": "kinds",
}


def main() -> None:
    """Print predicted and measured time of each step in each state."""
    engine = FastEngine()
    for name, states in json.loads(DATA.read_text(encoding="utf-8"))["steps"].items():
        trace = read_trace(ROOT / "validate" / "traces" / FOLDERS[name] / f"{name}.json.gz")
        hardware = hardware_of(trace)
        schedule = policy_by_name("critical_path")(OpGraph.build(trace, hardware), STREAMS)
        for state in ("slow", "fast", "fast again"):
            times = {way: states[state][way]["median_ns"] for way in ("sequential", "critical_path")}
            graph = OpGraph.build(anchored_to(trace, times["sequential"]), hardware)
            predicted_ns = engine.run(lower(graph, schedule, memory=False), graph.hardware).makespan_ns
            error = predicted_ns / times["critical_path"] - 1.0
            print(f"{name}, {state}: predicted {predicted_ns / 1e3:.0f} us, error {error:+.1%}, measured {times}")


if __name__ == "__main__":
    main()
