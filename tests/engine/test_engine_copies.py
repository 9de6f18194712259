"""Copies and memsets in graph mode: small plans worked out by hand."""

from __future__ import annotations

import pytest

from gpusim.plan.tasks import LaunchMode
from gpusim.rules.copies import MANY_PENDING
from tests.support.helpers import (
    copy,
    make_hardware,
    plan,
    task,
)
from tests.support.timelines import run, spans


@pytest.mark.parametrize(("kind", "expected_ns"), [("h2d", 100 + 1000), ("d2h", 100 + 2000)])
def test_copy_takes_its_latency_and_its_bytes_over_the_bandwidth(kind: str, expected_ns: int) -> None:
    hardware = make_hardware(h2d=50, d2h=25, both=75, copy_latency_ns=100)
    assert run(plan(copy(kind, 50_000)), hardware).makespan_ns == expected_ns


def test_copies_of_one_direction_take_turns() -> None:
    timeline = run(plan(copy("h2d", 5000, queue=0), copy("h2d", 5000, queue=1)), make_hardware(h2d=50))
    assert spans(timeline) == [(0, 100), (100, 200)]


def test_both_directions_at_once_are_independent_where_the_link_carries_both() -> None:
    timeline = run(plan(copy("h2d", 5000, queue=0), copy("d2h", 5000, queue=1)), make_hardware(both=100))
    assert spans(timeline) == [(0, 100), (0, 100)]


def test_both_directions_at_once_share_a_link_that_cannot() -> None:
    # 50 + 50 needed, 80 available: each at 40 B/ns. h2d ends at 125; d2h has 5000 of 10000 left and takes 100 more.
    timeline = run(plan(copy("h2d", 5000, queue=0), copy("d2h", 10_000, queue=1)), make_hardware(both=80))
    assert spans(timeline) == [(0, 125), (0, 225)]


def test_copies_overlap_with_kernels_and_need_no_sm() -> None:
    timeline = run(plan(task(1000, part=1.0, queue=0), copy("h2d", 5000, queue=1), copy("d2h", 5000, queue=2)))
    assert spans(timeline) == [(0, 1000), (0, 100), (0, 100)]


def test_kernel_waits_for_the_copy_it_needs() -> None:
    timeline = run(plan(copy("h2d", 5000, queue=1), task(1000, deps=[0])), make_hardware(chain_ns=10))
    assert spans(timeline)[1] == (110, 1110)


def test_kernels_take_longer_beside_copies() -> None:
    # Copies of 100 ns; a kernel runs at 0.8 of its rate during one direction, at 2 / 3 during both.
    one = run(plan(task(1000, part=1.0), copy("h2d", 5000, queue=1)), make_hardware(kernel_slowdown=0.25))
    assert spans(one) == [(0, 1020), (0, 100)]
    both = plan(task(1000, part=1.0), copy("h2d", 5000, queue=1), copy("d2h", 5000, queue=2))
    assert spans(run(both, make_hardware(kernel_slowdown=0.25)))[0] == (0, 1033)


def test_going_from_a_kernel_to_a_copy_and_on_to_a_kernel_takes_longer_each_way() -> None:
    tested = plan(task(1000), copy("d2h", 5000, queue=1, deps=[0]), task(500, deps=[1]))
    assert spans(run(tested, make_hardware(chain_ns=10, switch_ns=70))) == [(0, 1000), (1080, 1180), (1260, 1760)]
    chain = plan(copy("d2h", 5000, queue=1), copy("d2h", 5000, queue=1))  # no kernel, no switch
    assert spans(run(chain, make_hardware(chain_ns=10, switch_ns=70))) == [(0, 100), (110, 210)]


def test_kernel_waits_longer_for_a_copy_that_ended_long_before() -> None:
    # The copy ends at 100; the last kernel waits for it and for the kernel that ends at 1000.
    tested = plan(task(1000), copy("d2h", 5000, queue=1), task(500, deps=[1]))
    assert spans(run(tested, make_hardware(chain_ns=10, switch_ns=70)))[2] == (1080, 1580)


