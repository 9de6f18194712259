"""Quick estimate of a plan's peak, for planners that try many: bytes by place, without the allocator's blocks.

It ignores the rounding of blocks, and assumes that all results of one recomputation are live at once.
`gpusim.memplan.memory` has the exact number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from gpusim.memplan.plan import Redo
from gpusim.memplan.storages import Storages
from gpusim.memplan.times import OpTimes
from gpusim.plan.allocator import rounded


class BytesProfile:
    """Bytes in use at each place of an order of ops, with nothing freed early."""

    def __init__(self, storages: Storages, times: OpTimes) -> None:
        self.storages = storages
        self.times = times
        count = len(times.order)
        self.size = [rounded(size) for size in storages.bytes]
        change = np.zeros(count + 1, dtype=np.int64)
        self.last: dict[int, int] = {}
        for storage, users in enumerate(storages.users):
            if not users or storage in storages.initial:
                continue
            places = [times.place[op] for op in users]
            self.last[storage] = count - 1 if storage in storages.results else max(places)
            change[min(places)] += self.size[storage]
            change[self.last[storage] + 1] -= self.size[storage]
        self.initial_bytes = sum(self.size[s] for s in storages.initial)
        self.workspace = [rounded(size) for size in storages.workspace_bytes]
        self._most_workspaces: dict[tuple[int, ...], int] = {}
        workspace = np.array([self.workspace[op] for op in times.order], dtype=np.int64)
        self.level = np.cumsum(change[:-1]) + workspace + self.initial_bytes

    def level_bytes(
        self,
        last_forward: Mapping[int, int],
        needs: Mapping[int, int],
        redos: Sequence[Redo],
        kept: frozenset[int] = frozenset(),
    ) -> npt.NDArray[np.int64]:
        """Return the bytes at each place, with storages away from their last use in the forward pass until they are
        needed.

        `last_forward` has the place of that use for every saved storage; `needs`, for those that move, the place at
        which they must be back. The bytes of one of `redos` count at the place of the op behind it. Storages `kept`
        stay for the last of `redos` that reads them.
        """
        place, size, last = self.times.place, self.size, self.last
        places: list[int] = []
        changes: list[int] = []
        for storage, need in needs.items():
            places += (last_forward[storage] + 1, need)
            changes += (-size[storage], size[storage])
        for storage, now in self._kept_until(redos, kept).items():
            places += (last[storage] + 1, now + 1)
            changes += (size[storage], -size[storage])
        back_for_good: dict[int, int] = {}
        for redo in redos:
            now = place[redo.before]
            for storage in redo.storages:
                if now >= back_for_good.get(storage, 0):
                    back_for_good[storage] = now
        at_once: dict[int, int] = {}
        for redo in redos:
            now = place[redo.before]
            between = self._most_workspace(redo.ops)
            for storage in redo.storages:
                if back_for_good[storage] == now and storage in last_forward and last[storage] >= now:
                    places += (last_forward[storage] + 1, now)
                    changes += (-size[storage], size[storage])
                else:
                    between += size[storage]
            at_once[now] = max(at_once.get(now, 0), between)
        change = np.zeros(len(self.level) + 1, dtype=np.int64)
        np.add.at(change, np.array(places, dtype=np.intp), np.array(changes, dtype=np.int64))
        level = self.level + np.cumsum(change[:-1])
        for now, more in at_once.items():
            level[now] += more
        return level

    def _most_workspace(self, ops: tuple[int, ...]) -> int:
        if ops not in self._most_workspaces:
            self._most_workspaces[ops] = max(map(self.workspace.__getitem__, ops), default=0)
        return self._most_workspaces[ops]

    def _kept_until(self, redos: Sequence[Redo], kept: frozenset[int]) -> dict[int, int]:
        """Return the place of the op behind the last recomputation from each of the storages `kept` that has one."""
        until: dict[int, int] = {}
        for redo in redos if kept else ():
            now = self.times.place[redo.before]
            for storage in (self.storages.touched_by(redo.ops) & kept).difference(redo.storages):
                until[storage] = max(until.get(storage, 0), now)
        return until
