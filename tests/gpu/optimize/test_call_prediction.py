"""The predicted time of a call: that of its graph and copies, or the host's pace."""

from __future__ import annotations

from collections.abc import Callable

from gpusim.gpu.optimize.executors import CpuExecutor
from tests.support.optimizing import Twins, batches, sgd


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
