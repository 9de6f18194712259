"""The pages, in the order of the navigation. Each has a file in `app/views` and an entry here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

#: Not named `pages`: Streamlit would make a page of each file in it.
FOLDER: Final = Path(__file__).resolve().parent.parent / "views"

STEP, HARDWARE, SCHEDULE, STREAMS = "step", "hardware", "schedule", "streams"
#: Controls in the sidebar of a page about one schedule of one step.
ALL: Final = (STEP, HARDWARE, SCHEDULE, STREAMS)


@dataclass(frozen=True)
class Entry:
    """One page."""

    name: str
    """Name in addresses; the file is `views/<name>.py`, with underscores."""
    label: str
    """Name in the navigation."""
    question: str
    """The question that the page answers: its heading."""
    icon: str
    controls: tuple[str, ...] = ALL
    """Controls in the sidebar; the page itself has the others, or does not need them."""
    answer_first: bool = False
    """Whether the page draws the sidebar, after an answer that is at hand: its controls take a browser longer."""

    @property
    def file(self) -> Path:
        """The page's script."""
        return FOLDER / f"{self.name.replace('-', '_')}.py"


PAGES: Final = {
    entry.name: entry
    for entry in (
        Entry("start", "Start", "Would your step be faster on several streams?", "home", ()),
        Entry("verdict", "Verdict", "Should I use streams?", "gavel", (STEP, HARDWARE, STREAMS), True),
        Entry("timeline", "Timeline", "What runs when, and what waits?", "view_timeline"),
        Entry("limits", "Limits", "Why not more?", "speed", (STEP, HARDWARE, STREAMS)),
        Entry("what-if", "What-if", "What if something were different?", "tune", (STEP,)),
        Entry("memory", "Memory", "Does it fit?", "memory"),
        Entry("memory-plans", "Memory plans", "Which plan keeps a byte budget?", "swap_vert", (STEP, HARDWARE)),
        Entry("parallel", "Several GPUs", "What if several GPUs shared it?", "hub", (STEP, HARDWARE)),
        Entry("transfer", "Transfer", "Does a schedule hold elsewhere?", "swap_horiz", (STEP,)),
        Entry("compare", "Compare", "Which is faster, and where?", "compare_arrows", ()),
        Entry("search", "Search", "Is there a faster schedule?", "search", (STEP, HARDWARE, STREAMS)),
        Entry("accuracy", "Accuracy", "How wrong is a prediction?", "straighten", (STEP,)),
    )
}
FIRST: Final = "start"
#: Former names of pages: links to them still work.
OLD_NAMES: Final = {"overview": "verdict", "explore": "search", "fidelity": "accuracy"}
