"""Dump of a captured CUDA graph with its true edges, for `gpusim import PROFILE GRAPH.json`.

torch 2.13 and later list a graph's nodes (`CUDAGraph.get_graph_data`); torch 2.11 and 2.12 need cuda-bindings. The
graph must be made with `torch.cuda.CUDAGraph(keep_graph=True)`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gpusim.errors import GpuError
from gpusim.importers.cuda_graph import SCHEMA
from gpusim.io.files import encode_json, write_bytes

_KEPT = ("index", "node_type", "tools_id", "kernel_name", "grid_dim", "block_dim", "shared_mem_bytes", "dependencies")


def dump_graph(graph: Any, path: Path) -> int:
    """Write the nodes and edges of a captured `torch.cuda.CUDAGraph` as JSON, and return the number of nodes.

    Raises `GpuError` where neither torch nor cuda-bindings lists the nodes, `OutputError` where the file cannot be
    written.
    """
    nodes, edges = _from_torch(graph) or _from_bindings(graph)
    document = {"schema": SCHEMA, "torch": str(torch.__version__), "nodes": nodes, "edges": edges}
    write_bytes(path, encode_json(document) + b"\n")
    return len(nodes)


def _from_torch(graph: Any) -> tuple[list[dict[str, Any]], list[dict[str, int]]] | None:
    """Nodes and edges from torch; None before 2.13, or with a driver without the node ids of profilers (before CUDA
    13.1).
    """
    if not hasattr(graph, "get_graph_data"):
        return None
    try:
        dumped = graph.get_graph_data()
    except (RuntimeError, ImportError):
        return None
    nodes = [{key: node[key] for key in _KEPT if key in node} for node in dumped["nodes"]]
    return nodes, [{"from": edge["from"], "to": edge["to"]} for edge in dumped.get("edges", ())]


def _kernel_name(driver: Any, params: Any) -> str:
    """Return the kernel name of a node, loaded as a function or as a library kernel; "" where unknown."""
    for ask, handle in ((driver.cuFuncGetName, params.func), (driver.cuKernelGetName, getattr(params, "kern", None))):
        if handle is not None and int(handle):
            failed, name = ask(handle)
            if int(failed) == 0:
                text = name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)
                return str(torch._C._demangle(text))  # as profilers write it
    return ""


def _from_bindings(graph: Any) -> tuple[list[dict[str, Any]], list[dict[str, int]]]:
    if not hasattr(graph, "raw_cuda_graph"):
        raise GpuError(f"torch {torch.__version__} has no access to a graph's nodes; torch 2.11 and later have")
    try:
        from cuda.bindings import driver
    except ModuleNotFoundError as cause:
        raise GpuError("the nodes of a graph need cuda-bindings (pip install cuda-bindings)") from cause

    def asked(result: tuple[Any, ...]) -> tuple[Any, ...]:
        if int(result[0]) != 0:
            raise GpuError(f"the graph's nodes cannot be read: {result[0]}; capture it with keep_graph=True")
        return result[1:]

    raw = driver.CUgraph(init_value=int(graph.raw_cuda_graph()))
    _, count = asked(driver.cuGraphGetNodes(raw, 0))
    handles, _ = asked(driver.cuGraphGetNodes(raw, count))
    place = {int(handle): number for number, handle in enumerate(handles[:count])}
    nodes = []
    for number, handle in enumerate(handles[:count]):
        (kind,) = asked(driver.cuGraphNodeGetType(handle))
        node: dict[str, Any] = {"index": number, "node_type": kind.name}
        if kind.name.endswith("KERNEL"):
            (params,) = asked(driver.cuGraphKernelNodeGetParams(handle))
            node["kernel_name"] = _kernel_name(driver, params)
            node["grid_dim"] = [params.gridDimX, params.gridDimY, params.gridDimZ]
            node["block_dim"] = [params.blockDimX, params.blockDimY, params.blockDimZ]
            node["shared_mem_bytes"] = params.sharedMemBytes
        nodes.append(node)
    result = asked(driver.cuGraphGetEdges(raw, 0))
    count = result[-1]
    befores, afters = asked(driver.cuGraphGetEdges(raw, count))[:2]
    edges = [
        {"from": place[int(before)], "to": place[int(after)]}
        for before, after in zip(befores[:count], afters[:count], strict=True)
    ]
    return nodes, edges
