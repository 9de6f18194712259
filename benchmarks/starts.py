"""Seconds from a loaded model to the first result of a step, start by start. Needs a GPU.

    python benchmarks/starts.py torchvision:googlenet infer 1

Each start is a process of its own: `optimize` twice, then `torch.compile` twice, with caches that begin empty. With
`--folder` they stay, and `--ways` gives the starts of one command, for example `--ways optimize`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch

from gpusim.gpu.capture.models import ModelStep, load_step
from gpusim.gpu.device import require_gpu, set_precision
from gpusim.gpu.optimize import cache
from gpusim.gpu.optimize.callable import OptimizedStep
from gpusim.gpu.optimize.front import optimize
from gpusim.gpu.optimize.peers import tensors_of, user_step

#: Search budget, that of `validate/compile.toml`.
BUDGET_S = 9.0
#: Caches of a start, each a variable for its folder: gpusim's, Inductor's and Triton's.
CACHES = (cache.VARIABLE, "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
WAYS = ("optimize", "compile")
#: Most that `optimize` may take from the cache beyond a warm `torch.compile`, in s.
AIM_S = 10.0


def started(way: str, step: ModelStep) -> dict[str, Any]:
    """Make the step ready and run it once; return the seconds, and what `optimize` says of them."""
    begin = time.perf_counter()
    if way == "optimize":
        target = step.module if step.loss is None else user_step(step, step.module, step.module)
        call = optimize(target, tensors_of(step), budget_s=BUDGET_S, say=lambda text: print(text, file=sys.stderr))
    else:
        call = user_step(step, step.module, torch.compile(step.module))
    call(*tensors_of(step))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    told: dict[str, Any] = {"way": way, "seconds": round(time.perf_counter() - begin, 2)}
    if isinstance(call, OptimizedStep) and call.gain is not None:
        stages = {name: round(taken_s, 2) for name, taken_s in call.gain.stages_s.items()}
        told |= {"decided_by": call.gain.decided_by, "frontend": call.gain.frontend, "stages_s": stages}
    return told


def compared(starts: list[dict[str, Any]]) -> str:
    """Compare the last start of `optimize` with the last one of torch.compile, in words."""
    last = {start["way"]: start for start in starts}
    if len(last) < 2:
        return "no comparison: both ways are needed"
    beyond_s = last["optimize"]["seconds"] - last["compile"]["seconds"]
    return f"optimize, started again, takes {beyond_s:+.1f} s beyond a warm torch.compile (aim: at most {AIM_S:.0f} s)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec")
    parser.add_argument("mode", choices=("infer", "train"))
    parser.add_argument("batch", type=int)
    parser.add_argument("--dtype", default="tf32")
    parser.add_argument("--memory-format", default="contiguous")
    parser.add_argument(
        "--ways", nargs="+", choices=("optimize", "compile"), default=["optimize"] * 2 + ["compile"] * 2
    )
    parser.add_argument("--folder", help="folder of the caches, kept from command to command")
    parser.add_argument("--here", choices=WAYS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.here:
        device = require_gpu()
        set_precision(asked.dtype)
        step = load_step(asked.spec, mode=asked.mode, batch=asked.batch, dtype=asked.dtype,
                         memory_format=asked.memory_format, device=device, seed=0)  # fmt: skip
        print(json.dumps(started(asked.here, step)))
        return
    starts = []
    with tempfile.TemporaryDirectory() as temporary:
        for way in asked.ways:
            folders = {name: os.path.join(asked.folder or temporary, way, name.lower()) for name in CACHES}
            command = [sys.executable, *sys.argv, "--here", way]
            ended = subprocess.run(command, env=os.environ | folders, stdout=subprocess.PIPE, text=True, check=True)
            starts.append(json.loads(ended.stdout.strip().splitlines()[-1]))
            print(json.dumps(starts[-1]), flush=True)
    print(compared(starts))


if __name__ == "__main__":
    main()
