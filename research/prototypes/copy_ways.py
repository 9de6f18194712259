"""Experiment: ways to copy a call's inputs and results around a CUDA graph, or inside it.

    python research/prototypes/copy_ways.py OUT.json

- `lists`: one kernel of torch's for all tensors of a type, before and after the graph (`torch._foreach_copy_`).
- `each`: a `copy_` a tensor, before and after the graph.
- `copy nodes`: copies are nodes of the graph; the host sets their addresses before each launch.
- `kernel nodes`: the same with a kernel that copies.

OUT has, per case and way, the GPU's time of a call, the wall time of calls in a row, and the host's time; all in ns, as
medians. Results are compared first, over many calls without a wait. Without copies: the GPU's time of the graph as
torch launches it, as the driver instantiates it, and with a copy of 4 KiB as its only root.
"""

from __future__ import annotations

import argparse
import ctypes
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from copies_in_graph import CASES, Case, in_a_row_ns, median, prepared
from triton import language as tl

from gpusim.gpu.device import provenance, require_gpu
from gpusim.gpu.replay.timing import host_ns_behind, queued_ns

BLOCK, CALLS = 1024, 200
KERNEL_NODE, MEMCPY_NODE, DEVICE_TO_DEVICE = 0, 1, 3


@triton.jit  # type: ignore[untyped-decorator]
def copy_words(source, target, words, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Copy words of 4 bytes."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < words
    tl.store(target + place, tl.load(source + place, mask=mask), mask=mask)


class KernelParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2 of the driver."""

    _fields_ = (
        ("func", ctypes.c_void_p),
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("params", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.c_void_p),
        ("kern", ctypes.c_void_p),
        ("ctx", ctypes.c_void_p),
    )


class Driver:
    """Calls of the driver and of the runtime that torch has loaded."""

    def __init__(self) -> None:
        self.driver = ctypes.CDLL("libcuda.so.1")
        maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        self.runtime = ctypes.CDLL(next(line.split()[-1] for line in maps if "libcudart.so" in line))

    def __call__(self, name: str, *arguments: Any) -> None:
        library = self.driver if name.startswith("cu") and not name.startswith("cuda") else self.runtime
        code = getattr(library, name)(*arguments)
        if code:
            raise SystemExit(f"error {code} of {name}")

    def nodes(self, raw: ctypes.c_void_p) -> list[ctypes.c_void_p]:
        count = ctypes.c_size_t()
        self("cuGraphGetNodes", raw, None, ctypes.byref(count))
        handles = (ctypes.c_void_p * count.value)()
        self("cuGraphGetNodes", raw, handles, ctypes.byref(count))
        return [ctypes.c_void_p(handle) for handle in handles]

    def kind(self, node: ctypes.c_void_p) -> int:
        kind = ctypes.c_int()
        self("cuGraphNodeGetType", node, ctypes.byref(kind))
        return kind.value

    def kernel(self, node: ctypes.c_void_p) -> KernelParams:
        params = KernelParams()
        self("cuGraphKernelNodeGetParams_v2", node, ctypes.byref(params))
        return params


class Inside:
    """A graph with copies of its own, whose addresses are set before each launch."""

    def __init__(self, driver: Driver, case: tuple[list[Any], list[Any], Callable[[], None]], kernels: bool) -> None:
        self.driver, (self.inputs, self.results, body) = driver, case
        self.kernels = kernels
        sources = [torch.empty_like(each) for each in self.inputs]
        targets = [torch.empty_like(each) for each in self.results]
        self.keep = (sources, targets)

        def copy(source: torch.Tensor, target: torch.Tensor) -> None:
            if kernels:
                copy_words[(triton.cdiv(source.numel(), BLOCK),)](source, target, source.numel(), BLOCK=BLOCK)
            else:
                target.copy_(source)

        def work() -> None:
            for source, target in zip(sources, self.inputs, strict=True):
                copy(source, target)
            body()
            for source, target in zip(self.results, targets, strict=True):
                copy(source, target)

        work()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(self.graph):
            work()
        raw = ctypes.c_void_p(self.graph.raw_cuda_graph())
        self.execution = ctypes.c_void_p()
        driver("cuGraphInstantiateWithFlags", ctypes.byref(self.execution), raw, ctypes.c_ulonglong(1))
        self.stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        nodes = self._copies(raw, {each.data_ptr() for each in (*sources, *targets)})
        self.before = [nodes[each.data_ptr()] for each in sources]
        self.after = [nodes[each.data_ptr()] for each in targets]

    def _copies(self, raw: ctypes.c_void_p, addresses: set[int]) -> dict[int, Any]:
        """Return the copies' nodes by the address outside that each has now."""
        found: dict[int, Any] = {}
        of_kind = [node for node in self.driver.nodes(raw) if self.driver.kind(node) == (not self.kernels)]
        if not self.kernels:
            # Nodes come in the order of recording, and only copies are of this kind.
            for node, tensor in zip(of_kind, [t for each in self.keep for t in each], strict=True):
                found[tensor.data_ptr()] = node
            return found
        for node in of_kind:
            params = self.driver.kernel(node)
            ends = [ctypes.cast(params.params[n], ctypes.POINTER(ctypes.c_uint64))[0] for n in (0, 1)]
            for address in addresses.intersection(ends):
                found[address] = (node, params)
        return found

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        made = [torch.empty_like(each) for each in self.results]
        for node, source, target in zip(self.before, tensors, self.inputs, strict=True):
            self._set(node, source, target)
        for node, source, target in zip(self.after, self.results, made, strict=True):
            self._set(node, source, target)
        self.driver.driver.cuGraphLaunch(self.execution, self.stream)
        return made

    def _set(self, node: Any, source: torch.Tensor, target: torch.Tensor) -> None:
        if not self.kernels:
            code = self.driver.runtime.cudaGraphExecMemcpyNodeSetParams1D(
                self.execution,
                node,
                ctypes.c_void_p(target.data_ptr()),
                ctypes.c_void_p(source.data_ptr()),
                ctypes.c_size_t(source.nbytes),
                DEVICE_TO_DEVICE,
            )
        else:
            handle, params = node
            ctypes.cast(params.params[0], ctypes.POINTER(ctypes.c_uint64))[0] = source.data_ptr()
            ctypes.cast(params.params[1], ctypes.POINTER(ctypes.c_uint64))[0] = target.data_ptr()
            code = self.driver.driver.cuGraphExecKernelNodeSetParams_v2(self.execution, handle, ctypes.byref(params))
        if code:
            raise SystemExit(f"error {code} of setting a node")


def launched(driver: Driver, body: Callable[[], None], root: bool = False) -> Callable[[], object]:
    """Return a launch of a graph that the driver instantiates; it is never destroyed."""
    source, target = torch.zeros(2, 1024, device="cuda").unbind()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        if root:
            target.copy_(source)
        body()
    execution, raw = ctypes.c_void_p(), ctypes.c_void_p(graph.raw_cuda_graph())
    driver("cuGraphInstantiateWithFlags", ctypes.byref(execution), raw, ctypes.c_ulonglong(1))
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)

    def launch() -> None:
        _ = graph, source, target  # they live as long as this function
        driver("cuGraphLaunch", execution, stream)

    return launch


