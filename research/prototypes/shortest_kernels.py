"""Print the shortest profiled kernels by number of blocks, of the H200's traces without embedding bags.

    python research/prototypes/shortest_kernels.py

The first row has the time of a kernel of one block (`gpusim.rules.idle_blocks.IDLE_BLOCK_NS`); the growth of the others
is at least the time that the dispatcher takes for a block.
"""

from __future__ import annotations

from math import prod
from pathlib import Path

from gpusim.io.packed import files_in
from gpusim.trace.kernel_names import shown_name
from gpusim.trace.store import bundled_traces, read_trace

ROOT = Path(__file__).parent.parent.parent


def main() -> None:
    """Print a row for one block, and for each power of two of blocks."""
    packed = sorted((ROOT / "validate" / "traces").iterdir())
    stored = [file for place in packed for file in files_in(place.with_suffix(""), ".json.gz")]
    files = {file.name: file for file in [*bundled_traces().values(), *stored] if ".predicted" not in file.name}
    traces, shortest = 0, dict[int, tuple[int, int, str]]()
    for file in files.values():
        trace = read_trace(file)
        kernels = [kernel for op in trace.ops for kernel in op.kernels if kernel.kind == "kernel"]
        if trace.provenance.gpu.name != "NVIDIA H200" or any("EmbeddingBag" in kernel.name for kernel in kernels):
            continue
        traces += 1
        for kernel in kernels:
            blocks = prod(kernel.grid)
            found = (kernel.dur_ns, blocks, shown_name(kernel.name))
            shortest[blocks.bit_length()] = min(found, shortest.get(blocks.bit_length(), found))
    print(f"{traces} traces")
    for dur_ns, blocks, name in (shortest[bits] for bits in sorted(shortest)):
        print(f"{blocks:8,} blocks {dur_ns:8,} ns  {name}")


if __name__ == "__main__":
    main()
