"""`torch.compile(model, backend="gpusim")` beside `gpusim.optimize`, timed in turns. Needs a GPU.

    python benchmarks/backend.py torchvision:googlenet infer 1

In training both run forward, loss and backward: the optimizer is eager code of the user's with a backend. The loss is
compiled with the model. Ends with their ratio; the aim is at most 1.03 at inference, and 1.05 in training.
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from collections.abc import Callable
from typing import Any

import torch

from gpusim.gpu.capture.models import ModelStep, load_step
from gpusim.gpu.device import require_gpu, set_precision
from gpusim.gpu.optimize import cache
from gpusim.gpu.optimize.front import optimize
from gpusim.gpu.optimize.measure import batches_of, times_in_turns
from gpusim.gpu.optimize.peers import tensors_of

#: Search budget of the whole step, that of `validate/compile.toml`; a backend's forward and backward get it each.
BUDGET_S = 9.0
BEGIN = time.perf_counter()

Call = Callable[..., Any]


def say(*words: object) -> None:
    print(f"[{time.perf_counter() - BEGIN:6.1f}]", *words, flush=True)


def by_optimize(step: ModelStep) -> Call:
    """Return the step, without an optimizer, as `gpusim.optimize` makes it."""
    model = copy.deepcopy(step.module)
    target = model if step.loss is None else forward_and_backward(step, model, whole(step, model))
    made: Call = optimize(target, tensors_of(step), budget_s=BUDGET_S, say=say)
    return made


def by_backend(step: ModelStep, backend: Any = "gpusim") -> Call:
    """Return the same step with the model and its loss compiled by a backend of torch.compile."""
    model = copy.deepcopy(step.module)
    options = {"options": {"budget_s": BUDGET_S}} if backend == "gpusim" else {}
    if step.loss is None:
        compiled = torch.compile(model, backend=backend, **options)

        def infer(*args: Any) -> Any:
            with torch.no_grad():
                return compiled(*args)

        return infer
    return forward_and_backward(step, model, torch.compile(whole(step, model), backend=backend, **options))


def whole(step: ModelStep, model: torch.nn.Module) -> Call:
    """Return model and loss as one function of the batch."""
    targets = 0 if step.target is None else 1
    loss = step.loss
    assert loss is not None

    def forward(*args: Any) -> Any:
        return loss(model(*args[: len(args) - targets]), args[-1] if targets else None)

    return forward


def forward_and_backward(step: ModelStep, model: torch.nn.Module, forward: Call) -> Call:
    """Return a training step without its optimizer."""

    def train(*args: Any) -> torch.Tensor:
        model.zero_grad()
        loss = forward(*args)
        loss.backward()
        detached: torch.Tensor = loss.detach()
        return detached

    return train


def compare(step: ModelStep, backend: Any = "gpusim") -> float:
    """Time both in turns, print their times, and return the backend's over that of `optimize`."""
    calls: dict[str, Call] = {}
    for name, make in (("optimize", by_optimize), ("backend", lambda step: by_backend(step, backend))):
        begin = time.perf_counter()
        calls[name] = make(step)
        calls[name](*tensors_of(step))
        say(f"{name}: ready in {time.perf_counter() - begin:.1f} s; {getattr(calls[name], 'gain', '')}")
    times = times_in_turns(calls, batches_of(step))
    for name, timing in times.items():
        say(f"{name}: {timing.median_ns / 1e3:.1f} us a call ({timing.lo_ns / 1e3:.1f} to {timing.hi_ns / 1e3:.1f})")
    return times["backend"].median_ns / times["optimize"].median_ns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    say(f"the backend takes {compare(step):.3f} of the time of optimize")


if __name__ == "__main__":
    main()
