"""Copies of a call's inputs and results as kernels of its own CUDA graph.

One kernel copies all inputs before anything else, another all results at the end. The host writes addresses into these
kernels before each launch, so that a call launches nothing but its graph. The host needs 22 to 62 us less than with
torch's copies around the graph, and a call of many takes up to 19 us less (research/2026-11-30-copies-in-the-graph.md).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch

from gpusim.errors import GpuError
from gpusim.gpu.driver import Driver
from gpusim.gpu.optimize.copies import fresh

#: Most tensors that a kernel copies: their table of 3.5 KiB is its argument, and arguments take 4 KiB at most.
MOST_TENSORS: Final = 126
#: Threads of a block, and bytes that it copies: two loads of 16 bytes a thread.
THREADS: Final = 256
BLOCK_BYTES: Final = THREADS * 32
#: Type of a graph's node that is a kernel (cuda.h).
KERNEL_NODE: Final = 0

_NAME: Final = "copy_tensors"
_SOURCE: Final = """
struct Table {
    long long number, tensors;
    const char* from[MOST_TENSORS];
    char* to[MOST_TENSORS];
    long long bytes[MOST_TENSORS];
    int first_block[MOST_TENSORS + 2];
};

template <typename Word>
__device__ void copy(const char* from, char* to, long long bytes) {
    const Word* words_from = reinterpret_cast<const Word*>(from);
    Word* words_to = reinterpret_cast<Word*>(to);
    const long long words = bytes / sizeof(Word);
    for (long long word = threadIdx.x; word < words; word += THREADS) words_to[word] = words_from[word];
    for (long long byte = words * sizeof(Word) + threadIdx.x; byte < bytes; byte += THREADS) to[byte] = from[byte];
}

extern "C" __global__ void copy_tensors(const Table table) {
    int low = 0, high = (int)table.tensors;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (table.first_block[middle] <= (int)blockIdx.x) low = middle; else high = middle;
    }
    const long long begin = (long long)((int)blockIdx.x - table.first_block[low]) * BLOCK_BYTES;
    const long long left = table.bytes[low] - begin;
    const long long bytes = left < BLOCK_BYTES ? left : BLOCK_BYTES;
    const char* from = table.from[low] + begin;
    char* to = table.to[low] + begin;
    const unsigned long long both = (unsigned long long)from | (unsigned long long)to;
    if (both % 16 == 0) copy<int4>(from, to, bytes);
    else if (both % 4 == 0) copy<int>(from, to, bytes);
    else if (both % 2 == 0) copy<short>(from, to, bytes);
    else copy<char>(from, to, bytes);
}
"""
_CONSTANTS: Final = {"MOST_TENSORS": MOST_TENSORS, "THREADS": THREADS, "BLOCK_BYTES": BLOCK_BYTES}


class _Table(ctypes.Structure):
    """The kernel's argument."""

    _fields_ = (
        ("number", ctypes.c_int64),
        ("tensors", ctypes.c_int64),
        ("sources", ctypes.c_int64 * MOST_TENSORS),
        ("targets", ctypes.c_int64 * MOST_TENSORS),
        ("bytes", ctypes.c_int64 * MOST_TENSORS),
        ("first_block", ctypes.c_int32 * (MOST_TENSORS + 2)),
    )


class _KernelParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2 (cuda.h of CUDA 13.0)."""

    _fields_ = (
        ("func", ctypes.c_void_p),
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared_bytes")),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.c_void_p),
        ("kern", ctypes.c_void_p),
        ("ctx", ctypes.c_void_p),
    )


@functools.cache
def _function(device: int) -> Any:
    """Return the kernel's handle on a GPU. A first launch loads it, which a graph cannot record.

    Raises `GpuError` where it cannot be compiled.
    """
    source = "\n".join([*(f"#define {name} {value}" for name, value in _CONSTANTS.items()), _SOURCE])
    with torch.cuda.device(device):
        try:
            function = torch.cuda._compile_kernel(source, _NAME).func
        except Exception as cause:  # torch's loader and compiler raise errors of several kinds
            raise GpuError(f"the kernel '{_NAME}' cannot be compiled: {cause}") from cause
        _launch(function, 1, _Table())
    return function


def _arguments(table: _Table) -> Any:
    """Return the kernel's arguments: the address of a table, which must live as long as they are used."""
    return (ctypes.c_void_p * 1)(ctypes.addressof(table))


def _launch(function: Any, blocks: int, table: _Table) -> None:
    """Launch the kernel on the current stream. Raises `GpuError`."""
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    sizes = map(ctypes.c_uint, (blocks, 1, 1, THREADS, 1, 1, 0))
    Driver().call("cuLaunchKernel", function, *sizes, stream, _arguments(table), None)


