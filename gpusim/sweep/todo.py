"""Which point a worker gets next: workers keep to their traces and GPUs, as long as there are points of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable

from gpusim.sweep.grid import Group, Point


class Todo:
    """Points not yet handed out. A worker keeps to its group, whose op graph it has, as long as there is any."""

    def __init__(self, points: Iterable[Point]) -> None:
        self.groups: dict[Group, deque[Point]] = {}
        for point in points:
            self.groups.setdefault(point.group, deque()).append(point)

    def __len__(self) -> int:
        return sum(map(len, self.groups.values()))

    def __bool__(self) -> bool:
        return bool(self.groups)

    def take(self, last: Group | None, others: Container[Group | None]) -> Point:
        """The next point for a worker whose last group was `last`.

        It is of that group, else of one that no other worker is at, else of the one with most points left.
        """
        if last is None or last not in self.groups:
            free = (group for group in self.groups if group not in others)
            last = next(free, None) or max(self.groups, key=lambda group: len(self.groups[group]))
        point = self.groups[last].popleft()
        if not self.groups[last]:
            del self.groups[last]
        return point

    def take_more(self, first: Point, count: int) -> list[Point]:
        """Up to `count` points that come right after `first`, of its group and policy."""
        queue = self.groups.get(first.group, deque())
        taken: list[Point] = []
        while queue and len(taken) < count and queue[0].policy == first.policy:
            taken.append(queue.popleft())
        if not queue:
            self.groups.pop(first.group, None)
        return taken

    def put_back(self, points: Iterable[Point]) -> None:
        """Hand out these again, before the others of their group."""
        for point in reversed(list(points)):
            self.groups.setdefault(point.group, deque()).appendleft(point)
