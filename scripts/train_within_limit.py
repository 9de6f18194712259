#!/usr/bin/env python3
"""Train a step within a limit on GPU memory by a memory plan, and again without limit and plan; needs a GPU.

    gpusim capture validate/networks/deep_resnet.py:resnet1502 --mode train --batch 16 --estimate -o deep.json.gz
    gpusim memory deep.json.gz --budget 7.5GiB --policy least_time -o deep.plan.json
    python scripts/train_within_limit.py deep.json.gz deep.plan.json --limit 12GiB --steps 5 -o deep.result.json

Each runs in a process of its own, the first with `torch.cuda.set_per_process_memory_fraction`: torch then refuses
to reserve more. Both begin with the trace's initial state. The exit code is 1 where a loss differs. The output is
written after each run; the same command again does what it lacks.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import math
import sys
from pathlib import Path
from typing import Any

import msgspec

from gpusim.errors import GpusimError
from gpusim.gpu.isolate import alone
from gpusim.gpu.replay.memory_train import Trained, train
from gpusim.io.files import write_bytes
from gpusim.trace.store import trace_sha256
from gpusim.units import parse_bytes
from gpusim.version import code_version


def main() -> int:
    """Print and write what both runs gave; 0 where their losses are the same bits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--limit", type=parse_bytes, required=True)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    asked = {
        "trace": options.trace.name,
        "trace_sha256": trace_sha256(options.trace),
        "plan_sha256": hashlib.sha256(options.plan.read_bytes()).hexdigest(),
        "limit_bytes": options.limit,
        "steps": options.steps,
        "gpusim": code_version(),
    }
    runs = done(options.output, asked)
    for name, plan, limit in (("plan", options.plan, options.limit), ("keep_all", None, 0)):
        if name not in runs:
            try:
                runs[name] = alone(train, options.trace, plan, limit, options.steps)
            except GpusimError as cause:
                sys.stderr.write(f"{name}: {cause}\n")
                continue
            write(options.output, asked, runs)
    sys.stdout.write(text_of(asked, runs))
    return 0 if losses_equal(runs) else 1


def done(output: Path | None, asked: dict[str, Any]) -> dict[str, Trained]:
    """Return the runs that the output has of the same request."""
    if output is None or not output.exists():
        return {}
    found = msgspec.json.decode(output.read_bytes())
    if any(found.get(key) != value for key, value in asked.items()):
        return {}
    return msgspec.convert(found["runs"], dict[str, Trained])


def write(output: Path | None, asked: dict[str, Any], runs: dict[str, Trained]) -> None:
    """Write the runs so far, all or nothing."""
    if output is not None:
        write_bytes(output, text_of(asked, runs).encode())


def text_of(asked: dict[str, Any], runs: dict[str, Trained]) -> str:
    document = {**asked, "date": datetime.date.today().isoformat(), "losses_equal": losses_equal(runs), "runs": runs}
    return msgspec.json.format(msgspec.json.encode(document), indent=1).decode() + "\n"


def losses_equal(runs: dict[str, Trained]) -> bool:
    """Whether both runs have the same losses, bit by bit."""
    return len(runs) == 2 and all(
        one == other or (math.isnan(one) and math.isnan(other))
        for one, other in zip(runs["plan"].losses, runs["keep_all"].losses, strict=True)
    )


if __name__ == "__main__":
    sys.exit(main())
