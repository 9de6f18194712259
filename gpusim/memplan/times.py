"""Start times of a step's ops in a plan without copies, by which planners place copies."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from math import inf

import numpy as np
import numpy.typing as npt

from gpusim.memplan.plan import Offload, Redo
from gpusim.memplan.storages import Storages
from gpusim.plan.graph import OpGraph
from gpusim.rules import copies

#: Margin of a copy back's launch, as a fraction of its time.
MARGIN = 0.1


@dataclass(frozen=True)
class OpTimes:
    """Start of each op on one stream, by its place in the order, after recomputation before it."""

    order: tuple[int, ...]
    place: tuple[int, ...]
    """Op -> its place in the order."""
    start_ns: tuple[float, ...]
    """Start of the op at each place, after recomputation before it, in ns."""
    end_ns: tuple[float, ...]

    @classmethod
    def of(cls, graph: OpGraph, order: Sequence[int] = (), redos: Sequence[Redo] = ()) -> OpTimes:
        """Add up solo times in order."""
        order = tuple(order) or tuple(range(len(graph)))
        place = [0] * len(order)
        for number, op in enumerate(order):
            place[op] = number
        return cls(order, tuple(place), (), ()).with_redos(graph, redos)

    def with_redos(self, graph: OpGraph, redos: Sequence[Redo]) -> OpTimes:
        """Return the times of the same order with this recomputation only."""
        again = [0.0] * len(self.order)
        for redo in redos:
            again[self.place[redo.before]] += sum(map(graph.solo_ns.__getitem__, redo.ops))
        alone = map(graph.solo_ns.__getitem__, self.order)
        times = list(accumulate(chain.from_iterable(zip(again, alone, strict=True))))
        return OpTimes(self.order, self.place, tuple(times[::2]), tuple(times[1::2]))


@dataclass(frozen=True)
class Link:
    """Cost of copies concurrent with kernels: bytes per ns in each direction, and the fixed time of a copy."""

    out_bytes_per_ns: float
    back_bytes_per_ns: float
    latency_ns: float
    wait_ns: float = 0.0
    """What an op takes longer that waits for a copy, even one that has ended."""

    @classmethod
    def of(cls, graph: OpGraph) -> Link:
        """Return the link of the step's GPU, one direction at a time."""
        model = graph.hardware.copies
        out, back = (copies.bytes_per_ns(model, to_device, both=False, kernels=True) for to_device in (False, True))
        return cls(out, back, model.latency_ns, model.switch_ns)

    def out_ns(self, size: int) -> float:
        return self.latency_ns + size / self.out_bytes_per_ns

    def back_ns(self, size: int) -> float:
        return self.latency_ns + size / self.back_bytes_per_ns


class CopiesOut:
    """Copies to the host in sequence, each from the last use of its storage in the forward pass on."""

    def __init__(self, times: OpTimes, link: Link) -> None:
        self._times = times
        self._link = link
        self._order: list[tuple[int, int]] = []
        self._copy_ns: list[float] = []
        self._end_ns: list[float] = []

    def add(self, key: tuple[int, int], size: int, limit_ns: float) -> bool:
        """Add a copy if all copies then end by `limit_ns`. `key` is the place of the storage's last use, and the
        storage.
        """
        at = bisect.bisect(self._order, key)
        order = [key, *self._order[at:]]
        copy_ns = [self._link.out_ns(size), *self._copy_ns[at:]]
        now = self._end_ns[at - 1] if at else 0.0
        ends: list[float] = []
        for number, (place, _) in enumerate(order):
            now = max(now, self._times.end_ns[place]) + copy_ns[number]
            if now > limit_ns:
                return False
            if number and now == self._end_ns[at + number - 1]:  # idle time before it: later copies do not change
                ends += self._end_ns[at + number - 1 :]
                break
            ends.append(now)
        if ends[-1] > limit_ns:
            return False
        self._order[at:], self._copy_ns[at:], self._end_ns[at:] = order, copy_ns, ends
        return True


def turn_place(storages: Storages, times: OpTimes) -> int:
    """Return the place of the first op after the forward pass; the last place where there is none."""
    return min(times.place[storages.first_backward :], default=len(times.order) - 1)


