"""Placement and speed of blocks: each rule of `gpusim.engine.placement` by hand, in both engines."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from gpusim.engine.base import Engine, Timeline
from gpusim.engine.fast import FastEngine
from gpusim.engine.placement import MOST_GROUPS, SmPlacement
from gpusim.engine.reference import ReferenceEngine
from gpusim.formats.hardware import HardwareModel, load_hardware
from gpusim.plan.tasks import Plan, Task
from gpusim.rules.occupancy import Footprint, kernel_footprint
from tests.support.helpers import kernel, make_hardware

SMS = 132
P = 0.5
KIB = 1024
ENGINES = (ReferenceEngine(), FastEngine())


def gpu(**fields: float) -> HardwareModel:
    """The H200's limits, no costs, and a sharing exponent of one half."""
    return make_hardware(sharing=P, **fields)


def blocks_of(
    dur_ns: float,
    blocks: int,
    *,
    threads: int = 256,
    per_sm: int | None = None,
    smem: int = 0,
    split: int = 0,
    queue: int = 0,
    deps: Sequence[int] = (),
    **fields: float,
) -> Task:
    """Make a kernel of `blocks` blocks; `per_sm` of them fit an SM by their threads, unless given."""
    return Task(
        name="k",
        dur_ns=dur_ns,
        queue=queue,
        deps=tuple(deps),
        blocks=blocks,
        blocks_per_sm=2048 // threads if per_sm is None else per_sm,
        footprint=Footprint(threads, 0, smem, split, split),
        **fields,  # type: ignore[arg-type]
    )


def run(engine: Engine, *tasks: Task, **fields: float) -> Timeline:
    return engine.run(Plan(tasks=tasks), gpu(**fields))


def beside(*tasks: Task) -> tuple[Task, ...]:
    """Put each task in a stream of its own."""
    return tuple(msgspec.structs.replace(task, queue=queue) for queue, task in enumerate(tasks))


def placed(hardware: HardwareModel, *tasks: Task) -> SmPlacement:
    """Return the SMs after all of these have started at one time."""
    found = SmPlacement(hardware)
    for index, task in enumerate(tasks):
        found.start(index, task)
        found.update()
    return found


def held(found: SmPlacement, index: int) -> dict[int, int]:
    """Return, for a kernel, blocks per SM -> number of such SMs."""
    counts: dict[int, int] = {}
    for group in found.groups:
        blocks = sum(c.blocks for c in found.cohorts if c.group is group and c.kernel.index == index)
        counts[blocks] = counts.get(blocks, 0) + group.sms
    return counts


def test_alone_a_kernel_takes_its_time_whatever_its_number_of_waves() -> None:
    for engine in ENGINES:
        for blocks in (1, 75, 132, 784, 1056, 1057, 7056):
            assert run(engine, blocks_of(9000, blocks)).makespan_ns == 9000


def test_blocks_spread_over_the_sms_before_they_share_one() -> None:
    assert held(placed(gpu(), blocks_of(1, 75)), 0) == {1: 75, 0: 57}
    assert held(placed(gpu(), blocks_of(1, 784)), 0) == {6: 124, 5: 8}


def test_the_next_block_goes_where_most_of_its_kernel_would_fit() -> None:
    """784 blocks of 256 threads leave 512 threads on 124 SMs and 768 on 8.

    Blocks of 64 threads go to the 8 first, four each, and then one to an SM. Measured on an H200.
    """
    found = placed(gpu(), blocks_of(1, 784), blocks_of(1, 75, threads=64))
    assert held(found, 1) == {4: 8, 1: 43, 0: 81}


@pytest.mark.parametrize(
    ("first", "second", "shares"),
    [
        (blocks_of(1, 66), blocks_of(1, 300, threads=128), {3: 66, 2: 36, 1: 30}),
        (blocks_of(1, 100), blocks_of(1, 100), {1: 100, 0: 32}),
        (blocks_of(1, 500), blocks_of(1, 300, threads=128), {4: 8, 3: 20, 2: 104}),
    ],
)
def test_of_sms_with_as_much_room_the_one_that_has_had_it_for_longest_is_next(
    first: Task, second: Task, shares: dict[int, int]
) -> None:
    """100 blocks leave 32 SMs empty: of 100 more the first 32 go there, the others next to the first ones.

    All three measured on an H200.
    """
    found = placed(gpu(), first, second)
    assert held(found, 1) == shares
    if first.blocks == 100:
        assert sorted((group.blocks, group.sms) for group in found.groups) == [(1, 32), (1, 32), (2, 68)]


def test_kernels_that_find_empty_sms_do_not_disturb_each_other() -> None:
    for engine in ENGINES:
        found = run(engine, *beside(blocks_of(9000, 60), blocks_of(7000, 60)))
        assert found.end_ns == (9000, 7000)


