"""Experiments that each test one rule of the block dispatcher: placement, start times, shared resources.

Each runs kernels on a bench (`gpusim.gpu.calibrate.block_kernels.BlockBench`), reads where and when their blocks ran,
and reports whether the engines' rule agrees. research/2026-11-23-calibration.md lists them.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final, Protocol

from gpusim.formats.hardware import Limits
from gpusim.formats.rules import EXPERIMENTS, Rule
from gpusim.formats.trace import Kernel
from gpusim.gpu.calibrate.block_kernels import ROWS, WORK, Blocks, Hold
from gpusim.gpu.calibrate.cache import READ_KINDS, read_rates
from gpusim.rules.occupancy import Footprint, kernel_footprint
from gpusim.units import KIB

#: Registers per thread of the holding kernel; far from a limit.
HOLD_REGS = 16


class Bench(Protocol):
    """Interface of `BlockBench`."""

    sms: int
    timer_sms: frozenset[int]

    def place(self, holds: Sequence[Hold]) -> list[Blocks]:
        """Run kernels as branches of a CUDA graph."""

    def chains(
        self, width: int, length: int, hold: Hold, neighbor: tuple[str, int, int] | None = None
    ) -> list[list[Blocks]]:
        """Run independent chains in a CUDA graph, next to a kernel of work (kind, blocks, warps per block)."""

    def rates(self, parts: Sequence[tuple[str, int, int]]) -> list[float]:
        """Return chunks of work per us of concurrent kernels (kind, blocks, warps per block)."""


def rules(
    bench: Bench, limits: Limits, say: Callable[[str], None] = lambda _: None, only: Collection[str] = EXPERIMENTS
) -> Iterator[Rule]:
    """Run the experiments named in `only`, in sequence."""
    for name, experiment in JUDGES.items():
        if name in only:
            say(f"blocks: {name}")
            yield experiment(bench, limits)
    for name, measure in MEASUREMENTS.items():
        if name in only:
            say(f"blocks: {name}")
            yield measure(bench)


# --- Where ---

#: Blocks of the first kernel, of 256 threads, per SM: they leave even and uneven room.
FIRST_BLOCKS = (0.5, 1.0, 1.5, 3.8, 5.94, 7.6)


def most_room(bench: Bench, limits: Limits) -> Rule:
    """Place a second kernel next to the unevenly spread blocks of a first one.

    All blocks of the first are still resident; only those of the timers before it have ended.
    """
    right, wrong = 0, []
    for share in FIRST_BLOCKS:
        for blocks, threads in ((75, 64), (40, 256), (300, 128)):
            count = round(share * bench.sms)
            first, second = bench.place([Hold(count, 256, 60), Hold(blocks, threads, 60, delay_us=20)])
            held = Counter(first.sm)
            before = [held[sm] for sm in range(bench.sms)]
            shared = [sm for sm, at in zip(second.sm, second.start_ns, strict=True) if at < min(first.end_ns)]
            placed = Counter((held[sm], number) for sm, number in Counter(shared).items())
            if placed == spread(before, 256, blocks, threads, limits, bench.timer_sms):
                right += 1
            else:
                wrong.append(f"{count} blocks of 256 threads, then {blocks} of {threads}")
    total = right + len(wrong)
    return Rule(
        name="most room",
        rule="the next block goes to the SM that can take the most further blocks of its kernel; of several, to one "
        "where a block has ended, then to the one that has had that room for longest",
        holds=not wrong,
        found=f"{right} of {total} second kernels lay as the rule says"
        + (f"; not: {'; '.join(wrong)}" if wrong else ""),
        numbers={"cases": total, "right": right},
    )


def spread(
    before: Sequence[int], threads: int, blocks: int, new_threads: int, limits: Limits, first: Collection[int] = ()
) -> Counter[tuple[int, int]]:
    """Count the SMs with n blocks of a first kernel and m of a second, which goes where there is most room.

    Of SMs with equal room, those in `first` come first, then the one that has had it for longest.
    """
    room = [
        min((limits.threads_per_sm - held * threads) // new_threads, limits.blocks_per_sm - held) for held in before
    ]
    gets = [0] * len(before)
    for level in range(max(room), 0, -1):
        for sm in sorted(range(len(before)), key=lambda sm: (sm not in first, room[sm])):
            if room[sm] >= level and blocks > 0:
                gets[sm] += 1
                blocks -= 1
    return Counter((held, taken) for held, taken in zip(before, gets, strict=True) if taken)


# --- When ---


def head_of_line(bench: Bench, limits: Limits) -> Rule:
    """Leave room that a first kernel's waiting blocks cannot use, but a second kernel's could.

    All have the same shared memory carve-out, since different ones would keep them apart, too.
    """
    two, small = Hold(2 * bench.sms, 256, 60, smem_bytes=100 * KIB), Hold(75, 64, 15, delay_us=15)
    first, second = bench.place([replace(two, blocks=two.blocks + 100), small])
    no_room = replace(two, blocks=bench.sms, hold_us=20, delay_us=12)
    three = bench.place([two, no_room, replace(small, delay_us=24)])
    large, fits = three[:2]
    early = sum(start < max(first.start_ns) for start in second.start_ns)
    overtook = sum(start < max(three[1].start_ns) for start in three[2].start_ns)
    waited_ns = min(second.start_ns) - max(first.start_ns)
    return Rule(
        name="head of line",
        rule="behind a kernel whose blocks are not all placed, nobody gets any placed",
        holds=not early and not overtook and min(fits.start_ns) >= min(large.end_ns),
        found=f"{early} of 75 blocks started before the last block of the kernel before them, {overtook} of 75 before "
        "that of a kernel that did not fit; the first of them started "
        f"{waited_ns / 1000:.2f} us after the last block before it",
        numbers={"early_blocks": early, "overtaking_blocks": overtook, "start_after_last_ns": waited_ns},
    )


def draining(bench: Bench, limits: Limits) -> Rule:
    """Let blocks of a full GPU end one by one while another kernel waits for their places."""
    full = bench.sms * (limits.threads_per_sm // 256)
    first, second = bench.place([Hold(full, 256, 40, vary_us=60), Hold(bench.sms, 256, 15, delay_us=15)])
    ends = sorted(first.end_ns)
    waited = [start - ends[place] for place, start in enumerate(sorted(second.start_ns))]
    before_the_end = sum(start < ends[-1] for start in second.start_ns)
    return Rule(
        name="room is taken at once",
        rule="blocks move in as soon as blocks of others have made room",
        holds=before_the_end == len(second.start_ns) and statistics.median(waited) < 2_000,
        found=f"{before_the_end} of {len(second.start_ns)} blocks started before the first kernel had ended, the n-th "
        f"{statistics.median(waited) / 1000:.2f} us after the n-th of its blocks, in the median",
        numbers={"wait_ns": statistics.median(waited)},
    )


def priorities(bench: Bench, limits: Limits) -> Rule:
    """Start a kernel of higher priority while another has blocks waiting."""
    full = bench.sms * (limits.threads_per_sm // 256)
    overtaking = {}
    for priority in (0, -1):
        first, second = bench.place([Hold(3 * full, 256, 30), Hold(bench.sms, 256, 15, delay_us=15, priority=priority)])
        overtaking[priority] = sum(start < max(first.start_ns) for start in second.start_ns)
    return Rule(
        name="priority",
        rule="blocks of higher priority that wait are placed first; of equal priority, in order of the kernels' starts",
        holds=overtaking[0] == 0 and overtaking[-1] == bench.sms,
        found=f"of {bench.sms} blocks {overtaking[-1]} overtook with higher priority, {overtaking[0]} with the same",
        numbers={"overtook_higher": overtaking[-1], "overtook_equal": overtaking[0]},
    )


#: Threads per block, and blocks per SM, of kernels that fit on the GPU at once. The first two start for longer than the
#: front end takes between two kernels, and leave room for a block of another.
STARTED: Final = ((32, 31), (64, 31), (128, 8), (128, 16), (256, 8), (1024, 2))
#: Delays of the kernel beside them, in us, so that it is ready before they have started or soon after.
BESIDE_US: Final = (0.0, 0.1, 0.2, 0.3)
#: Blocks of kernels whose blocks end at once.
ENDING_BLOCKS: Final = 30_000
#: A tick of an H200's clock, by which two starts may seem to be in the wrong order.
TICK_NS: Final = 32


def block_starts(bench: Bench, limits: Limits) -> Rule:
    """Measure the rate at which blocks start, and start a second kernel while those of a first one do.

    The blocks of the first kernel fit on the GPU at once and end long after the second has started, or end at once. It
    counts only where they leave room for the second.
    """
    numbers: dict[str, float] = {}
    margins_ns: list[int] = []
    for threads, per_sm in STARTED:
        blocks, times_ns = per_sm * bench.sms, []
        for delay_us in BESIDE_US:
            first, second = bench.place([Hold(blocks, threads, 40), Hold(1, 32, 10, delay_us=delay_us)])
            times_ns.append(max(first.start_ns) - min(first.start_ns))
            if threads * per_sm < limits.threads_per_sm and second.start_ns[0] > min(first.start_ns):
                margins_ns.append(second.start_ns[0] - max(first.start_ns))
        numbers[f"{blocks} blocks of {threads} threads, ns a block"] = statistics.median(times_ns) / (blocks - 1)
    for threads in (32, 128, 256):
        (ending,) = bench.place([Hold(ENDING_BLOCKS, threads, 0)])
        time_ns = max(ending.start_ns) - min(ending.start_ns)
        numbers[f"{ENDING_BLOCKS} blocks of {threads} threads that end at once, ns a block"] = time_ns / ENDING_BLOCKS
    early = sum(margin_ns < -TICK_NS for margin_ns in margins_ns)
    numbers |= {"second kernels": len(margins_ns), "early ones": early}
    if margins_ns:
        numbers |= {"least margin": min(margins_ns), "median margin": statistics.median(margins_ns)}
    a_block_ns = [value for name, value in numbers.items() if name.endswith("ns a block")]
    return Rule(
        name="block starts",
        rule="the GPU starts blocks in sequence, and those of a second kernel once it has started all of the first",
        holds=bool(margins_ns) and not early,
        found=f"{min(a_block_ns):.2f} to {max(a_block_ns):.2f} ns a block; {early} of {len(margins_ns)} second kernels "
        "started before the last block of the first",
        numbers=numbers,
    )


# --- Shared memory ---

#: Threads and KiB of shared memory per block.
SHAPES = (
    (64, 0), (128, 0), (256, 0), (1024, 0), (256, 1), (256, 4), (1024, 4), (64, 8), (256, 16), (1024, 20), (128, 48),
    (256, 64), (128, 99), (128, 160),
)  # fmt: skip


def carveouts(bench: Bench, limits: Limits) -> Rule:
    """Place one block of a first kernel on every SM, then one of a second, for each pair of `SHAPES`."""
    right, wrong = 0, []
    for one in SHAPES:
        for other in SHAPES:
            first, second = bench.place(
                [
                    Hold(bench.sms, one[0], 40, smem_bytes=one[1] * KIB),
                    Hold(bench.sms, other[0], 10, delay_us=14, smem_bytes=other[1] * KIB),
                ]
            )
            end = min(first.end_ns)
            shared = {sm for sm, start in zip(second.sm, second.start_ns, strict=True) if start < end} & set(first.sm)
            if (len(shared) > bench.sms * 3 // 4) == joins(_footprint(one, limits), _footprint(other, limits), limits):
                right += 1
            else:
                wrong.append(f"{other[0]} threads {other[1]} KiB beside {one[0]} threads {one[1]} KiB")
    total = right + len(wrong)
    return Rule(
        name="shared memory carve-out",
        rule="an SM's shared memory is set while it is empty; a block joins where that size is at least its kernel's",
        holds=not wrong,
        found=f"{right} of {total} pairs joined or waited as the rule says"
        + (f"; not: {'; '.join(wrong[:5])}" if wrong else ""),
        numbers={"cases": total, "right": right},
    )


def joins(first: Footprint, second: Footprint, limits: Limits) -> bool:
    """Whether a block of the second kernel may join an SM with one block of the first."""
    return (
        first.own_carveout_bytes >= second.carveout_bytes
        and first.smem_bytes + second.smem_bytes <= first.own_carveout_bytes
        and first.threads + second.threads <= limits.threads_per_sm
    )


def _footprint(shape: tuple[int, int], limits: Limits) -> Footprint:
    threads, smem_kib = shape
    kernel = Kernel(name="hold", dur_ns=1, block=(threads, 1, 1), regs_per_thread=HOLD_REGS, smem_bytes=smem_kib * KIB)
    return kernel_footprint(limits, kernel)


# --- Gaps ---

#: Blocks (in SMs, or a number) and threads of the kernels in chains, and the number of chains.
CHAINED = ((0, 32), (1, 128), (4, 256))
WIDTHS = (1, 2, 4, 8)
CHAIN_KERNELS = 10
#: Largest change of a kernel's gap with the number of chains: three ticks of an H200's clock, and 2 % of a 5 us kernel.
GAP_TOLERANCE_NS = 100


def gaps(bench: Bench, limits: Limits) -> Rule:
    """Measure the time from the last block's end to the next kernel's first start, in concurrent chains of one kernel.

    The gap may differ between kernels; that part belongs to a kernel's traced time. Chains that fill the GPU completely
    are measured, not judged: their blocks can only start where others have just left.
    """
    numbers: dict[str, float] = {}
    spreads, fuller = [], []
    for per_sm, threads in CHAINED:
        blocks = per_sm * bench.sms or 1
        gaps_ns: list[float] = []
        for width in WIDTHS:
            taken = blocks * threads * width / (bench.sms * limits.threads_per_sm)
            if taken > 1 or blocks * width * CHAIN_KERNELS > ROWS * 3 // 4:
                continue
            chains = bench.chains(width, CHAIN_KERNELS, Hold(blocks, threads, 5))
            gap_ns = statistics.median(
                min(after.start_ns) - max(before.end_ns) for chain in chains for before, after in pairwise(chain)
            )
            numbers[f"{blocks} blocks, {width} chains"] = gap_ns
            if taken < 1:
                gaps_ns.append(gap_ns)
            else:
                fuller.append(gap_ns - max(gaps_ns))
        spreads.append(max(gaps_ns) - min(gaps_ns))
    return Rule(
        name="gap in a chain",
        rule="a kernel starts a fixed time after its predecessor's last block, however many chains there are, while "
        "there is room",
        holds=max(spreads) <= GAP_TOLERANCE_NS,
        found=f"medians from {min(numbers.values()) / 1000:.2f} to {max(numbers.values()) / 1000:.2f} us; for one "
        f"kernel at most {max(spreads) / 1000:.2f} us apart"
        + (f", but {max(fuller) / 1000:+.2f} us where its chains fill the GPU" if fuller else ""),
        numbers=numbers,
    )


# --- Numbers ---


#: Kernels running next to a chain: kind of work, and number of SMs without a block of it.
NEIGHBORS = (("fma", 12), ("tensor", 12), ("latency", 12), ("l2", 12), ("dram", 112), ("dram", 12))


def gaps_with_neighbors(bench: Bench) -> Rule:
    """Measure the gap of a chain of small kernels while another kernel runs all the time."""
    numbers: dict[str, float] = {}
    for kind, spared in ((None, 0), *NEIGHBORS):
        neighbor = kind and (kind, bench.sms - spared, 8)
        (chain,) = bench.chains(1, CHAIN_KERNELS, Hold(1, 32, 5), neighbor or None)
        waited = [min(after.start_ns) - max(before.end_ns) for before, after in pairwise(chain[1:])]
        numbers[f"beside {kind} on {bench.sms - spared} SMs" if kind else "alone"] = statistics.median(waited)
    alone_ns, *others = numbers.values()
    return Rule(
        name="gap beside others",
        rule="a kernel starts later after its predecessor where others load the memory; the engines do not know that",
        holds=None,
        found=f"{alone_ns:.0f} ns alone, {min(others) - alone_ns:.0f} to {max(others) - alone_ns:.0f} ns more beside "
        "other kernels",
        numbers=numbers,
    )


def bandwidth(bench: Bench) -> Rule:
    """Measure bytes per ns from DRAM and from the L2 cache, by SMs in use and warps on each."""
    rates = read_rates(bench)
    best = {kind: max(rate for reads, rate in rates.items() if reads.kind == kind) for kind in READ_KINDS}
    return Rule(
        name="bandwidth by SMs and warps",
        rule="traffic of DRAM is limited for the whole GPU; few SMs or warps do not reach it",
        holds=None,
        found=f"DRAM at most {best['dram']:.0f}, L2 at most {best['l2']:.0f} bytes a ns",
        numbers={f"{kind}, {sms} SMs, {warps} warps": rate for (kind, sms, warps), rate in rates.items()},
    )


#: Warps of each of the two blocks that share an SM.
SHARED_WARPS = ((4, 4), (8, 8), (16, 16), (4, 16), (16, 4))


def sharing(bench: Bench) -> Rule:
    """Measure the slow-down of each kind of work with each other on one SM, against running alone with as many
    warps.
    """
    kinds = list(WORK)
    alone = {
        (kind, warps): bench.rates([(kind, bench.sms, warps)])[0]
        for kind in kinds
        for warps in sorted({w for pair in SHARED_WARPS for w in pair})
    }
    numbers: dict[str, float] = {}
    for one_warps, other_warps in SHARED_WARPS:
        for one in kinds:
            for other in kinds:
                first, second = bench.rates([(one, bench.sms, one_warps), (other, bench.sms, other_warps)])
                pair = f"{one} {one_warps} beside {other} {other_warps}"
                numbers[f"{pair}: {one}"] = alone[(one, one_warps)] / first
                numbers[f"{pair}: {other} (second)"] = alone[(other, other_warps)] / second
    worst = max(numbers, key=lambda name: numbers[name])
    return Rule(
        name="sharing an SM",
        rule="blocks slow each other by what they both need; the engines know one exponent for all kinds",
        holds=None,
        found=f"factors from {min(numbers.values()):.2f} to {max(numbers.values()):.2f}, most for {worst}; "
        f"median {statistics.median(numbers.values()):.2f}",
        numbers=numbers,
    )


#: By the name of the rule that they give: those that judge it, and those that only measure.
JUDGES: Final[Mapping[str, Callable[[Bench, Limits], Rule]]] = {
    "most room": most_room,
    "head of line": head_of_line,
    "room is taken at once": draining,
    "priority": priorities,
    "block starts": block_starts,
    "shared memory carve-out": carveouts,
    "gap in a chain": gaps,
}
MEASUREMENTS: Final[Mapping[str, Callable[[Bench], Rule]]] = {
    "gap beside others": gaps_with_neighbors,
    "bandwidth by SMs and warps": bandwidth,
    "sharing an SM": sharing,
}