def measured(case: Case, driver: Driver) -> dict[str, Any]:
    """Check and time a case."""
    parts = prepared(case)
    inputs, results, body = parts
    body()
    torch.cuda.synchronize()
    alone = torch.cuda.CUDAGraph()
    with torch.cuda.graph(alone):
        body()
    batches = [[torch.full_like(each, float(1 + n)) for each in inputs] for n in range(3)]

    def lists(batch: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        torch._foreach_copy_(inputs, list(batch), non_blocking=True)
        alone.replay()
        made = [torch.empty_like(result) for result in results]
        torch._foreach_copy_(made, results, non_blocking=True)
        return made

    def each(batch: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        for target, source in zip(inputs, batch, strict=True):
            target.copy_(source, non_blocking=True)
        alone.replay()
        return [result.clone() for result in results]

    ways: dict[str, Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]] = {"lists": lists, "each": each}
    for name, kernels in (("copy nodes", False), ("kernel nodes", True)):
        try:
            ways[name] = Inside(driver, parts, kernels)
        except (SystemExit, Exception) as error:
            print(case.name, name, repr(error), flush=True)
    graphs = {"torch": alone.replay, "driver": launched(driver, body), "one root": launched(driver, body, root=True)}
    told: dict[str, Any] = {"case": case.name}
    told["graph"] = {name: round(median(lambda launch=launch: queued_ns(launch))) for name, launch in graphs.items()}
    for name, way in ways.items():
        wrong = 0
        kept = [(call % 3, way(batches[call % 3])) for call in range(CALLS)]
        torch.cuda.synchronize()
        for which, made in kept:
            wrong += not all(torch.equal(one, torch.full_like(one, 2.0 * (1 + which))) for one in made)
        told[name] = {
            "wrong": wrong,
            "gpu": round(median(lambda way=way: queued_ns(lambda: way(batches[0])))),
            "host": round(median(lambda way=way: host_ns_behind(lambda: way(batches[0])))),
            "in a row": round(median(lambda way=way: in_a_row_ns(lambda: way(batches[0])))),
        }
    return told


def main() -> None:
    """Time all cases, and write after each."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("out", type=Path)
    given = arguments.parse_args()
    require_gpu()
    busy = torch.ones(2048, 2048, device="cuda")
    head = provenance("python research/prototypes/copy_ways.py OUT.json", lambda: busy @ busy)
    rows, driver = [], Driver()
    with torch.no_grad():
        for case in CASES:
            rows.append(measured(case, driver))
            print(json.dumps(rows[-1]), flush=True)
            given.out.write_text(json.dumps(head | {"cases": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
