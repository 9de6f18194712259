"""Tables of research/2026-11-29-copies-and-streams.md, from its data: python research/prototypes/copy_streams.py."""

from __future__ import annotations

import gzip
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "data"
#: Copies of at least this size are counted, in bytes.
LARGE = 3e6


def data(name: str) -> dict[str, Any]:
    """Return a file of the experiment."""
    document: dict[str, Any] = json.loads(gzip.decompress((DATA / f"{name}_h200_20261129.json.gz").read_bytes()))
    return document


def rates(case: dict[str, Any], direction: str) -> list[float]:
    """Return the rates of large copies of one direction, in GB/s."""
    return [copy[4] / copy[3] for copy in case["copies"] if copy[0] == direction and copy[4] > LARGE]


def shown(numbers: Sequence[float]) -> str:
    """Return the median in GB/s, empty for none."""
    return f"{statistics.median(numbers):.1f}" if numbers else ""


def plans() -> None:
    """Print streams and rates of profiled plans."""
    print("| plan | streams with kernels, with copies alone | out | back |\n|---|--:|--:|--:|")
    for name, case in data("slow_copies_of_plans")["plans"].items():
        kernels = sum(1 for each in case["streams"].values() if each[0])
        copies = sum(1 for each in case["streams"].values() if each[2] and not each[0])
        print(f"| {name} | {kernels}, {copies} | {shown(rates(case, 'd2h'))} | {shown(rates(case, 'h2d'))} |")


def after_launch() -> None:
    """Print rates out before and after the host's launch of the graph has ended, where copies began before."""
    print("| plan | launch ends | out before | after |\n|---|--:|--:|--:|")
    for name, case in data("slow_copies_of_plans")["plans"].items():
        end_ns = case.get("launch_ns", [0, 0])[1]
        out = [(copy[2] + copy[3], copy[2], copy[4] / copy[3]) for copy in case["copies"] if copy[0] == "d2h"]
        large = [
            each
            for each, copy in zip(out, [c for c in case["copies"] if c[0] == "d2h"], strict=True)
            if copy[4] > LARGE
        ]
        before = [rate for end, _, rate in large if end < end_ns]
        after = [rate for _, begin, rate in large if begin >= end_ns]
        if len(before) >= 2 and after:
            print(
                f"| {name} | {end_ns / 1e6:.1f} ms | {shown(before)} ({len(before)}) | {shown(after)} ({len(after)}) |"
            )


def beside() -> None:
    """Print rates of graphs with one part changed."""
    print("| graph | time | streams with kernels | out |\n|---|--:|--:|--:|")
    for name, case in data("kernels_beside_copies")["cases"].items():
        streams = len(case["kernel_streams"])
        print(f"| {name} | {case['replay_ns'] / 1e6:.2f} ms | {streams} | {shown(rates(case, 'd2h'))} |")


def edges() -> None:
    """Print times of plans with other edges, over those with the replay's."""
    found = data("copy_edges_reduced")["plans"]
    as_replayed = "own edge of ops first, of copies first"
    print("| plan | streams with kernels | out | back | time | over the replay's |\n|---|--:|--:|--:|--:|--:|")
    for name, case in found.items():
        plan, order = name.split(", ", 1)
        streams = sum(1 for each in case["streams"].values() if each[0])
        over = case["replay_ns"] / found[f"{plan}, {as_replayed}"]["replay_ns"] - 1
        edges_in_words = "reduced" if order == "reduced" else "as replayed"
        out, back = (shown(rates(case, direction)) for direction in ("d2h", "h2d"))
        time = f"{case['replay_ns'] / 1e6:.2f} ms"
        print(f"| {plan}, {edges_in_words} | {streams} | {out} | {back} | {time} | {100 * over:+.1f} % |")
    orders: dict[str, list[float]] = {}
    every = data("copy_edges")["plans"]
    for name, case in every.items():
        plan, order = name.split(", ", 1)
        orders.setdefault(order, []).append(case["replay_ns"] / every[f"{plan}, {as_replayed}"]["replay_ns"] - 1)
    for order, over in orders.items():
        print(f"{order}: {', '.join(f'{100 * each:+.1f}' for each in over)} %")


if __name__ == "__main__":
    plans()
    after_launch()
    beside()
    edges()
