"""Plans rank by rank on one GPU: python validate/layerwise/ranks.py [-o FOLDER] [--networks NAMES] [--minutes 8].

For each network, batch and number of GPUs the plans `data`, `owt` and `layer`. Of a rank, the time of each share is
measured by itself first; their sum is the prediction. Only then the rank's forward and backward pass runs as a whole,
its communication replaced by nothing. The plan `layer` is searched with the shares measured so far. Interrupted or out
of time, the same command goes on where it was. Cases of a results file in FOLDER are not run again; new ones are in
`parallel_<gpu>_<date>.json` once each is done.

`predicted_ns` and `measured_ns` are the slowest rank's computation. `predicted_step_ns` is a whole simulated step,
communication included and no optimizer; no step is measured here, so nothing is compared with it.

`--quick` runs small networks, on a CPU where there is no GPU: a test of this script.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from measured_shares import Planner, Shares, network, short_name, sm_clock_mhz, splits_of

from gpusim.gpu.device import gpu_facts
from gpusim.gpu.layerwise.alone import predicted_ns, rank_alone, time_rank
from gpusim.layerwise.communication import basis, members
from gpusim.layerwise.makespan import simulate_plan
from gpusim.version import code_version

NETWORKS, BATCHES, GPUS = ("alexnet", "vgg16", "resnet50", "inception_v3"), (32, 128), (2, 4)
QUICK = (("encoder",), (2,), (2,))
PLANS = ("data", "owt", "layer")


def case(name: str, batch: int, gpus: int, plan: str, kept: Shares, device: torch.device) -> dict[str, Any]:
    """Predict a plan's slowest rank from its shares, then measure it."""
    planner = Planner(network(name, batch).for_gpus(gpus), gpus, kept, device)
    choice, data = planner.choice(plan), planner.data
    numbers = planner.measure(choice)
    rows = []
    for number in numbers:
        rank = rank_alone(planner.graph, choice, gpus, number, device=device)
        predicted = predicted_ns(rank, kept.times, planner.hardware)  # known before the rank runs
        rows.append((predicted, time_rank(rank, data)))
        del rank
        if device.type == "cuda":
            torch.cuda.empty_cache()
    predicted, measured = max(p for p, _ in rows), max(m for _, m in rows)
    problem, topology = planner.problem(), planner.topology
    simulated = simulate_plan(problem, choice).makespan
    return {
        "network": name,
        "mode": "train",
        "batch": batch,
        "dtype": "tf32",
        "policy": f"parallel_{plan}",
        "gpus": gpus,
        "plan": plan,
        "communication": "predicted",
        "communication_basis": basis(topology, "all_reduce", members(range(gpus), topology.gpus_per_node)),
        "predicted_ns": round(predicted),
        "measured_ns": measured,
        "ranks": [[round(p), m] for p, m in rows],
        "predicted_step_ns": round(simulated.step_ns),
        "splits": splits_of(problem.graph, choice),
        "fitted": False,
        "date": today(),
        "commit": code_version(),
        "sm_clock_mhz": sm_clock_mhz(device),
    }


def today() -> str:
    return datetime.datetime.now(tz=datetime.UTC).strftime("%Y-%m-%d")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is left to do until time is up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).resolve().parents[1] / "results")
    parser.add_argument("--work", type=Path, help="shares and finished cases [default: OUTPUT/parallel_work]")
    parser.add_argument("--networks", default=",".join(NETWORKS), help="[default: %(default)s]")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument(
        "--quick", action="store_true", help="a small network, without a GPU too: a test of this script"
    )
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.quick:
        parser.error("no GPU; --quick tests this script without one")
    asked = options.networks.split(",")
    if unknown := set(asked) - set(NETWORKS):
        parser.error(f"--networks: {', '.join(sorted(unknown))}; there are {', '.join(NETWORKS)}")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.manual_seed(0)
    work = options.work or options.output / "parallel_work"
    work.mkdir(parents=True, exist_ok=True)
    kept, until = Shares(work / "shares.json"), time.monotonic() + 60 * options.minutes
    names, batches, sizes = QUICK if options.quick else (asked, BATCHES, GPUS)
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    done = {key_of(row) for file in options.output.glob(results_name(gpu, "*")) for row in cases_of(file)}
    left = 0
    errors: list[float] = []
    for name, batch, plan, gpus in itertools.product(names, batches, PLANS, sizes):
        file = work / f"{name}-b{batch}-{gpus}gpus-{plan}.json"
        if file.exists() or (name, batch, gpus, plan) in done:
            continue
        if time.monotonic() > until:
            left += 1
            continue
        begin = time.monotonic()
        row = case(name, batch, gpus, plan, kept, device)
        file.write_text(json.dumps(row, indent=1))
        errors = sorted(map(abs, write_results(work, options.output, gpu)))
        error, took_s = row["predicted_ns"] / row["measured_ns"] - 1, time.monotonic() - begin
        print(f"{file.stem}: {row['measured_ns'] / 1e3:,.0f} us, predicted {error:+.1%}; {took_s:.0f} s", flush=True)
    if errors:
        print(f"median error of all cases {errors[len(errors) // 2]:.1%}, largest {errors[-1]:.1%}")
    print("done" if not left else f"{left} cases left: run the same command again")
    return 0


def results_name(gpu: str, date: str) -> str:
    """File name of results."""
    return f"parallel_{short_name(gpu)}_{date.replace('-', '')}.json"


def cases_of(file: Path) -> list[dict[str, Any]]:
    """Cases of a results file; none where there is no file."""
    cases: list[dict[str, Any]] = json.loads(file.read_text())["cases"] if file.exists() else []
    return cases


def key_of(row: dict[str, Any]) -> tuple[str, int, int, str]:
    """What tells a case from others."""
    return row["network"], row["batch"], row["gpus"], row["plan"]


def write_results(work: Path, folder: Path, gpu: str) -> list[float]:
    """All finished cases in one file, beside those that the file of this day has already; their errors."""
    date = today()
    file = folder / results_name(gpu, date)
    rows = {key_of(row): row for row in cases_of(file)}
    rows |= {key_of(row): row for row in (json.loads(each.read_text()) for each in sorted(work.glob("*gpus-*.json")))}
    versions = {"torch": str(torch.__version__), "cuda": str(torch.version.cuda)}
    if gpu != "cpu":
        facts = gpu_facts()
        versions |= {"driver": facts.driver, "cudnn": facts.cudnn}
    document = {
        "recipe": "parallel",
        "gpu": gpu,
        "date": date,
        "command": "python validate/layerwise/ranks.py",
        "versions": versions,
        "gpusim": code_version(),
        "cases": [rows[key] for key in sorted(rows)],
    }
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document, indent=1) + "\n")
    return [row["predicted_ns"] / row["measured_ns"] - 1 for row in rows.values()]


if __name__ == "__main__":
    raise SystemExit(main())
