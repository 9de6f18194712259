"""CUDA graphs for `gpusim.gpu.optimize.graph_copies` without a GPU: kernels that copy bytes, and work between them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from gpusim.gpu.optimize import graph_copies
from gpusim.gpu.optimize.graph_copies import _KernelParams, _Table

FUNCTION = ctypes.c_void_p(77)


def _table_at(arguments: Any) -> _Table:
    """Return a copy of the table that is a kernel's argument: a node keeps its own."""
    return _Table.from_buffer_copy(ctypes.string_at(arguments[0], ctypes.sizeof(_Table)))


class FakeGraph:
    """A graph on the host: what is recorded while it is entered runs at each replay."""

    recording: FakeGraph | None = None

    def __init__(self) -> None:
        self.nodes: list[_Table | Callable[[], object]] = []
        """Tables of copies, and other work."""

    def __enter__(self) -> FakeGraph:
        FakeGraph.recording = self
        return self

    def __exit__(self, *_: object) -> None:
        FakeGraph.recording = None

    def raw_cuda_graph_exec(self) -> int:
        return 1

    def replay(self) -> None:
        for node in self.nodes:
            if not isinstance(node, _Table):
                node()
                continue
            for place in range(node.tensors):
                if node.bytes[place]:
                    ctypes.memmove(node.targets[place], node.sources[place], node.bytes[place])


class FakeDriver:
    """The driver's only call that is made often; a node is its graph and its place there."""

    def function(self, name: str) -> Callable[[object, tuple[FakeGraph, int], Any], int]:
        assert name == "cuGraphExecKernelNodeSetParams_v2"

        def change(_: object, node: tuple[FakeGraph, int], params: Any) -> int:
            graph, place = node
            graph.nodes[place] = _table_at(params._obj.arguments)
            return 0

        return change


def _launch(_: object, blocks: int, arguments: Any) -> None:
    table = _table_at(arguments)
    assert blocks == max(1, table.first_block[table.tensors])
    assert FakeGraph.recording is not None
    FakeGraph.recording.nodes.append(table)


def _kernel_nodes(graph: FakeGraph) -> Iterator[tuple[tuple[FakeGraph, int], _KernelParams]]:
    for place, node in enumerate(graph.nodes):
        if isinstance(node, _Table):
            yield (graph, place), _KernelParams(FUNCTION, arguments=graph_copies._arguments(node))


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put fake graphs in place of the driver's."""
    monkeypatch.setattr(graph_copies, "_function", lambda _: FUNCTION)
    monkeypatch.setattr(graph_copies, "_launch", _launch)
    monkeypatch.setattr(graph_copies, "_kernel_nodes", _kernel_nodes)
    monkeypatch.setattr(graph_copies, "Driver", FakeDriver)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "raw_cuda_graph_exec", None, raising=False)
