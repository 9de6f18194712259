"""Experiment: a call's copies inside its CUDA graph, by addresses that the host writes to a ring.

    python research/prototypes/copies_in_graph.py OUT.json

Now a call copies its inputs, launches a graph, and copies its results. On the GPU the ways between copies and a large
graph take longer than around an almost empty one. Here the graph's first kernel copies the inputs and its last one the
results, from and to addresses that it reads in pinned memory: a ring with a slot a call. A number in GPU memory says
which slot is next; the last kernel raises it, and tells the host, which waits where it is a whole ring ahead.

OUT has, per case, the GPU's time of the graph alone, of a call with copies around it ("outside") and of one with copies
in it ("inside"), the wall time of calls in a row, and the host's time; all in ns, as medians. Each call's results are
compared with those of the other way first. TRITON_INTERPRET=1 and `--check` run the kernels alone on the CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton import language as tl

SLOTS, BLOCK, ROUNDS = 64, 1024, 9


@triton.jit  # type: ignore[untyped-decorator]
def copy_in(number, ring, fields, first, memory, words, SLOTS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Copy words from the addresses in a slot, from field `first` on, to those in `memory`."""
    which = tl.program_id(1)
    field = (tl.load(number, volatile=True) % SLOTS) * fields + first + which
    address = tl.load(ring.to(tl.pointer_type(tl.int64)) + field, volatile=True)
    source = tl.multiple_of(address, 16).to(tl.pointer_type(tl.int32))
    target = tl.multiple_of(tl.load(memory + which), 16).to(tl.pointer_type(tl.int32))
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < tl.load(words + which)
    tl.store(target + place, tl.load(source + place, mask=mask), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def copy_out(number, ring, fields, first, memory, words, SLOTS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Copy words from the addresses in `memory` to those in a slot."""
    which = tl.program_id(1)
    field = (tl.load(number, volatile=True) % SLOTS) * fields + first + which
    address = tl.load(ring.to(tl.pointer_type(tl.int64)) + field, volatile=True)
    target = tl.multiple_of(address, 16).to(tl.pointer_type(tl.int32))
    source = tl.multiple_of(tl.load(memory + which), 16).to(tl.pointer_type(tl.int32))
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < tl.load(words + which)
    tl.store(target + place, tl.load(source + place, mask=mask), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def end_call(number, ended):  # type: ignore[no-untyped-def]
    """Go on to the next slot, and tell the host."""
    after = tl.load(number, volatile=True) + 1
    tl.store(number, after)
    tl.store(ended.to(tl.pointer_type(tl.int64)), after)


class Ring:
    """Addresses of each call's inputs and results, in memory that both host and GPU read."""

    def __init__(self, inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        device = inputs[0].device
        pinned = device.type == "cuda"
        self.inputs, self.results, self.calls = list(inputs), list(results), 0
        self.fields = len(inputs) + len(results)
        self.slots = torch.zeros(SLOTS, self.fields, dtype=torch.int64, pin_memory=pinned)
        self.ended = torch.zeros(1, dtype=torch.int64, pin_memory=pinned)
        self._slots, self._ended = self.slots.numpy(), self.ended.numpy()
        self._slots[:] = [t.data_ptr() for t in (*inputs, *results)]  # for a run before the first call
        self.number = torch.zeros(1, dtype=torch.int64, device=device)
        self._memory = [_numbers([t.data_ptr() for t in each], device) for each in (inputs, results)]
        self._words = [_numbers([t.numel() for t in each], device) for each in (inputs, results)]

    def begin(self) -> None:
        """Launch the graph's first kernel."""
        self._copy(copy_in, 0, self.inputs, 0)

    def end(self) -> None:
        """Launch its last kernels."""
        self._copy(copy_out, 1, self.results, len(self.inputs))
        end_call[(1,)](self.number, self.ended.data_ptr())

    def _copy(self, kernel: Any, which: int, tensors: Sequence[torch.Tensor], first: int) -> None:
        blocks = triton.cdiv(max(t.numel() for t in tensors), BLOCK)
        memory, words = self._memory[which], self._words[which]
        kernel[(blocks, len(tensors))](
            self.number, self.slots.data_ptr(), self.fields, first, memory, words, SLOTS=SLOTS, BLOCK=BLOCK
        )

    def call(self, launch: Callable[[], object], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Write a slot, and launch."""
        while self.calls - self._ended[0] >= SLOTS:
            time.sleep(0)
        made = [torch.empty_like(each) for each in self.results]
        self._slots[self.calls % SLOTS] = [t.data_ptr() for t in (*tensors, *made)]
        self.calls += 1
        launch()
        return made


def _numbers(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


@dataclass(frozen=True)
class Case:
    """A graph: chains of kernels on streams, with inputs and results of these sizes in words."""

    name: str
    streams: int
    kernels: int
    inputs: tuple[int, ...]
    results: tuple[int, ...]


CASES = (
    Case("small", 1, 4, (150_528,), (1_000,)),
    Case("fork", 8, 1, (150_528,), (1_000,)),
    Case("googlenet-like", 8, 20, (150_528,), (1_000,)),
    Case("deep", 8, 60, (150_528,), (1_000,)),
    Case("many tensors", 8, 20, (4_096,) * 12, (4_096,) * 6),
    Case("large tensors", 8, 20, (1 << 20,) * 4, (1 << 20,) * 2),
)


def graph_of(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    work()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def prepared(case: Case) -> tuple[list[Any], list[Any], Callable[[], None]]:
    """Return inputs, results, and the graph's work."""
    device = torch.device("cuda")
    inputs = [torch.zeros(words, device=device) for words in case.inputs]
    results = [torch.zeros(words, device=device) for words in case.results]
    lanes = [torch.cuda.Stream() for _ in range(case.streams - 1)]
    state = [torch.zeros(4096, device=device) for _ in range(case.streams)]

    def body() -> None:
        first = torch.cuda.current_stream()
        for number, tensor in enumerate(state):
            lane = lanes[number - 1] if number else first
            if number:
                lane.wait_stream(first)
            with torch.cuda.stream(lane):
                torch.add(tensor, inputs[0][:4096], out=tensor)
                for _ in range(case.kernels):
                    tensor.mul_(0.5)
        for lane in lanes:
            first.wait_stream(lane)
        for result in results:
            torch.mul(inputs[0][:1].expand_as(result), 2.0, out=result)

    return inputs, results, body


def measured(case: Case) -> dict[str, Any]:
    """Check and time a case."""
    from gpusim.gpu.optimize.copies import Copies, fresh
    from gpusim.gpu.replay.timing import host_ns_behind, queued_ns

    inputs, results, body = prepared(case)
    ring, copies = Ring(inputs, results), Copies(inputs)

    def whole() -> None:
        ring.begin()
        body()
        ring.end()

    alone, inside = graph_of(body), graph_of(whole)
    torch.cuda.synchronize()
    ring.number.zero_()
    ring.ended.zero_()
    batches = [[torch.full_like(each, float(1 + n)) for each in inputs] for n in range(3)]

    def outside(batch: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        copies(batch)
        alone.replay()
        return fresh(results)

    for turn in range(3 * SLOTS):
        batch = batches[turn % 3]
        for one, other in zip(outside(batch), ring.call(inside.replay, batch), strict=True):
            if not torch.equal(one, other):
                raise SystemExit(f"{case.name}: call {turn} has other results")
    turns = {"outside": lambda: outside(batches[0]), "inside": lambda: ring.call(inside.replay, batches[0])}
    told: dict[str, Any] = {"case": case.name, "graph": round(median(lambda: queued_ns(alone.replay)))}
    for name, call in turns.items():
        told[name] = {
            "gpu": round(median(lambda call=call: queued_ns(call))),
            "host": round(median(lambda call=call: host_ns_behind(call))),
            "in a row": round(median(lambda call=call: in_a_row_ns(call))),
        }
    return told


def median(measure: Callable[[], float]) -> float:
    return statistics.median(measure() for _ in range(ROUNDS))


def in_a_row_ns(call: Callable[[], object], calls: int = 300) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter_ns()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter_ns() - begin) / calls


def check() -> None:
    """Run the kernels by Triton's interpreter: more calls than there are slots."""
    inputs, results = [torch.zeros(70), torch.zeros(2000)], [torch.zeros(70)]
    ring = Ring(inputs, results)

    def step() -> None:
        ring.begin()
        torch.add(inputs[0], inputs[1][:70], out=results[0])
        ring.end()

    for call in range(SLOTS + 6):
        given = [torch.randn(70), torch.randn(2000)]
        (got,) = ring.call(step, given)
        assert torch.equal(got, given[0] + given[1][:70]), call
    print("equal")


def main() -> None:
    """Time all cases, and write after each."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("out", type=Path, nargs="?")
    arguments.add_argument("--check", action="store_true")
    given = arguments.parse_args()
    if given.check:
        check()
        return
    if given.out is None:
        arguments.error("a file for the results is needed: OUT")
    from gpusim.gpu.device import provenance, require_gpu

    require_gpu()
    busy = torch.ones(2048, 2048, device="cuda")
    head = provenance("python research/prototypes/copies_in_graph.py OUT.json", lambda: busy @ busy)
    rows = []
    for case in CASES:
        rows.append(measured(case))
        print(json.dumps(rows[-1]), flush=True)
        given.out.write_text(json.dumps(head | {"cases": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