def test_copies_take_longer_beside_kernels() -> None:
    # 100 bytes per ns alone, 80 beside the kernel: 8,000 bytes in its 100 ns, the other 12,000 in 120 ns.
    tested = plan(task(100), copy("h2d", 20_000, queue=1))
    assert spans(run(tested, make_hardware(h2d=100, copy_slowdown=0.25)))[1] == (0, 220)


def test_copies_to_the_host_take_longer_with_or_without_kernels() -> None:
    # 100 bytes per ns alone, 80 in a step.
    tested = plan(task(100), copy("d2h", 20_000, queue=1))
    assert spans(run(tested, make_hardware(d2h=100, copy_slowdown=0.25)))[1] == (0, 250)


def memset_beside(*kinds: str, small: bool = True) -> tuple[int, int]:
    """Return start and end of a memset of 100 ns beside copies of 2,000 ns."""
    memset = task(100, kind="memset", part=0.0, on_copy_engine=small)
    copies = [copy(kind, 100_000, queue=1 + number) for number, kind in enumerate(kinds)]
    return spans(run(plan(*copies, memset), make_hardware(memset_d2h_ns=30, memset_h2d_ns=80)))[-1]


def test_small_memsets_wait_for_copies() -> None:
    assert memset_beside() == (0, 100)
    assert memset_beside("d2h") == (0, 130)
    assert memset_beside("h2d") == memset_beside("h2d", "d2h") == (0, 180)
    assert memset_beside("h2d", small=False) == (0, 100)


def test_a_memset_that_starts_after_the_copies_does_not_wait() -> None:
    memset = task(100, kind="memset", part=0.0, on_copy_engine=True, deps=[0])
    tested = plan(copy("h2d", 5000, queue=1), memset)
    assert spans(run(tested, make_hardware(memset_h2d_ns=80)))[1] == (100, 200)


def memset_with_copies_pending(count: int, mode: LaunchMode = "graph", copied: bool = True) -> int:
    """Return the time of a memset of 100 ns, of a plan with copies that wait for a kernel of 500 ns.

    The memset waits for a copy that has ended (`copied`), or for a kernel.
    """
    first = copy("d2h", 5000, queue=3) if copied else task(100, queue=3, part=0.1)
    memset = task(100, kind="memset", part=0.0, on_copy_engine=True, queue=1, deps=[0])
    copies = [copy("h2d" if number % 2 else "d2h", 100, queue=2, deps=[2]) for number in range(count)]
    tested = plan(first, memset, task(500, part=0.1), *copies, mode=mode)
    start, end = spans(run(tested, make_hardware(memset_d2h_ns=30, memset_h2d_ns=80)))[1]
    return end - start


def test_small_memsets_are_slow_while_many_copies_of_their_graph_are_pending() -> None:
    assert memset_with_copies_pending(MANY_PENDING - 1) == 100
    assert memset_with_copies_pending(MANY_PENDING) == 130


def test_memsets_before_the_first_copy_are_as_fast_as_without_copies() -> None:
    assert memset_with_copies_pending(MANY_PENDING + 1, copied=False) == 100


def test_a_host_launches_copies_too_late_to_slow_memsets() -> None:
    assert memset_with_copies_pending(MANY_PENDING, mode="stream") == 100


def test_copies_that_have_started_are_not_pending() -> None:
    """The first of three copies has ended, the others wait for a kernel of 500 ns."""
    memset = task(100, kind="memset", part=0.0, on_copy_engine=True, queue=1, deps=[0])
    later = [copy("h2d", 100, queue=2, deps=[1]) for _ in range(MANY_PENDING - 1)]
    tested = plan(copy("d2h", 5000, queue=3), task(500), *later, memset)
    assert spans(run(tested, make_hardware(memset_d2h_ns=30)))[-1] == (100, 200)
