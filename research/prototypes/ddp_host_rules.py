"""Rules for a step that waits for its host, against the eight times of DistributedDataParallel.

    python research/prototypes/ddp_host_rules.py

Host times come from `research/data/ddp_stand_in_h200_20261124.json`, simulated and measured steps from
`validate/results/parallel_ddp_h200_20261120.json`. A pace turns this host's times into those of the other host. Prints
the error of each rule for each step.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HOST = ROOT / "research/data/ddp_stand_in_h200_20261124.json"
STEPS = ROOT / "validate/results/parallel_ddp_h200_20261120.json"
#: GoogLeNet at 8 images on one GPU, forward and backward, on the day of the eight times: it waits for its host.
GOOGLENET_NS = 12_902_000


def cases(file: Path) -> list[dict[str, Any]]:
    """Rows of a results file."""
    rows: list[dict[str, Any]] = json.loads(file.read_text())["cases"]
    return rows


def rules(step: dict[str, Any], hosts: dict[tuple[str, int], dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """Names of rules with what each predicts for a step in ns."""
    here, simulated, alone = hosts[step["network"], step["batch"]], step["predicted_ns"], step["alone_ns"]
    way = f"ddp{step['gpus']}"
    yield "simulated", simulated
    paces = {
        "the step's own time alone": alone / here["alone_host_ns"],
        "AlexNet's, 32 images": 2_239_000 / hosts["alexnet", 32]["alone_host_ns"],
        "Inception-v3's": 32_759_000 / hosts["inception_v3", 32]["alone_host_ns"],
        "GoogLeNet's": GOOGLENET_NS / here["pace_ns"],
    }
    for name, pace in paces.items():
        yield f"host with stand-in, pace {name}", max(simulated, pace * here[f"{way}_host_ns"])
        yield f"host of one rank, pace {name}", max(simulated, pace * here["ddp_host_ns"])
    added = here[f"{way}_host_ns"] - here["alone_host_ns"]
    yield "alone + added host, pace GoogLeNet's", max(simulated, alone + paces["GoogLeNet's"] * added)
    yield "alone x ratio of steps", alone * here[f"{way}_ns"] / here["alone_ns"]
    yield "alone + difference of steps", alone + here[f"{way}_ns"] - here["alone_ns"]


def main() -> int:
    """Print a table."""
    hosts = {(row["network"], row["batch"]): row for row in cases(HOST)}
    errors: dict[str, list[float]] = {}
    heads = []
    for step in cases(STEPS):
        heads.append(f"{step['network']} {step['batch']}, {step['gpus']}")
        for name, predicted_ns in rules(step, hosts):
            errors.setdefault(name, []).append(predicted_ns / step["measured_ns"] - 1)
    print(f"| rule | {' | '.join(heads)} | median | largest |")
    print(f"|---|{'--:|' * (len(heads) + 2)}")
    for name, row in errors.items():
        sizes = [abs(error) for error in row]
        cells = [f"{100 * error:+.1f}" for error in row]
        print(f"| {name} | {' | '.join(cells)} | {100 * statistics.median(sizes):.1f} | {100 * max(sizes):.1f} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