def test_blocks_that_share_an_sm_take_the_root_of_its_load_longer() -> None:
    """132 blocks each, one of both on every SM: load 2, so 2^0.5 times as long while both run."""
    for engine in ENGINES:
        found = run(engine, *beside(blocks_of(10_000, SMS), blocks_of(10_000, SMS)))
        assert found.end_ns == (14142, 14142)
        shorter = run(engine, *beside(blocks_of(10_000, SMS), blocks_of(5_000, SMS)))
        assert shorter.end_ns == (12071, 7071)  # 5000 x 1.4142; then half of the first is left, alone


def test_kernels_that_multiply_matrices_have_an_exponent_of_their_own() -> None:
    """Load 2: twice as long for matrix kernels, 2^0.5 times for the other, which has 2,929 of 10,000 ns left when they
    end.
    """
    for engine in ENGINES:
        tasks = beside(blocks_of(10_000, SMS), blocks_of(5_000, SMS, matrix=True))
        assert run(engine, *tasks, matrix=1.0).end_ns == (12929, 10000)
        assert run(engine, *tasks).end_ns == (12071, 7071), "0: the same as of all others"
        alone = run(engine, blocks_of(9_000, 3 * SMS, matrix=True), matrix=1.0)
        assert alone.end_ns == (9000,)


def test_kernels_of_the_other_kind_count_in_part() -> None:
    """Half of the other kind counts: load 1.5 for either, 1.5 and 1.5^0.5 times as long; 6,124 of 10,000 ns are done by
    then.

    Of their own kind they count in full.
    """
    for engine in ENGINES:
        tasks = beside(blocks_of(10_000, SMS), blocks_of(5_000, SMS, matrix=True))
        assert run(engine, *tasks, matrix=1.0, cross=0.5).end_ns == (11376, 7500)
        assert run(engine, *tasks, matrix=1.0, cross=0.0).end_ns == (10000, 5000)
        alike = beside(blocks_of(10_000, SMS), blocks_of(10_000, SMS))
        assert run(engine, *alike, cross=0.5).end_ns == (14142, 14142)


def test_a_kernel_of_many_blocks_loads_its_sms_more_than_one_of_few() -> None:
    """Three eighths of an SM and one: the first takes (4 / 3)^0.5 as long, the second runs at half its pace."""
    for engine in ENGINES:
        found = run(engine, *beside(blocks_of(10_000, 3 * SMS), blocks_of(10_000, SMS)))
        assert found.end_ns == (11_547, 15_774)  # 11547 / 2 are done by then


def test_a_wave_that_is_not_full_takes_less_time_than_a_full_one() -> None:
    """Eight and two of eight blocks on each SM: 1 and 0.25^0.5 of the time of a full wave."""
    found = placed(gpu(), blocks_of(15_000, 10 * SMS))
    assert found.next_end() == (10_000, 0)


def test_nobody_is_placed_behind_a_kernel_with_blocks_left() -> None:
    """Blocks of 768 threads leave room for small ones; still a small kernel waits until the second wave is placed."""
    waves = blocks_of(20_000, 3 * SMS, threads=768)  # two at a time: 10 us per wave
    for engine in ENGINES:
        found = run(engine, *beside(waves, blocks_of(1_000, 1, threads=64)))
        assert found.start_ns == (0, 0)
        assert found.end_ns[1] > 10_000


def test_room_is_used_as_soon_as_blocks_end() -> None:
    """The last wave of the first kernel is four of eight blocks per SM; next to the second, half of them have five.

    Its blocks take 20000 / (1 + 0.5^0.5) = 11716 at load 1, those of the second 5000 / 0.125^0.5 = 14142. At load 5 / 8
    the first has ended after 9262; 1919 later, or 858 at load 1 / 8, the second has.
    """
    for engine in ENGINES:
        found = run(engine, *beside(blocks_of(20_000, 8 * SMS + 8 * 66), blocks_of(5_000, 66)))
        assert found.end_ns == (11_716 + 9_262, 11_716 + 9_262 + 858)


def test_a_kernel_waits_for_an_sm_to_empty_where_its_split_is_too_small() -> None:
    small = blocks_of(10_000, SMS, smem=1 * KIB, split=8 * KIB)
    large = blocks_of(3_000, SMS, per_sm=2, smem=97 * KIB, split=196 * KIB)
    for engine in ENGINES:
        # 66 SMs are enough for two blocks each: load 2
        assert run(engine, *beside(small, large)).end_ns == (10_000, 10_000 + 4243)
        # the other way round there is room, and the split is large enough
        assert run(engine, *beside(large, small)).end_ns[1] < 13_000


def test_blocks_crowd_on_the_sms_that_empty_first() -> None:
    found = placed(gpu(), blocks_of(10, SMS, smem=KIB, split=8 * KIB))
    found.start(1, blocks_of(10, 75, threads=64, per_sm=10, smem=7 * KIB, split=100 * KIB))
    found.update()
    assert held(found, 1) == {0: SMS}
    found.advance(10)
    assert found.finish(0)
    found.update()
    assert held(found, 1) == {10: 8, 0: SMS - 8}


