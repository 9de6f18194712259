"""Steps of two GPUs predicted again by today's rules, from shares that were timed on that day.

    python research/prototypes/plans_again.py RESULTS.json SHARES.json

Prints each row of the plans `data` and `owt`, and of DistributedDataParallel, in us: predicted then, today, measured.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "validate" / "layerwise"))

import networks

from gpusim.defaults import DEFAULT_ENGINE
from gpusim.engine.base import engine_by_name
from gpusim.formats.hardware import load_hardware
from gpusim.formats.topology import load_topology
from gpusim.layerwise.compute import MeasuredTimes, PassTimes, Roofline
from gpusim.layerwise.costs import Problem
from gpusim.layerwise.ddp import lower_ddp
from gpusim.layerwise.fixed_plans import FIXED_PLANS
from gpusim.layerwise.makespan import simulate_plan


def main() -> None:
    """Print the rows."""
    results, shares = (json.loads(Path(name).read_text()) for name in sys.argv[1:3])
    known = {key: PassTimes(*times) for key, times in shares.items()}
    hardware, topology = load_hardware("h200"), load_topology("h200")
    rows = [case for case in results["cases"] if case["plan"] in FIXED_PLANS]
    ddp_of = {(case["network"], case["batch"]): case for case in rows if case["policy"] == "ddp"}
    for network, batch in dict.fromkeys((case["network"], case["batch"]) for case in rows):
        graph = networks.NETWORKS[network](batch).for_gpus(2)
        problem = Problem(graph, 2, topology, MeasuredTimes(known, {}, Roofline(hardware, optimizer=False)), hardware)
        mine = [case for case in rows if (case["network"], case["batch"]) == (network, batch)]
        for case in mine:
            if case["policy"] != "ddp":
                today_ns = simulate_plan(problem, FIXED_PLANS[case["plan"]](graph, 2)).makespan.step_ns
                report(f"{network} {batch} {case['plan']}", case["predicted_ns"], today_ns, case["measured_ns"])
        ddp = lower_ddp(problem, broadcast_buffers=False)
        today_ns = engine_by_name(DEFAULT_ENGINE).run(ddp.plan, ddp.hardware).makespan_ns
        then = ddp_of.get((network, batch))  # earlier files have no row of it
        report(f"{network} {batch} ddp", then and then["predicted_ns"], today_ns, mine[0]["baselines"]["ddp_graph"])


def report(name: str, then_ns: int | None, today_ns: float, measured_ns: int) -> None:
    """Print one row."""
    then = "" if then_ns is None else f"then {then_ns / 1e3:,.0f} ({then_ns / measured_ns - 1:+.1%}), "
    today = f"today {today_ns / 1e3:,.0f} ({today_ns / measured_ns - 1:+.1%})"
    print(f"{name}: {then}{today}, measured {measured_ns / 1e3:,.0f}")


if __name__ == "__main__":
    main()
