"""Python's garbage collector while something is timed or recorded: held off, and on again afterwards. And what stays
of the trials.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
from torch.nn import functional as F  # noqa: N812  (torch's own habit)

from gpusim.formats.trace import Frontend, Trace
from gpusim.gpu.optimize.callable import OptimizedStep
from gpusim.gpu.optimize.captured import Captured
from gpusim.gpu.optimize.executors import CpuExecutor, Ready
from gpusim.gpu.optimize.garbage import no_collection, quick_collections
from gpusim.plan.schedule import Schedule
from tests.support.optimizing import batches, fast, net, sgd


class Ring:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _frozen() -> Iterator[None]:
    """Freeze nothing, unlike in other tests: tests/conftest.py freezes what is imported."""
    gc.unfreeze()
    yield
    gc.enable()
    gc.freeze()


@pytest.mark.parametrize("on", [True, False])
def test_nothing_is_collected_while_contenders_take_turns(on: bool) -> None:
    (gc.enable if on else gc.disable)()
    ring = weakref.ref(Ring())
    with no_collection():
        assert ring() is None  # what was there before is gone
        assert not gc.isenabled()
    assert gc.isenabled() == on


def test_recordings_collect_their_own_garbage_and_look_at_nothing_older() -> None:
    with quick_collections():
        assert gc.get_freeze_count() > 0
        ring = weakref.ref(Ring())
        gc.collect()
        assert ring() is None
    assert gc.get_freeze_count() == 0


def test_objects_that_the_user_has_frozen_stay_frozen() -> None:
    gc.freeze()
    before = gc.get_freeze_count()
    with quick_collections():
        assert gc.get_freeze_count() == before
    assert gc.get_freeze_count() == before


ATEN: tuple[Frontend, ...] = ("aten",)


class Counting(CpuExecutor):
    """Counts the prepared schedules that are alive whenever it is to give memory back."""

    def __init__(self) -> None:
        self.prepared: list[weakref.ref[Ready]] = []
        self.alive: list[int] = []

    def prepare(self, captured: Captured, trace: Trace, schedule: Schedule) -> Ready:
        ready = super().prepare(captured, trace, schedule)
        self.prepared.append(weakref.ref(ready))
        return ready

    def give_back(self) -> None:
        self.alive.append(sum(each() is not None for each in self.prepared))


def test_of_all_schedules_on_trial_only_the_chosen_one_stays() -> None:
    """The others are gone without a collection, so that their memory can be given back at once."""
    executor, model = Counting(), net()
    gc.disable()
    step = fast(
        model, batches(1)[0], loss=F.cross_entropy, optimizer=sgd(model.parameters()), executor=executor, frontends=ATEN
    )
    assert isinstance(step, OptimizedStep)
    assert len(executor.prepared) > 2
    assert executor.alive == [1]


class Quickened(CpuExecutor):
    """Notes the order in which schedules are prepared, timed, and launches made fast."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def prepare(self, captured: Captured, trace: Trace, schedule: Schedule) -> Ready:
        self.log.append("prepare")
        return super().prepare(captured, trace, schedule)

    def give_back(self) -> None:
        self.log.append("give back")

    def make_launches_fast(self) -> bool:
        self.log.append("fast")
        return True


def test_launches_are_made_fast_once_nothing_is_recorded_any_more() -> None:
    """A recording behind it would end the fast state."""
    executor, model = Quickened(), net()
    step = fast(
        model, batches(1)[0], loss=F.cross_entropy, optimizer=sgd(model.parameters()), executor=executor, frontends=ATEN
    )
    step(*batches(1)[0])
    assert executor.log[-2:] == ["give back", "fast"]
    assert executor.log.count("fast") == 1
    assert "prepare" in executor.log


class NeverRight(Quickened):
    """Every schedule gives another result."""

    def prepare(self, captured: Captured, trace: Trace, schedule: Schedule) -> Ready:
        ready = super().prepare(captured, trace, schedule)
        run = ready.run

        def wrong() -> None:
            run()
            for tensor in ready.tensors:
                if tensor is not None and tensor.is_floating_point():
                    tensor.add_(1.0)

        vars(ready)["run"] = wrong
        return ready


def test_launches_are_made_fast_for_the_users_own_step_too() -> None:
    """Trials have made them slow, and here no schedule computes the same as the step."""
    executor, model = NeverRight(), net()
    with pytest.warns(UserWarning, match="away from eager's .* the step runs as it is"):
        fast(model.eval(), batches(1)[0][:1], executor=executor, frontends=ATEN)
    assert executor.log[-1] == "fast"
