"""One step optimized with kernels chosen region by region and without, timed in turns. Needs a GPU.

python benchmarks/regions.py validate/networks/experts.py:experts_small infer 2
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from typing import Any

from gpusim.gpu.capture.models import load_step
from gpusim.gpu.device import require_gpu, set_precision
from gpusim.gpu.optimize import cache, make
from gpusim.gpu.optimize.front import optimize
from gpusim.gpu.optimize.peers import tensors_of, user_step
from gpusim.gpu.replay.timing import time_interleaved

#: Search budget, that of `validate/compile.toml`.
BUDGET_S = 9.0
BEGIN = time.perf_counter()


def say(*words: object) -> None:
    print(f"[{time.perf_counter() - BEGIN:6.1f}]", *words, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("spec")
    parser.add_argument("mode", choices=("infer", "train"))
    parser.add_argument("batch", type=int)
    parser.add_argument("--dtype", default="tf32")
    parser.add_argument("--memory-format", default="contiguous")
    asked = parser.parse_args()
    os.environ[cache.VARIABLE] = ""  # each is searched
    device = require_gpu()
    set_precision(asked.dtype)
    step = load_step(asked.spec, mode=asked.mode, batch=asked.batch, dtype=asked.dtype,
                     memory_format=asked.memory_format, device=device, seed=0)  # fmt: skip
    allowed = dict(make.CHOICE_S)
    steps: dict[str, Any] = {}
    for name, limits in (("alone", dict.fromkeys(allowed, 0.0)), ("by region", allowed)):
        make.CHOICE_S.update(limits)
        model = copy.deepcopy(step.module)
        begin = time.perf_counter()
        target = model if step.loss is None else user_step(step, model, model)
        steps[name] = optimize(target, tensors_of(step), budget_s=BUDGET_S, say=say)
        say(f"{name}: optimized in {time.perf_counter() - begin:.1f} s; {getattr(steps[name], 'gain', None)}")
    calls = {name: (lambda each=each: each(*tensors_of(step))) for name, each in steps.items()}
    for name, timing in time_interleaved(calls, rounds=15, round_ms=20.0).items():
        say(f"{name}: {timing.median_ns / 1e3:.1f} us a call ({timing.lo_ns / 1e3:.1f} to {timing.hi_ns / 1e3:.1f})")


if __name__ == "__main__":
    main()