class CopyKernel:
    """A kernel that copies tensors from `sources` to `targets`, arrays of addresses; at first onto themselves.

    `number` tells the kernels of a graph apart. Raises `GpuError` where the kernel cannot be compiled.
    """

    def __init__(self, number: int, memory: Sequence[torch.Tensor]) -> None:
        sizes_bytes = [tensor.numel() * tensor.element_size() for tensor in memory]
        first_block = np.cumsum([0, *(-(-size // BLOCK_BYTES) for size in sizes_bytes)]).tolist()
        self._number, self._blocks = number, max(1, first_block[-1])
        self._table = table = _Table(number=number, tensors=len(memory))
        table.bytes[: len(memory)] = sizes_bytes
        table.first_block[: len(first_block)] = first_block
        words: Any = np.frombuffer(table, np.int64)  # type: ignore[call-overload]
        begin = [offset // words.itemsize for offset in (_Table.sources.offset, _Table.targets.offset)]
        self.sources, self.targets = (words[first : first + len(memory)] for first in begin)
        self.sources[:] = self.targets[:] = [tensor.data_ptr() for tensor in memory]
        self._arguments = _arguments(table)
        """Of the node at a change; the table lives as long as this object."""
        self._function = _function(memory[0].device.index)
        self._params = _KernelParams(self._function, self._blocks, 1, 1, THREADS, 1, 1, arguments=self._arguments)
        self._node: tuple[Any, ...] = ()

    def launch(self) -> None:
        """Launch it on the current stream. Raises `GpuError`."""
        _launch(self._function, self._blocks, self._table)

    def bind(self, graph: torch.cuda.CUDAGraph) -> None:
        """Find its node in a graph that has recorded it. Raises `GpuError` where the graph's copies cannot change."""
        for node, params in _kernel_nodes(graph):
            if params.func == self._function.value and _first_argument(params) == self._number:
                if self._node:
                    raise GpuError(f"the graph has two nodes of the kernel '{_NAME}' with number {self._number}")
                self._node = ctypes.c_void_p(graph.raw_cuda_graph_exec()), node, ctypes.byref(self._params)
        if not self._node:
            raise GpuError(f"the graph has no node of the kernel '{_NAME}'")
        self._set = Driver().function("cuGraphExecKernelNodeSetParams_v2")
        self.change()

    def change(self) -> None:
        """Let later launches of the graph use the addresses of now. Raises `GpuError`."""
        status = self._set(*self._node)
        if status:
            raise GpuError(f"cuGraphExecKernelNodeSetParams_v2 says error {status}")


def _first_argument(params: _KernelParams) -> int:
    return int(ctypes.cast(params.arguments[0], ctypes.POINTER(ctypes.c_int64))[0])


def _kernel_nodes(graph: torch.cuda.CUDAGraph) -> Iterator[tuple[ctypes.c_void_p, _KernelParams]]:
    """Yield the kernels of a graph that torch keeps, with their parameters."""
    driver, raw, count = Driver(), ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    driver.call("cuGraphGetNodes", raw, None, ctypes.byref(count))
    handles = (ctypes.c_void_p * count.value)()
    driver.call("cuGraphGetNodes", raw, handles, ctypes.byref(count))
    for node in map(ctypes.c_void_p, handles):
        kind, params = ctypes.c_int(), _KernelParams()
        driver.call("cuGraphNodeGetType", node, ctypes.byref(kind))
        if kind.value == KERNEL_NODE:
            driver.call("cuGraphKernelNodeGetParams_v2", node, ctypes.byref(params))
            yield node, params


class CopyKernels:
    """Kernels that copy any number of tensors, numbered from `first`."""

    def __init__(self, first: int, memory: Sequence[torch.Tensor]) -> None:
        self._own = [tensor.data_ptr() for tensor in memory]
        self._sources = list(self._own)
        begins = range(0, len(memory), MOST_TENSORS)
        self.kernels = [CopyKernel(first + n, memory[begin : begin + MOST_TENSORS]) for n, begin in enumerate(begins)]

    def launch(self) -> None:
        """Launch them on the current stream. Raises `GpuError`."""
        for kernel in self.kernels:
            kernel.launch()

    def bind(self, graph: torch.cuda.CUDAGraph) -> None:
        """Find their nodes in a graph that has recorded them. Raises `GpuError`."""
        for kernel in self.kernels:
            kernel.bind(graph)

    def set_sources(self, sources: list[int]) -> None:
        """Copy from these addresses into the memory."""
        if sources == self._sources:
            return
        for n, kernel in enumerate(self.kernels):
            kernel.sources[:] = sources[n * MOST_TENSORS : (n + 1) * MOST_TENSORS]
            kernel.change()
        self._sources = sources

    def set_targets(self, targets: list[int]) -> None:
        """Copy the memory to these addresses."""
        for n, kernel in enumerate(self.kernels):
            kernel.targets[:] = targets[n * MOST_TENSORS : (n + 1) * MOST_TENSORS]
            kernel.change()

    def copy_in_place(self) -> None:
        """Copy the memory onto itself."""
        self.set_sources(self._own)
        self.set_targets(self._own)


class GraphCopies:
    """Copies of the inputs and results of one recorded graph on `device`; `inputs` is the step's memory of its inputs,
    `results` are ids.

    A tensor that is laid out in another way than the step's memory, or lies elsewhere, is copied by torch outside of
    the graph. Raises `GpuError` where this torch cannot change a recorded graph.
    """

    def __init__(self, inputs: Sequence[torch.Tensor], results: Sequence[int], device: torch.device) -> None:
        if not hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph_exec") or not hasattr(torch.cuda, "_compile_kernel"):
            raise GpuError(f"torch {torch.__version__} cannot change the kernels of a recorded graph")
        _function(torch.cuda.current_device() if device.index is None else device.index)
        self._inputs, self._ids, self._device = list(inputs), list(results), device
        self._places = [place for place, tensor in enumerate(inputs) if tensor.device.type == device.type]
        """Places of the inputs that the graph copies."""
        self._strides = [inputs[place].stride() for place in self._places]
        self._into = CopyKernels(0, [inputs[place] for place in self._places])
        self._is_own = True
        """Whether the graph copies its own memory onto itself."""

    def begin(self) -> None:
        """Launch the copies of inputs on the current stream, before the step."""
        self._into.launch()

    def end(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Launch the copies of results on the current stream, after the step. `tensors` are the step's, by id."""
        results = [_made(tensors[number]) for number in self._ids]
        self._plain = [tensor.device.type == self._device.type and _is_plain(tensor) for tensor in results]
        """For each result, whether the graph copies it."""
        self._leaving = [tensor for tensor, plain in zip(results, self._plain, strict=True) if plain]
        self._others = [tensor for tensor, plain in zip(results, self._plain, strict=True) if not plain]
        self._out = CopyKernels(len(self._into.kernels), self._leaving)
        self._out.launch()

    def bind(self, graph: torch.cuda.CUDAGraph) -> None:
        """Find the copies in the recorded graph. Raises `GpuError`."""
        self._into.bind(graph)
        self._out.bind(graph)
        self._graph = graph

    def replay(self) -> None:
        """Run the graph on the inputs in its memory, and leave its results there."""
        if not self._is_own:
            self._into.copy_in_place()
            self._out.copy_in_place()
            self._is_own = True
        self._graph.replay()

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the graph on these inputs; return the results in memory of their own. Call it without gradients."""
        self._is_own = False
        self._into.set_sources(self._sources(tensors))
        made = [torch.empty_like(tensor) for tensor in self._leaving]
        self._out.set_targets([tensor.data_ptr() for tensor in made])
        self._graph.replay()
        if not self._others:
            return made
        inside, others = iter(made), iter(fresh(self._others))
        return [next(inside if plain else others) for plain in self._plain]

    def _sources(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Return where the graph finds each input; one in another layout is copied into the step's memory."""
        given = tensors
        if len(self._places) < len(tensors):
            given = [tensors[place] for place in self._places]
            for place in set(range(len(tensors))).difference(self._places):
                self._inputs[place].copy_(tensors[place], non_blocking=True)
        if [tensor.stride() for tensor in given] == self._strides and not any(map(_is_lazy, given)):
            sources = [tensor.data_ptr() for tensor in given]
            if all(sources):  # neither an empty tensor nor one of torch's zeros without memory
                return sources
        return [self._source(place, tensors[place]) for place in self._places]

    def _source(self, place: int, tensor: torch.Tensor) -> int:
        """Return where the graph finds one input: where it lies, or the step's memory, into which torch copies it."""
        memory = self._inputs[place]
        if tensor.stride() != memory.stride() or _is_lazy(tensor) or not tensor.data_ptr():
            tensor = memory.copy_(tensor, non_blocking=True)
        return tensor.data_ptr()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a result has no gaps, so that its bytes are all of it."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride() and not _is_lazy(tensor)


def _made(tensor: torch.Tensor | None) -> torch.Tensor:
    """Return a result, which the schedule has made."""
    assert tensor is not None
    return tensor


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Whether torch reads the elements in another way than they are written."""
    return tensor.is_neg() or tensor.is_conj()
