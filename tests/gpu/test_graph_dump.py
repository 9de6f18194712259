"""Dump of a captured CUDA graph, with a stand-in for the graph: torch's data is written and read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from gpusim.errors import GpuError
from gpusim.gpu.capture.graph_dump import dump_graph
from gpusim.importers.cuda_graph import read_cuda_graph
from gpusim.importers.stream_json import unpacked


class Graph:
    """Result of torch 2.13 for a fork of two kernels over an event."""

    def get_graph_data(self) -> dict[str, Any]:
        kernels = [("kernel", "a", []), ("event_record", None, [0]), ("kernel", "b", [1]), ("memcpy", None, [0])]
        nodes = [
            {"index": n, "node_type": kind, "tools_id": 2**33 + n, "kernel_name": name, "dependencies": before}
            for n, (kind, name, before) in enumerate(kernels)
        ]
        return {"exec_graph_id": 2, "nodes": nodes}


def test_dump_of_a_graph_is_read_back_with_its_edges(tmp_path: Path) -> None:
    path = tmp_path / "g.json"
    assert dump_graph(Graph(), path) == 4
    with path.open("rb") as file:
        found = read_cuda_graph(unpacked(file, path.stat().st_size, "g"), "g")
    assert [(node.kind, node.name, node.before) for node in found.nodes] == [
        ("kernel", "a", ()), ("event_record", "", (0,)), ("kernel", "b", (1,)), ("memcpy", "", (0,)),
    ]  # fmt: skip
    assert found.nodes[3].tools_id == 2**33 + 3


def test_torch_without_access_to_a_graph_is_refused_and_nothing_written(tmp_path: Path) -> None:
    with pytest.raises(GpuError, match=r"2\.11"):
        dump_graph(object(), tmp_path / "g.json")
    assert not list(tmp_path.iterdir())
