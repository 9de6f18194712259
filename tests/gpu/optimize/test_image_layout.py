"""Which layout of images suits a step's convolutions: each distinct call is timed in both."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from gpusim.formats.trace import Trace
from gpusim.gpu.capture.in_memory import function_step, options_of
from gpusim.gpu.capture.rebuild import bare_trace
from gpusim.gpu.capture.record import record
from gpusim.gpu.capture.user_step import Untouched, record_step
from gpusim.gpu.optimize import image_layout
from gpusim.gpu.optimize.image_layout import layout_times

CPU = torch.device("cpu")


def trace_of(step: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Trace:
    user = function_step(step, x, CPU)
    options = options_of(user, "test.step", "infer", "fp32", False, 0, False, "aten")
    with Untouched(user).around() as untouched:
        recorded = record(record_step(user, untouched, options.seed))
    return bare_trace(options, user, recorded, ())


def clock(timed: list[tuple[int, ...]]) -> Callable[[Callable[[], object]], float]:
    """Return a clock: a call on images channels last takes 10 ns, on others 30; each is run, and noted by its size."""

    def time_ns(call: Callable[[], object]) -> float:
        assert isinstance(call, partial)
        call()
        image, weight = call.args[:2]
        timed.append(tuple(image.shape))
        last = {tensor.is_contiguous(memory_format=torch.channels_last) for tensor in (image, weight)}
        assert len(last) == 1
        return 10.0 if last == {True} else 30.0

    return time_ns


def test_equal_convolutions_are_timed_once_and_count_each() -> None:
    """Two equal ones and one of another size: 3 x 30 ns, and 3 x 10. One over time has no images, and is left out."""
    first, second, third = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 2, 2)
    over_time = nn.Conv1d(2, 2, 3)
    for layer in (first, second, third, over_time):
        layer.requires_grad_(False)

    def step(x: torch.Tensor) -> torch.Tensor:
        return over_time(third(second(first(x))).mean(2))

    trace = trace_of(step, torch.randn(2, 4, 6, 6))
    timed: list[tuple[int, ...]] = []
    state = torch.random.get_rng_state()
    times = layout_times(trace, CPU, clock(timed))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert (times.as_recorded_ns, times.channels_last_ns) == (90.0, 30.0)
    assert timed == [(2, 4, 6, 6)] * 4


def test_a_convolution_that_fails_in_one_layout_counts_in_neither() -> None:
    layer = nn.Conv2d(4, 4, 3).requires_grad_(False)
    timed: list[tuple[int, ...]] = []
    good = clock(timed)

    def time_ns(call: Callable[[], object]) -> float:
        if timed:
            raise torch.cuda.OutOfMemoryError("none left")
        return good(call)

    times = layout_times(trace_of(layer, torch.randn(1, 4, 5, 5)), CPU, time_ns)
    assert (times.as_recorded_ns, times.channels_last_ns) == (0.0, 0.0)
    assert times.text == "none of its convolutions could be timed"


def test_a_call_that_takes_long_ends_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first takes the whole limit, in each layout; the second is not timed."""
    now_s = [0.0]
    monkeypatch.setattr(image_layout, "perf_counter", lambda: now_s[0])
    layers = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)).requires_grad_(False)
    timed: list[tuple[int, ...]] = []
    good = clock(timed)

    def time_ns(call: Callable[[], object]) -> float:
        now_s[0] += image_layout.LIMIT_S + 1
        return good(call)

    times = layout_times(trace_of(layers, torch.randn(1, 4, 7, 7)), CPU, time_ns)
    assert timed == [(1, 4, 7, 7)] * 2
    assert times.text == "1 of its 2 convolutions take 0.03 us as recorded, 0.01 us channels last"