def test_an_empty_sm_takes_any_split() -> None:
    first = blocks_of(10_000, 60, smem=KIB, split=8 * KIB)
    second = blocks_of(3_000, 60, per_sm=2, smem=97 * KIB, split=196 * KIB)
    for engine in ENGINES:
        assert run(engine, *beside(first, second)).end_ns == (10_000, 3_000)


def test_traffic_over_the_bandwidth_slows_those_who_make_it() -> None:
    """Two kernels of 600 bytes per ns each with 1000 available, and one without traffic."""
    heavy = blocks_of(1_000, 40, dram_bytes=600_000)
    for engine in ENGINES:
        found = run(engine, *beside(heavy, heavy, blocks_of(1_000, 40)), dram_bytes_per_ns=1000.0)
        assert found.end_ns == (1200, 1200, 1000)


def test_partitions_do_not_disturb_each_other() -> None:
    both = (
        blocks_of(10_000, 64, partition=0, partition_sms=64),
        blocks_of(10_000, 64, partition=0, partition_sms=64),
        blocks_of(10_000, 68, partition=1, partition_sms=68),
    )
    for engine in ENGINES:
        assert run(engine, *beside(*both)).end_ns == (14142, 14142, 10_000)


def test_groups_of_sms_stay_few_and_yet_every_block_is_placed() -> None:
    """60 kernels of a few blocks, no two alike, would make a group of nearly every SM."""
    found = placed(gpu(), *(blocks_of(1, 1 + number % 7, threads=32 * (1 + number % 5)) for number in range(60)))
    assert len(found.groups) == MOST_GROUPS
    assert not any(kernel.left for kernel in found.kernels)
    assert sum(group.sms for group in found.groups) == SMS
    tasks = beside(*(blocks_of(900 + 7 * number, 1 + number % 7, threads=32) for number in range(60)))
    assert run(FastEngine(), *tasks).end_ns == run(ReferenceEngine(), *tasks).end_ns


def test_an_empty_sm_gets_as_many_blocks_as_alone_and_more_at_the_next_step_if_it_has_room() -> None:
    """Two blocks of 64 threads, and when a memset starts next to them the other four: load 3, 6667 ns of work each."""
    for engine in ENGINES:
        found = run(engine, *beside(blocks_of(20_000, 6 * SMS, threads=64, per_sm=2), Task(name="memset", dur_ns=500)))
        assert found.end_ns == (11_547, 500)


def test_room_that_is_left_beside_new_blocks_is_used_when_others_of_the_kernel_end() -> None:
    """Half the SMs hold one long block and then one of the second kernel, which ends first: by then the others, which
    were empty and took two, have room for two more.
    """
    long = blocks_of(1e6, SMS // 2, threads=1536, per_sm=10)
    reference, fast = (
        run(engine, *beside(long, blocks_of(1e5, 10 * SMS, threads=512, per_sm=2))) for engine in ENGINES
    )
    assert fast.end_ns == reference.end_ns


def test_rates_change_only_where_something_changes() -> None:
    """Two kernels on SMs of their own; when a third joins the first, the second's end stays as it was."""
    found = placed(gpu(), blocks_of(9_000, 60), blocks_of(7_000, 60))
    found.advance(1_000)
    found.start(2, blocks_of(5_000, 12))
    found.update()
    left_ns = {cohort.kernel.index: cohort.remaining_ns for cohort in found.cohorts}
    assert left_ns == pytest.approx({index: dur_ns * 8**P for index, dur_ns in enumerate((9_000, 7_000, 5_000))})
    assert found.next_end() == (pytest.approx(5_000), 2)
    found.advance(5_000)
    assert found.finish(2)
    found.update()
    assert found.next_end() == (pytest.approx(1_000), 1)


def test_memory_operations_need_no_sm() -> None:
    for engine in ENGINES:
        found = run(engine, *beside(blocks_of(9000, 9 * SMS, threads=1024), Task(name="memset", dur_ns=500)))
        assert found.end_ns == (9000, 500)


@pytest.mark.parametrize(
    ("threads", "regs", "smem", "split", "own"),
    [
        (256, 23, 0, 8, 32),  # pooling: 8 blocks of 1 KiB; the driver gives more
        (64, 92, 6528, 100, 132),  # an FP32 convolution: ten blocks
        (128, 92, 98304, 196, 196),  # a TF32 convolution: two blocks
        (512, 19, 0, 8, 16),
    ],
)
def test_split_of_traced_kernels(threads: int, regs: int, smem: int, split: int, own: int) -> None:
    """As reported by Nsight Compute for kernels of GoogLeNet; the least carve-out comes from the join experiments."""
    limits = load_hardware("h200").limits
    found = kernel_footprint(limits, kernel(1000, 1, threads, regs, smem))
    assert (found.carveout_bytes, found.own_carveout_bytes) == (split * KIB, own * KIB)


def test_without_splits_shared_memory_is_a_resource_like_others() -> None:
    limits = msgspec.structs.replace(load_hardware("h200").limits, smem_splits_bytes=())
    found = kernel_footprint(limits, kernel(1000, 1, 256, 32, 4096))
    assert found.carveout_bytes == found.own_carveout_bytes == limits.smem_per_sm_bytes
