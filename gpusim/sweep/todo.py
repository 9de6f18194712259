"""Distribution of points to workers, which keep to their trace and GPU as long as there are points."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable

from gpusim.sweep.grid import Group, Point


class Todo:
    """Points not yet handed out. A worker keeps to its group, whose op graph it has cached, while points remain."""

    def __init__(self, points: Iterable[Point]) -> None:
        self.groups: dict[Group, deque[Point]] = {}
        for point in points:
            self.groups.setdefault(point.group, deque()).append(point)

    def __len__(self) -> int:
        return sum(map(len, self.groups.values()))

    def __bool__(self) -> bool:
        return bool(self.groups)

    def take(self, last: Group | None, others: Container[Group | None]) -> Point:
        """Take the next point for a worker with last group `last`.

        It is from that group, else from one without other workers, else from the one with the most points left.
        """
        if last is None or last not in self.groups:
            free = (group for group in self.groups if group not in others)
            last = next(free, None) or max(self.groups, key=lambda group: len(self.groups[group]))
        point = self.groups[last].popleft()
        if not self.groups[last]:
            del self.groups[last]
        return point

    def take_more(self, first: Point, count: int) -> list[Point]:
        """Take up to `count` points directly after `first`, of the same group and policy."""
        queue = self.groups.get(first.group, deque())
        taken: list[Point] = []
        while queue and len(taken) < count and queue[0].policy == first.policy:
            taken.append(queue.popleft())
        if not queue:
            self.groups.pop(first.group, None)
        return taken

    def put_back(self, points: Iterable[Point]) -> None:
        """Put points back, to be handed out before the others of their group."""
        for point in reversed(list(points)):
            self.groups.setdefault(point.group, deque()).appendleft(point)
