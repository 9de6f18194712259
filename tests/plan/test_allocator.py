"""The simulated caching allocator: PyTorch's rules by hand, and properties for any requests."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusim.plan.allocator import KIB, MIB, Block, CachingAllocator, rounded, segment_bytes


@pytest.mark.parametrize(("asked", "given_bytes"), [(1, 512), (512, 512), (513, 1024), (MIB, MIB), (0, 0)])
def test_requests_are_rounded_up_to_512_bytes(asked: int, given_bytes: int) -> None:
    assert rounded(asked) == given_bytes


@pytest.mark.parametrize(
    ("asked", "reserved"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (13 * MIB, 14 * MIB),
    ],
)
def test_segments_are_of_2_mib_20_mib_or_the_request_in_steps_of_2_mib(asked: int, reserved: int) -> None:
    assert segment_bytes(asked) == reserved


def test_nothing_is_allocated_for_nothing() -> None:
    pool = CachingAllocator()
    assert pool.allocate(0) is None
    pool.release(None)
    assert (pool.allocated_bytes, pool.reserved_bytes) == (0, 0)


def test_small_requests_share_a_segment_of_2_mib() -> None:
    pool = CachingAllocator()
    for _ in range(4):
        pool.allocate(512 * KIB)
    assert (pool.allocated_bytes, pool.reserved_bytes) == (2 * MIB, 2 * MIB)
    pool.allocate(1)
    assert (pool.allocated_bytes, pool.reserved_bytes) == (2 * MIB + 512, 4 * MIB)


def test_large_block_keeps_up_to_1_mib_that_it_does_not_need() -> None:
    # 13 MiB get a segment of 14 MiB: the remainder is no more than 1 MiB and stays with the block.
    pool = CachingAllocator()
    pool.allocate(13 * MIB)
    assert pool.allocated_bytes == 14 * MIB
    # 12.5 MiB get 14 MiB, too, and 1.5 MiB are split off, which 1.2 MiB then use.
    pool = CachingAllocator()
    pool.allocate(12 * MIB + 512 * KIB)
    assert pool.allocated_bytes == 12 * MIB + 512 * KIB
    pool.allocate(MIB + 200 * KIB)
    assert pool.reserved_bytes == 14 * MIB


def test_smallest_block_that_is_large_enough_is_taken() -> None:
    pool = CachingAllocator()
    large, wall, small = pool.allocate(8 * MIB), pool.allocate(3 * MIB), pool.allocate(5 * MIB)
    pool.allocate(4 * MIB)
    pool.release(large)
    pool.release(small)
    found = pool.allocate(5 * MIB)
    assert found is not None
    assert small is not None
    assert found.address == small.address
    assert wall is not None
    assert pool.reserved_bytes == 20 * MIB


def test_freed_neighbours_are_joined() -> None:
    pool = CachingAllocator()
    blocks = [pool.allocate(5 * MIB) for _ in range(4)]
    for place in (0, 2, 1, 3):
        pool.release(blocks[place])
    assert pool.largest_free_bytes == 20 * MIB
    pool.allocate(9 * MIB)
    assert pool.reserved_bytes == 20 * MIB


def test_fragments_of_two_segments_do_not_serve_one_request() -> None:
    pool = CachingAllocator()
    first, second = pool.allocate(12 * MIB), pool.allocate(12 * MIB)
    pool.release(first)
    pool.release(second)
    pool.allocate(14 * MIB)
    assert pool.reserved_bytes == 38 * MIB
    assert pool.allocated_bytes == 14 * MIB


def test_releasing_twice_is_our_own_bug() -> None:
    pool = CachingAllocator()
    block = pool.allocate(1)
    pool.release(block)
    with pytest.raises(ValueError, match="free already"):
        pool.release(block)


sizes = st.sampled_from((1, 512, 700, 100 * KIB, MIB, MIB + 1, 3 * MIB, 9 * MIB, 10 * MIB, 13 * MIB, 40 * MIB))


@given(st.lists(st.tuples(sizes, st.integers(0, 30)), max_size=60))
def test_live_blocks_never_overlap_and_the_counts_are_theirs(requests: list[tuple[int, int]]) -> None:
    pool = CachingAllocator()
    live: list[Block] = []
    for size, victim in requests:
        block = pool.allocate(size)
        assert block is not None
        assert block.bytes >= rounded(size)
        live.append(block)
        if victim < len(live):
            pool.release(live.pop(victim))
        spans = sorted((each.address, each.address + each.bytes) for each in live)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
        assert pool.allocated_bytes == sum(each.bytes for each in live)
        assert pool.allocated_bytes <= pool.reserved_bytes
        assert pool.allocated_bytes <= pool.peak_allocated_bytes
    reserved = pool.reserved_bytes
    for block in live:
        pool.release(block)
    assert pool.allocated_bytes == 0
    again = CachingAllocator()
    for size, _ in requests:
        again.allocate(size)
    for size, _ in requests:  # the reserved memory serves the same requests once more
        pool.allocate(size)
    assert pool.reserved_bytes <= reserved + again.reserved_bytes
