"""Messages of `gpusim.optimize` while it works, and the time that its stages take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Final, Literal

#: Stages of `optimize`: what takes so long that a user may ask why.
Stage = Literal[
    "eager",
    "recording",
    "cache",
    "layout",
    "lowering",
    "engine",
    "compiling",
    "profiling",
    "regions",
    "variants",
    "search",
    "trial",
    "check",
]
#: Shortest stage that is worth a word, in s.
NAMED_S: Final = 0.05


class Progress:
    """Function that passes on messages, and a clock of stages. A stage within another one counts by itself."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = perf_counter) -> None:
        self._say, self._clock = say, clock
        self._open: list[Stage] = []
        self._since_s = 0.0
        self.seconds: dict[str, float] = {}
        """Stage -> its time so far, in s, in the order of first use."""

    def __call__(self, text: str) -> None:
        """Pass on a message."""
        self._say(text)

    @contextmanager
    def stage(self, name: Stage) -> Iterator[None]:
        """Count the time within this context for a stage."""
        self._count()
        self._open.append(name)
        self.seconds.setdefault(name, 0.0)
        try:
            yield
        finally:
            self._count()
            self._open.pop()

    def begin(self) -> None:
        """Forget all stages, for another step."""
        self.seconds = {}

    def _count(self) -> None:
        """Count the time since the last change for the innermost stage."""
        now_s = self._clock()
        if self._open:
            self.seconds[self._open[-1]] += now_s - self._since_s
        self._since_s = now_s

    @property
    def text(self) -> str:
        """Name the stages with their times, in one line."""
        named = [f"{name} {taken_s:.1f}" for name, taken_s in self.seconds.items() if taken_s >= NAMED_S]
        return f"seconds by stage: {', '.join(named) or 'none'}"