def last_forward_places(storages: Storages, times: OpTimes, chosen: Iterable[int]) -> dict[int, int]:
    """Return, for each of these storages, the place of its last use in the forward pass."""
    turn = storages.first_backward
    return {s: max(times.place[op] for op in storages.users[s] if op < turn) for s in chosen}


def first_needs(
    storages: Storages, times: OpTimes, chosen: Iterable[int], redos: Sequence[Redo] = ()
) -> dict[int, int]:
    """Return, for each of these storages, the first place that needs it after the forward pass, also for
    recomputation.
    """
    turn = storages.first_backward
    needs = {s: min(times.place[op] for op in storages.users[s] if op >= turn) for s in chosen}
    return needs_with_redos(storages, times, needs, redos)


def needs_with_redos(
    storages: Storages, times: OpTimes, needs: dict[int, int], redos: Sequence[Redo]
) -> dict[int, int]:
    """Return `needs`, changed to the first place that needs each storage for recomputation where that is earlier."""
    if not needs:
        return needs
    for redo in redos:
        for storage in needs.keys() & storages.touched_by(redo.ops):
            if storage not in redo.storages:
                needs[storage] = min(needs[storage], times.place[redo.before])
    return needs


@dataclass(frozen=True)
class Room:
    """Memory available to copies in transit: memory in use at each place without them, and the budget."""

    level_bytes: Sequence[int] | npt.NDArray[np.int64]
    budget_bytes: int

    @cached_property
    def spare_bytes(self) -> list[int]:
        """Bytes that may be in transit while the op at each place runs; negative over the budget."""
        return (self.budget_bytes - np.asarray(self.level_bytes, dtype=np.int64)).tolist()  # type: ignore[no-any-return]


def place_copies(
    storages: Storages,
    times: OpTimes,
    link: Link,
    moved: Sequence[int],
    needs: Mapping[int, int],
    room: Room | None = None,
) -> tuple[Offload, ...]:
    """Place the copies of these storages so that ops wait as little as possible, in the order of the copies back.

    Copies out run in sequence, each from the last use in the forward pass on. Memory is freed before the first op that
    starts after the copy's end, at the latest before the first op of the backward pass. With `room`, that is left until
    an op needs memory: then all that have ended are freed, for one wait. Copies back run almost as late as possible
    before their storage's place in `needs`. Where tensors in transit have no `room`, ops wait.
    """
    last_forward = last_forward_places(storages, times, moved)
    free, _ = _freed(storages, times, link, last_forward, turn_place(storages, times), room)
    back, _ = _fetched(storages, times, link, {s: needs[s] for s in moved}, free, room)
    return tuple(
        Offload(
            storage,
            after=times.order[last_forward[storage]],
            free=times.order[free[storage]],
            back=times.order[back[storage]],
        )
        for storage in sorted(moved, key=lambda s: (back[s], needs[s], s))
    )


def with_waits_ns(
    storages: Storages,
    times: OpTimes,
    link: Link,
    last_forward: Mapping[int, int],
    needs: Mapping[int, int],
    room: Room,
    cost_ns: float,
    most_ns: float,
) -> float:
    """Return `cost_ns` and the time that ops wait for copies placed by `place_copies`, in ns; infinite where that
    is at least `most_ns`. `last_forward` and `needs` have the places of the moved storages.
    """
    free, late_ns = _freed(storages, times, link, last_forward, turn_place(storages, times), room)
    if cost_ns + late_ns >= most_ns:
        return inf
    return cost_ns + (late_ns + _fetched(storages, times, link, needs, free, room)[1])


