"""The two states of launches: the calls that make each, and on a GPU, that they do."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from gpusim.errors import GpuError
from gpusim.gpu import launch_state
from gpusim.gpu.launch_state import CONTEXT_BYTES, STREAMS, make_launches_fast, make_launches_slow
from gpusim.gpu.optimize.on_cuda import CudaExecutor
from gpusim.gpu.replay.timing import queued_ns

#: Kernels of a chain, and cycles of each: short ones, so that the time between them counts.
KERNELS, CYCLES = 120, 1500


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Pretend that there is a GPU with room for a context; return the calls that were made."""
    log: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (CONTEXT_BYTES, 2 * CONTEXT_BYTES))
    return log


class FakeDriver:
    """A driver with torch's context 1 and a new one, 77, on device 3; it refuses one of its calls."""

    def __init__(self, log: list[str], refused: str = "") -> None:
        self.log, self.refused, self.stack, self.alive = log, refused, [1], {1}

    def call(self, name: str, *arguments: Any) -> None:
        self.log.append(name)
        if name == self.refused:
            raise GpuError(f"{name} says CUDA_ERROR_OUT_OF_MEMORY")
        match name:
            case "cuCtxGetDevice":
                arguments[0]._obj.value = 3
            case "cuCtxCreate_v2":
                made, _, device = arguments
                assert device.value == 3
                made._obj.value = 77
                self.stack.append(77)
                self.alive.add(77)
            case "cuCtxPopCurrent_v2":
                self.stack.pop()
            case "cuCtxDestroy_v2":
                self.alive.remove(arguments[0].value)


def test_slow_state_is_made_by_kernels_on_streams_of_their_own(gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    current: list[object] = []

    @contextmanager
    def on(stream: object) -> Iterator[None]:
        current.append(stream)
        yield

    def stream() -> object:
        made.append(object())
        return made[-1]

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: gpu.append("kernel"))
    make_launches_slow()
    assert gpu == ["kernel"] * STREAMS + ["synchronize"]
    assert current == made
    assert len(made) == STREAMS


def test_fast_state_is_made_by_a_context_and_torchs_is_current_again(
    gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = FakeDriver(gpu)
    monkeypatch.setattr(launch_state, "Driver", lambda: driver)
    assert make_launches_fast()
    assert gpu == ["synchronize", "cuCtxGetDevice", "cuCtxCreate_v2", "cuCtxPopCurrent_v2", "cuCtxDestroy_v2"]
    assert (driver.stack, driver.alive) == ([1], {1})


def test_the_executor_of_a_gpu_makes_launches_fast_on_its_own_device(
    gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def on(device: object) -> Iterator[None]:
        gpu.append(f"on {device}")
        yield

    executor = object.__new__(CudaExecutor)
    executor.device = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(launch_state, "Driver", lambda: FakeDriver(gpu))
    assert executor.make_launches_fast()
    assert gpu[0] == "on cuda:1"
    assert gpu[-1] == "cuCtxDestroy_v2"


@pytest.mark.parametrize("refused", ["cuCtxGetDevice", "cuCtxCreate_v2"])
def test_refused_context_is_left_alone(gpu: list[str], monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    monkeypatch.setattr(launch_state, "Driver", lambda: FakeDriver(gpu, refused))
    assert not make_launches_fast()
    assert gpu[-1] == refused


def test_no_context_is_made_where_it_might_not_fit(gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (CONTEXT_BYTES - 1, 2 * CONTEXT_BYTES))
    monkeypatch.setattr(launch_state, "Driver", lambda: FakeDriver(gpu))
    assert not make_launches_fast()
    assert gpu == ["synchronize"]


def test_a_driver_that_is_missing_is_no_error(gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert not make_launches_fast()


def test_nothing_happens_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    make_launches_slow()
    assert not make_launches_fast()


@pytest.mark.gpu
def test_chain_of_short_kernels_takes_less_time_in_the_fast_state() -> None:
    """Fast by a tenth on an H200: 1,281 in place of 1,458 ns a kernel. Elsewhere neither state may exist."""
    if "H200" not in torch.cuda.get_device_name():
        pytest.skip("the states of launches are measured on an H200 only")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(KERNELS):
            torch.cuda._sleep(CYCLES)
    slow_ns = queued_ns(graph.replay)
    for _ in range(2):
        assert make_launches_fast()
        assert _replayed_ns(graph) < 0.95 * slow_ns
        make_launches_slow()
        assert _replayed_ns(graph) > 0.97 * slow_ns
    value = torch.ones(3, device="cuda")  # torch's context is the current one
    assert (value + 1).tolist() == [2.0, 2.0, 2.0]


def _replayed_ns(graph: torch.cuda.CUDAGraph, replays: int = 20) -> float:
    """Return the time of a replay in ns, in whatever state launches are."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(4_000_000)
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e6 / replays
