"""A CUDA driver for `gpusim.gpu.optimize.graph_copies` without a GPU: graphs of kernels that copy bytes."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpusim.gpu.optimize import graph_copies
from gpusim.gpu.optimize.graph_copies import KERNEL_NODE, _Table

FUNCTION = 77
#: Numbers of a graph's nodes; other kinds of nodes than kernels have another type.
MOST_NODES, OTHER_NODE = 1_000, 6

_graphs: list[FakeGraph] = []


class FakeGraph:
    """A graph on the host: what is recorded while it is entered runs at each replay."""

    recording: FakeGraph | None = None

    def __init__(self) -> None:
        self.nodes: list[_Table | Callable[[], object]] = []
        """Tables of copies, and other work."""
        _graphs.append(self)
        self._number = len(_graphs)

    def __enter__(self) -> FakeGraph:
        FakeGraph.recording = self
        return self

    def __exit__(self, *_: object) -> None:
        FakeGraph.recording = None

    def raw_cuda_graph(self) -> int:
        return self._number

    def raw_cuda_graph_exec(self) -> int:
        return self._number

    def replay(self) -> None:
        for node in self.nodes:
            if isinstance(node, _Table):
                _copy(node)
            else:
                node()


def _copy(table: _Table) -> None:
    for place in range(table.tensors):
        if table.bytes[place]:
            ctypes.memmove(table.targets[place], table.sources[place], table.bytes[place])


def _table_at(arguments: Any) -> _Table:
    """Return a copy of the table that is a kernel's argument: a node keeps its own."""
    table = _Table.from_buffer_copy(ctypes.string_at(arguments[0], ctypes.sizeof(_Table)))
    assert 0 <= table.tensors <= graph_copies.MOST_TENSORS
    return table


def _node(handle: ctypes.c_void_p) -> tuple[FakeGraph, int]:
    assert handle.value is not None
    number, place = divmod(handle.value, MOST_NODES)
    return _graphs[number - 1], place


class FakeDriver:
    """The driver's calls that copies need, with the driver's arguments."""

    def function(self, name: str) -> Callable[[ctypes.c_void_p, ctypes.c_void_p, Any], int]:
        assert name == "cuGraphExecKernelNodeSetParams_v2"

        def change(execution: ctypes.c_void_p, handle: ctypes.c_void_p, params: Any) -> int:
            graph, place = _node(handle)
            assert graph.raw_cuda_graph_exec() == execution.value
            assert params._obj.func == FUNCTION
            graph.nodes[place] = _table_at(params._obj.arguments)
            return 0

        return change

    def call(self, name: str, *given: Any) -> None:
        getattr(self, name)(*given)

    def cuLaunchKernel(self, function: ctypes.c_void_p, blocks: ctypes.c_uint, *given: Any) -> None:  # noqa: N802
        *sizes, _, arguments, extra = given
        table = _table_at(arguments)
        assert function.value == FUNCTION
        assert extra is None
        assert [size.value for size in sizes] == [1, 1, graph_copies.THREADS, 1, 1, 0]
        assert blocks.value == max(1, table.first_block[table.tensors])
        if FakeGraph.recording is None:
            _copy(table)
        else:
            FakeGraph.recording.nodes.append(table)

    def cuGraphGetNodes(self, raw: ctypes.c_void_p, handles: Any, count: Any) -> None:  # noqa: N802
        assert raw.value is not None
        nodes = _graphs[raw.value - 1].nodes
        count._obj.value = len(nodes)
        if handles is not None:
            handles[:] = [MOST_NODES * raw.value + place for place in range(len(nodes))]

    def cuGraphNodeGetType(self, handle: ctypes.c_void_p, kind: Any) -> None:  # noqa: N802
        graph, place = _node(handle)
        kind._obj.value = KERNEL_NODE if isinstance(graph.nodes[place], _Table) else OTHER_NODE

    def cuGraphKernelNodeGetParams_v2(self, handle: ctypes.c_void_p, params: Any) -> None:  # noqa: N802
        graph, place = _node(handle)
        params._obj.func = FUNCTION
        params._obj.arguments = graph_copies._arguments(graph.nodes[place])  # type: ignore[arg-type]


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the fake driver in place of CUDA's, for this process's only GPU."""
    monkeypatch.setattr(graph_copies, "Driver", FakeDriver)
    monkeypatch.setattr(graph_copies, "_function", functools.cache(graph_copies._function.__wrapped__))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    kernel = SimpleNamespace(func=ctypes.c_void_p(FUNCTION))
    monkeypatch.setattr(torch.cuda, "_compile_kernel", lambda source, name: kernel, raising=False)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "raw_cuda_graph_exec", None, raising=False)
