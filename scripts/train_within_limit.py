#!/usr/bin/env python3
"""Train a step within a limit on GPU memory by a memory plan, and again without limit and plan; needs a GPU.

    gpusim capture validate/networks/deep_resnet.py:resnet1502 --mode train --batch 16 --estimate -o deep.json.gz
    gpusim memory deep.json.gz --budget 7.5GiB --policy least_time -o deep.plan.json
    python scripts/train_within_limit.py deep.json.gz deep.plan.json --limit 12GiB --steps 5 -o deep.result.json

Each runs in a process of its own, the first with `torch.cuda.set_per_process_memory_fraction`: torch then refuses
to reserve more. Both begin with the trace's initial state. The exit code is 1 where a loss differs.
"""

from __future__ import annotations

import argparse
import datetime
import math
import sys
from pathlib import Path

import msgspec

from gpusim.errors import GpusimError
from gpusim.gpu.isolate import alone
from gpusim.gpu.replay.memory_train import Trained, train
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
    runs: dict[str, Trained] = {}
    try:
        runs["plan"] = alone(train, options.trace, options.plan, options.limit, options.steps)
        runs["keep_all"] = alone(train, options.trace, None, 0, options.steps)
    except GpusimError as cause:
        sys.stderr.write(f"{cause}\n")
    same = len(runs) == 2 and all(
        one == other or (math.isnan(one) and math.isnan(other))
        for one, other in zip(runs["plan"].losses, runs["keep_all"].losses, strict=True)
    )
    document = {
        "trace": options.trace.name,
        "date": datetime.date.today().isoformat(),
        "gpusim": code_version(),
        "losses_equal": same,
        "runs": runs,
    }
    text = msgspec.json.format(msgspec.json.encode(document), indent=1).decode()
    print(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
