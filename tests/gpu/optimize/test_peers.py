"""Peers hold all that their CUDA graphs touch: a graph itself keeps no memory from before it alive.

Without a GPU: the graph is a stand-in, and what would be freed is seen by weak references.
"""

from __future__ import annotations

import gc
import types
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from gpusim.formats.trace import Timing
from gpusim.gpu.capture.models import ModelStep
from gpusim.gpu.optimize import peers
from tests.support.optimizing import batches, net


class Graph:
    """A CUDA graph's stand-in, which counts its replays."""

    replays = 0

    def replay(self) -> None:
        Graph.replays += 1


@pytest.fixture
def optimizers(monkeypatch: pytest.MonkeyPatch) -> list[torch.optim.Optimizer]:
    """Let hand-made graphs be recorded without a GPU; returns weak references to the optimizers made."""
    made: list[Any] = []

    class Watched(torch.optim.SGD):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(weakref.ref(self))

    stream = types.SimpleNamespace(wait_stream=lambda _: None)
    for name, value in {
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda _: nullcontext(),
        "CUDAGraph": Graph,
        "mem_get_info": lambda: (1 << 40, 1 << 40),
        "graph": lambda _: nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "compile", lambda model: model)
    monkeypatch.setattr(torch.optim, "SGD", Watched)
    monkeypatch.setattr(peers, "own_workspaces", lambda streams: nullcontext())
    monkeypatch.setattr(peers, "brief_ns", lambda replay: 100_000.0)
    # The second of the recordings is the fastest.
    times = {str(number): 3 for number in range(peers.RECORDINGS)} | {"1": 1, "2": 2}
    monkeypatch.setattr(
        peers,
        "time_interleaved",
        lambda runs, *_: {name: Timing(median_ns=times[name], lo_ns=0, hi_ns=9, rounds=1) for name in runs},
    )
    return made


def training() -> tuple[ModelStep, nn.Module]:
    ((x, y),) = batches(1)
    model = net()
    return ModelStep("net", model, (x,), y, lambda out, target: nn.functional.cross_entropy(out, target)), model


def test_a_hand_made_graph_holds_its_optimizers_states(optimizers: list[Any]) -> None:
    """A recording of torch's empties the caches, so that a graph's next replay would write to unmapped memory."""
    step, model = training()
    call = peers._own_graph(step, model)
    gc.collect()
    (optimizer,) = (each() for each in optimizers)
    assert optimizer is not None
    assert len(optimizer.state) == len(list(model.parameters()))
    momenta = [weakref.ref(state["momentum_buffer"]) for state in optimizer.state.values()]
    del optimizer
    gc.collect()
    assert all(each() is not None for each in momenta)
    del call
    gc.collect()
    assert all(each() is None for each in momenta), "memory that nothing needs any more stays allocated"


def test_a_hand_made_graph_holds_gradients_that_the_user_drops(optimizers: list[Any]) -> None:
    step, model = training()
    call = peers._own_graph(step, model)
    left = [weakref.ref(parameter.grad) for parameter in model.parameters()]
    model.zero_grad()
    gc.collect()
    assert all(each() is not None for each in left)
    del call


def test_a_call_of_a_hand_made_graph_copies_in_and_out(optimizers: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    step, model = training()
    call = peers._own_graph(step, model)
    taken: list[list[torch.Tensor]] = []
    monkeypatch.setattr(call, "_copy_in", taken.append)
    before = Graph.replays
    x, y = batches(2)[1]
    first, second = call(x, y), call(x, y)
    assert Graph.replays == before + 2
    assert [(one is x, other is y) for one, other in taken] == [(True, True)] * 2
    assert torch.equal(first, second)
    assert first.data_ptr() != second.data_ptr(), "a later call would overwrite a result"


@pytest.mark.parametrize(
    ("free_bytes", "fails_at", "one_ns", "recordings"),
    [
        pytest.param(1 << 40, 99, 100_000, peers.RECORDINGS, id="all"),
        pytest.param(199, 99, 100_000, 1, id="no room"),
        pytest.param(1 << 40, 3, 100_000, 2, id="the third fails"),
        pytest.param(1 << 40, 99, 70_000_000, 2, id="two take 4.5 s to time"),
    ],
)
def test_a_hand_made_graph_has_the_peak_of_its_first_recording_and_room_and_time_for_the_others(
    free_bytes: int,
    fails_at: int,
    one_ns: int,
    recordings: int,
    optimizers: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Room for two recordings of 100 bytes must be free for each further one; the first takes its own 100."""
    peaks, frees = iter(range(100, 200)), iter((free_bytes + 100,))
    timed: list[int] = []
    recorded: list[int] = []

    def graph(_: Any) -> Any:
        recorded.append(len(recorded) + 1)
        if recorded[-1] == fails_at:
            raise torch.cuda.OutOfMemoryError("no memory")
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: next(peaks))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (next(frees, free_bytes), 1 << 40))
    monkeypatch.setattr(peers, "brief_ns", lambda replay: one_ns)
    time_interleaved = peers.time_interleaved

    def counted(runs: dict[str, Any], *options: Any) -> Any:
        timed.append(len(runs))
        return time_interleaved(runs, *options)

    monkeypatch.setattr(peers, "time_interleaved", counted)
    step, model = training()
    call = peers._own_graph(step, model)
    assert isinstance(call, peers._HandMade)
    assert call.peak_bytes == 100
    assert timed == [recordings]
