"""What is chosen is recorded several times more, and the fastest of its recordings runs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from gpusim.formats.trace import Trace
from gpusim.gpu.optimize import choose, make
from gpusim.gpu.optimize.callable import OptimizedStep
from gpusim.gpu.optimize.captured import Captured
from gpusim.gpu.optimize.executors import CpuExecutor, Ready
from gpusim.gpu.replay.timing import interleaved_ns
from gpusim.plan.schedule import Schedule
from tests.support.optimizing import Twins, batches, fast, sgd

#: The recording of the chosen schedule that is faster than the others.
FASTEST = 7


class Uneven(CpuExecutor):
    """A device that records schedules several times; of those of the chosen one, one is the fastest."""

    recordings = 3

    def __init__(self) -> None:
        self.ran: list[int] = []
        """Numbers of the recordings that ran, in the order in which they were made."""
        self.made: list[weakref.ref[Ready]] = []
        self.compared: list[int] = []
        """Numbers of the recordings of the chosen schedule."""
        self.further = False
        """Whether the chosen schedule is recorded now."""
        self.refused_from = 99
        """How many of its further recordings work."""

    def prepare(self, captured: Captured, trace: Trace, schedule: Schedule) -> Ready:
        if self.further:
            if self.refused_from == 0:
                raise torch.cuda.OutOfMemoryError("no memory for a further recording")
            self.refused_from -= 1
        ready: Any = super().prepare(captured, trace, schedule)
        number, run = len(self.made), ready.run

        def counted() -> None:
            self.ran.append(number)
            run()

        ready.run = counted
        self.made.append(weakref.ref(ready))
        return ready

    def times_ns(self, ready: Mapping[str, Ready], predicted_ns: Mapping[str, int]) -> dict[str, int]:
        times = super().times_ns(ready, predicted_ns)
        if self.further:
            numbers = {id(ref()): number for number, ref in enumerate(self.made)}
            self.compared = [numbers[id(each)] for each in ready.values()]
            times = {name: ns - (place == FASTEST) for place, (name, ns) in enumerate(times.items())}
        return times


@pytest.fixture(autouse=True)
def _told_of_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    as_called = make.as_called

    def told(candidate: Any, trace: Any, executor: Any, *options: Any) -> Any:
        executor.further = True
        try:
            return as_called(candidate, trace, executor, *options)
        finally:
            executor.further = False

    monkeypatch.setattr(make, "as_called", told)


def trained(executor: Uneven) -> Twins:
    """Return a step made by the executor, which has several streams and the results of eager."""
    twins = Twins(sgd, executor=executor, frontends=("aten",))
    assert isinstance(twins.fast, OptimizedStep)
    assert twins.fast.gain.streams > 1
    executor.ran.clear()
    twins.train(batches(2))
    twins.check()
    return twins


def test_the_fastest_of_twelve_recordings_runs_and_the_others_are_let_go() -> None:
    executor = Uneven()
    twins = trained(executor)
    assert len(executor.compared) == choose.MORE_RECORDINGS * executor.recordings == 12
    kept = executor.compared[FASTEST]
    assert set(executor.ran) == {kept}
    gc.collect()
    assert [number for number in executor.compared if executor.made[number]() is not None] == [kept]
    assert twins.fast.gain.optimized_ns < twins.fast.gain.sequential_ns


def test_without_time_the_recording_of_the_trial_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "RECORDING_S", 0.0)
    executor = Uneven()
    trained(executor)
    assert executor.compared == []
    assert len(set(executor.ran)) == 1


def test_comparing_recordings_takes_its_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long step has as many recordings as can be timed, too: two of two seconds each in five, not three."""
    monkeypatch.setattr(Uneven, "timing_ns", lambda self, one_ns: 2_000_000_000)
    executor = Uneven()
    trained(executor)
    assert len(executor.compared) == 2


@pytest.mark.parametrize(("one_ns", "calls"), [(100_000, 1 + 3 + 250 + 9 * 40), (20_000_000, 1 + 3 + 1 + 9 * 3)])
def test_time_of_a_comparison_by_hand(one_ns: int, calls: int) -> None:
    """One call, three that are timed, 25 ms to warm up, nine rounds of 4 ms, of three calls at least."""
    assert interleaved_ns(one_ns, 9, 4.0) == one_ns * calls


def test_a_further_recording_that_fails_costs_nothing_but_itself() -> None:
    """The choice is made: with the recordings that there are it goes on, at the first start and at the second."""
    for first_start in (True, False):
        executor = Uneven()
        executor.refused_from = 2
        twins = trained(executor)
        assert len(executor.compared) == 3
        assert (twins.fast.gain.decided_by == "what was found before") != first_start


def test_the_second_start_runs_the_fastest_of_as_many() -> None:
    trained(Uneven())
    executor = Uneven()
    twins = trained(executor)
    assert twins.fast.gain.decided_by == "what was found before"
    assert len(executor.compared) == 12
    assert set(executor.ran) == {executor.compared[FASTEST]}


def test_a_device_that_records_once_records_once() -> None:
    class Once(Uneven):
        recordings = 1

    executor = Once()
    trained(executor)
    assert executor.compared == []


def test_one_stream_is_not_recorded_again() -> None:
    executor = Uneven()
    step = fast(torch.nn.Linear(4, 4).eval(), torch.ones(2, 4), executor=executor, streams=1)
    assert isinstance(step, OptimizedStep)
    assert executor.compared == []
