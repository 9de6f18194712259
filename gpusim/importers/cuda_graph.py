"""CUDA graphs: a dump of a captured graph's nodes and true edges (written by `gpusim.gpu.capture.graph_dump`).

The result of torch's `CUDAGraph.get_graph_data()`, saved as JSON, is read, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from gpusim.importers.model import Finding, ImportFileError, Profile, dim3, whole
from gpusim.importers.stream_json import EventFile
from gpusim.io.file_limits import MAX_PARTS

SCHEMA: Final = "gpusim-cuda-graph/1"


class _Node(msgspec.Struct):
    index: Any = None
    node_type: Any = None
    tools_id: Any = None
    kernel_name: Any = None
    grid_dim: Any = None
    block_dim: Any = None
    shared_mem_bytes: Any = None
    dependencies: Any = None


@dataclass(slots=True)
class GraphNode:
    """Node of a CUDA graph: a kernel, a copy, a memset, or a node without GPU work."""

    index: int
    kind: str
    """`kernel`, `memcpy`, `memset`, or any other name."""
    tools_id: int
    name: str
    grid: tuple[int, int, int] | None
    block: tuple[int, int, int] | None
    before: tuple[int, ...] = ()


@dataclass(slots=True)
class GraphDump:
    """Nodes of a graph; each edge is stored with its later node."""

    file: str
    nodes: list[GraphNode]
    profile: Profile
    """Description for `gpusim doctor`."""


def read_cuda_graph(pieces: Iterator[bytes], name: str) -> GraphDump:
    """Read the graph in a dump. Raises `ImportFileError`."""
    source = EventFile(pieces, name, "nodes", _Node, ("schema", "edges", "exec_graph_id", "torch"))
    nodes: list[GraphNode] = []
    for events in source.events():
        if len(nodes) + len(events) > MAX_PARTS:
            raise ImportFileError(name, f"has more than {MAX_PARTS} nodes")
        nodes += [_node(event, len(nodes) + place) for place, event in enumerate(events)]
    if not nodes:
        raise ImportFileError(name, "has no nodes")
    by_index = {node.index: node for node in nodes}
    before: dict[int, set[int]] = {node.index: set(node.before) for node in nodes}
    edges = source.rest.get("edges")
    for edge in edges if isinstance(edges, list) else []:
        if isinstance(edge, dict):
            before.setdefault(whole(edge.get("to")), set()).add(whole(edge.get("from")))
    for node in nodes:
        predecessors = before[node.index]
        if any(number not in by_index for number in predecessors):
            raise ImportFileError(name, f"node {node.index} depends on a node that does not exist")
        node.before = tuple(sorted(predecessors))
    work = sum(node.kind == "kernel" for node in nodes)
    profile = Profile(file=name, format="cuda-graph", writer="a dump of a CUDA graph", has_times=False, nodes=work)
    profile.quality = "graph"
    profile.findings.append(
        Finding(
            "no-times",
            f"a CUDA graph has {work} kernels and their true edges, and no times",
            "give it together with a profile of its replay: `gpusim import PROFILE GRAPH.json`",
        )
    )
    return GraphDump(name, nodes, profile)


def _node(event: _Node, place: int) -> GraphNode:
    kind = str(event.node_type).lower()
    kind = next((known for known in ("kernel", "memcpy", "memset") if known in kind), kind[:40])
    before = event.dependencies if isinstance(event.dependencies, list) else []
    return GraphNode(
        index=whole(event.index, place),
        kind=kind,
        tools_id=whole(event.tools_id, 0),
        name=event.kernel_name if isinstance(event.kernel_name, str) else "",
        grid=dim3(event.grid_dim),
        block=dim3(event.block_dim),
        before=tuple(number for item in before if (number := whole(item)) >= 0),
    )
