"""By how much recordings of one sequential graph differ for each kernel, of all stored captures and replays.

    python research/prototypes/recording_states.py

Prints steps whose slowest recording takes 3 % longer than the fastest: difference for each kernel, memory touched, and
the median recording of the capture and of the replay. Needs no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gpusim.formats.results import read_all_results
from gpusim.formats.trace import Trace
from gpusim.io.packed import files_in
from gpusim.plan.l2_cache import touched
from gpusim.trace.store import read_trace

VALIDATE = Path(__file__).parents[2] / "validate"
LEAST = 0.03


def traces() -> Iterator[Trace]:
    """Yield the stored traces that name a recording's spread."""
    for place in sorted((VALIDATE / "traces").iterdir()):
        for path in files_in(place.with_suffix(""), ".json.gz"):
            if ".predicted" not in path.name and ".stages" not in path.name:
                yield read_trace(path)


def main() -> None:
    """Print captures, then replays."""
    kernels, memory_mb = {}, {}
    for trace in traces():
        assert trace.ground_truth is not None
        kernels[trace.name] = sum(len(op.kernels) for op in trace.ops)
        memory_mb[trace.name] = touched(trace).one_stream_bytes / 1e6
        graph = trace.ground_truth.graph
        if graph.fastest_ns and graph.slowest_ns > (1 + LEAST) * graph.fastest_ns:
            _print("capture", trace.name, kernels, memory_mb, graph.fastest_ns, graph.median_ns, graph.slowest_ns)
    known = set[tuple[str, int]]()
    for name, results in read_all_results(VALIDATE / "results").items():
        for case in results.cases:
            key = case.trace, case.sequential_ns
            fastest_ns, slowest_ns = case.sequential_fastest_ns, case.sequential_slowest_ns
            if case.trace in kernels and key not in known and slowest_ns > (1 + LEAST) * max(1, fastest_ns):
                known.add(key)
                _print(name, case.trace, kernels, memory_mb, fastest_ns, case.sequential_ns, slowest_ns)


def _print(where: str, step: str, kernels: dict[str, int], memory_mb: dict[str, float], *times_ns: int) -> None:
    fastest_ns, median_ns, slowest_ns = times_ns
    each_ns = (slowest_ns - fastest_ns) / kernels[step]
    times = f"{fastest_ns / 1e3:.1f}, {median_ns / 1e3:.1f}, {slowest_ns / 1e3:.1f} us"
    print(f"{where} {step}: {times}; {each_ns:.0f} ns for each of {kernels[step]} kernels; {memory_mb[step]:.0f} MB")


if __name__ == "__main__":
    main()
