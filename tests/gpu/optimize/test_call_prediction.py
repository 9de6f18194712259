"""The predicted time of a call: that of its graph and copies, or the host's pace."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gpusim.gpu.optimize.executors import CallCopies, CpuExecutor
from tests.support.copying import Copying
from tests.support.optimizing import FEATURES, Twins, batches, sgd


class Costly(CpuExecutor):
    """Copies around the graph take 7 us, and the host 5 us."""

    host = 5_000

    def around_ns(self, call: Callable[[Callable[[], None]], object], streams: int) -> int:
        runs: list[int] = []
        call(lambda: runs.append(1))
        assert runs == [1]  # the copies are those around what is given in the graph's place
        return 7_000

    def device_ns(self, call: Callable[[], object]) -> int:
        call()
        return 9_000

    def host_ns(self, call: Callable[[], object]) -> int:
        call()
        return self.host


class CostlyWithin(Copying, Costly):
    """Copies take 6 us of a call, and those in the graph 4 us of a run, of 9 in all."""

    def copies_in_graph_ns(
        self,
        call: Callable[[CallCopies], object],
        inputs: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        streams: int,
    ) -> tuple[int, int]:
        assert [tensor.shape for tensor in inputs] == [(4, FEATURES), (4,)]
        assert [tensor.shape for tensor in results] == [()]  # the loss
        copies = self.made[0]
        before = copies.calls
        call(copies)
        assert copies.calls == before + 1  # the call goes through the given copies
        return 6_000, 4_000


def test_the_time_of_a_graph_is_that_without_its_copies() -> None:
    executor = CostlyWithin()
    twins = Twins(sgd, executor=executor, frontends=("aten",))
    gain = twins.fast.gain
    (variant,) = twins.fast._variants.values()
    assert variant.ready.copies in executor.made
    assert gain.around_ns == 6_000
    assert gain.device_ns == 5_000
    assert gain.optimized_ns == gain.predicted_ns - 4_000  # a CPU says that the run takes what was predicted
    assert gain.predicted_call_ns == gain.predicted_ns + 6_000
    twins.train(batches(2))
    twins.check()


def test_the_prediction_of_a_call_has_its_copies_or_is_the_hosts_pace() -> None:
    twins = Twins(sgd, executor=Costly())
    gain = twins.fast.gain
    assert gain.predicted_call_ns == gain.predicted_ns + 7_000
    assert gain.call_device_ns == 9_000
    slow = Costly()
    slow.host = gain.predicted_ns + 9_000
    assert Twins(sgd, executor=slow).fast.gain.predicted_call_ns == slow.host
    twins.train(batches(2))  # measuring left nothing behind
    twins.check()
