"""TurboDL's planned clock on steps with many ready ops: equal to the rule that checks each of them every time."""

from __future__ import annotations

import heapq

import pytest

from gpusim.policies.turbodl import _Clock
from tests.engine.test_wide_lists import wide_graph


class LooksAtAll(_Clock):
    """The rule as written: at every event all ready ops by priority, from a new list."""

    def _is_ready(self, op: int) -> None:
        heapq.heappush(self.ready.setdefault(self._alike(op), []), (-self.graph.bottom_ns[op], op))

    def _start(self, now: float) -> None:
        for _, op in sorted(first for ops in self.ready.values() for first in ops):
            stream = self._stream(self.path_of[op])
            if stream in self.idle and (self.path_of[op] == 0 or self._fits(op)):
                alike = self._alike(op)
                self.ready[alike].remove((-self.graph.bottom_ns[op], op))
                heapq.heapify(self.ready[alike])
                if not self.ready[alike]:
                    del self.ready[alike]
                self._launch(op, stream, now)
            elif 0 in self.idle and stream in self.idle:
                break


@pytest.mark.parametrize("after", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("streams", [1, 2, 5, 16])
def test_clock_starts_what_a_look_at_all_ready_ops_starts(after: float, streams: int) -> None:
    for seed in range(4):
        graph = wide_graph(seed, 120, after)
        assert _Clock(graph, streams).run() == LooksAtAll(graph, streams).run()