def _freed(
    storages: Storages, times: OpTimes, link: Link, last_forward: Mapping[int, int], turn: int, room: Room | None
) -> tuple[dict[int, int], float]:
    """Return the place of the op before which each storage is freed, following the ops to the turn, and how much later
    that is reached, in ns.
    """
    freed: dict[int, int] = {}
    leaving: deque[tuple[float, int]] = deque()
    waiting_bytes, busy_ns, late_ns = 0, 0.0, 0.0
    arrivals: dict[int, list[int]] = {}
    for storage, place in last_forward.items():
        arrivals.setdefault(place, []).append(storage)
    stops = sorted(place for place in arrivals if place <= turn)  # where a copy may begin
    spare_bytes = None if room is None else room.spare_bytes
    place = stops[0] if stops else turn + 1
    while place <= turn:
        now = times.start_ns[place] + late_ns
        tight = spare_bytes is None or place == turn or waiting_bytes > spare_bytes[place]
        while (
            leaving
            and tight
            and (
                leaving[0][0] <= now
                or place == turn
                or (spare_bytes is not None and waiting_bytes > spare_bytes[place])
            )
        ):
            end_ns, storage = leaving.popleft()
            late_ns += max(0.0, end_ns - now)
            now = max(now, end_ns)
            freed[storage] = place
            waiting_bytes -= storages.bytes[storage]
        for storage in sorted(arrivals.get(place, ())):
            busy_ns = max(busy_ns, times.end_ns[place] + late_ns) + link.out_ns(storages.bytes[storage])
            leaving.append((busy_ns, storage))
            waiting_bytes += storages.bytes[storage]
        following = bisect.bisect_right(stops, place)
        stop = stops[following] if following < len(stops) else turn + (not leaving)
        place += 1
        if not leaving:
            place = max(place, stop)  # nothing happens before this op
        elif spare_bytes is not None:
            while place < stop and waiting_bytes <= spare_bytes[place]:
                place += 1
    for _, storage in leaving:  # last used by the op at the turn itself
        freed[storage] = turn
    places = {s: max(place, last_forward[s] + 1) for s, place in freed.items()} | {
        s: place + 1 for s, place in last_forward.items() if s not in freed
    }
    return places, late_ns


def _fetched(
    storages: Storages,
    times: OpTimes,
    link: Link,
    needs: Mapping[int, int],
    freed: Mapping[int, int],
    room: Room | None,
) -> tuple[dict[int, int], float]:
    """Return the place of the op before which each copy back is launched, following the ops from the end to the
    turn, and how much earlier that has to be reached, in ns.
    """
    fetched: dict[int, int] = {}
    coming: deque[tuple[float, int]] = deque()
    waiting_bytes, busy_ns, early_ns = 0, float("inf"), 0.0
    arrivals: dict[int, list[int]] = {}
    for storage, place in needs.items():
        arrivals.setdefault(place, []).append(storage)
    first = min(needs.values(), default=0)
    low = min((freed[s] for s in needs), default=first)
    stops = sorted(arrivals)
    spare_bytes = None if room is None else room.spare_bytes
    start_ns = times.start_ns
    place = stops[-1] if stops else low - 1
    while place >= low:
        # All of `coming` must be back when the op after this place starts; here, while this one runs.
        now = start_ns[place] - early_ns
        while coming and spare_bytes is not None and waiting_bytes > spare_bytes[place]:
            begin_ns, storage = coming.popleft()
            fetched[storage] = place + 1  # not during this op: the next one waits
            early_ns += max(0.0, times.end_ns[place] - early_ns - begin_ns)
            waiting_bytes -= storages.bytes[storage]
        while coming and (coming[0][0] >= now or place <= freed[coming[0][1]]):
            fetched[coming[0][1]] = place
            waiting_bytes -= storages.bytes[coming.popleft()[1]]
        for storage in sorted(arrivals.get(place, ())):
            busy_ns = min(busy_ns, now) - link.back_ns(storages.bytes[storage]) * (1 + MARGIN)
            coming.append((busy_ns, storage))
            waiting_bytes += storages.bytes[storage]
        following = bisect.bisect_left(stops, place) - 1
        stop = stops[following] if following >= 0 else low - 1
        place -= 1
        if not coming:
            place = min(place, stop)  # nothing happens behind this op
            continue
        begin_ns, storage = coming[0]
        last = max(stop, freed[storage])
        while (
            place > last
            and start_ns[place] - early_ns > begin_ns
            and (spare_bytes is None or waiting_bytes <= spare_bytes[place])
        ):
            place -= 1
    for _, storage in coming:
        fetched[storage] = freed[storage]
    return {s: min(max(place, freed[s]), needs[s]) for s, place in fetched.items()}, early_ns
