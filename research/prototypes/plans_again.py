"""Steps of several GPUs predicted again by today's rules, from shares that were timed on that day.

    python research/prototypes/plans_again.py RESULTS.json SHARES.json

Prints each row of the plans `data` and `owt`, and of DistributedDataParallel, in us: predicted then, today, measured.
Steps with a share that SHARES.json lacks are left out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "validate" / "layerwise"))

import networks
from measured_shares import pass_times

from gpusim.defaults import DEFAULT_ENGINE
from gpusim.engine.base import engine_by_name
from gpusim.formats.hardware import load_hardware
from gpusim.formats.topology import load_topology
from gpusim.layerwise.compute import MeasuredTimes, PassTimes, Roofline
from gpusim.layerwise.costs import Problem
from gpusim.layerwise.ddp import lower_ddp
from gpusim.layerwise.fixed_plans import FIXED_PLANS
from gpusim.layerwise.layers import Layer
from gpusim.layerwise.makespan import simulate_plan
from gpusim.layerwise.shares import Share


def main() -> None:
    """Print the rows."""
    results, shares = (json.loads(Path(name).read_text()) for name in sys.argv[1:3])
    known = {key: pass_times(*times) for key, times in shares.items()}
    hardware, topology = load_hardware("h200"), load_topology("h200")
    rows = [case for case in results["cases"] if case["plan"] in FIXED_PLANS]
    steps: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
    for case in rows:
        steps.setdefault((case["network"], case["batch"], case["gpus"]), []).append(case)
    times = MeasuredTimes(known, {}, Measured(hardware, optimizer=False))
    for (network, batch, gpus), cases in steps.items():
        name = f"{network} {batch}, {gpus} GPUs"
        graph = networks.NETWORKS[network](batch).for_gpus(gpus)
        problem = Problem(graph, gpus, topology, times, hardware)
        try:
            for case in cases:
                if case["policy"] != "ddp":
                    today_ns = simulate_plan(problem, FIXED_PLANS[case["plan"]](graph, gpus)).makespan.step_ns
                    report(f"{name}, {case['plan']}", case["predicted_ns"], today_ns, case["measured_ns"])
            ddp = lower_ddp(problem, broadcast_buffers=False)
        except LookupError as error:
            print(f"{name}: {error}")
            continue
        today_ns = engine_by_name(DEFAULT_ENGINE).run(ddp.plan, ddp.hardware).makespan_ns
        then = next((case["predicted_ns"] for case in cases if case["policy"] == "ddp"), None)  # earlier files: none
        report(f"{name}, ddp", then, today_ns, cases[0]["baselines"]["ddp_graph"])


class Measured(Roofline):
    """No times but measured ones."""

    def share_ns(self, index: int, layer: Layer, share: Share) -> PassTimes:
        """Raise `LookupError`."""
        raise LookupError(f"no measured share of {layer.name}")


def report(name: str, then_ns: int | None, today_ns: float, measured_ns: int) -> None:
    """Print one row."""
    then = "" if then_ns is None else f"then {then_ns / 1e3:,.0f} ({then_ns / measured_ns - 1:+.1%}), "
    today = f"today {today_ns / 1e3:,.0f} ({today_ns / measured_ns - 1:+.1%})"
    print(f"{name}: {then}{today}, measured {measured_ns / 1e3:,.0f}")


if __name__ == "__main__":
    main()
