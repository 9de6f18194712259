"""The pages, in the order of the navigation. A page is a file in `app/views` and a line here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

#: Not named `pages`: Streamlit would take the files in it for pages of their own.
FOLDER: Final = Path(__file__).resolve().parent.parent / "views"

STEP, HARDWARE, SCHEDULE, STREAMS = "step", "hardware", "schedule", "streams"
#: What a page about one schedule of one step takes from the sidebar.
ALL: Final = (STEP, HARDWARE, SCHEDULE, STREAMS)


@dataclass(frozen=True)
class Entry:
    """One page."""

    name: str
    """In addresses; its file is `views/<name>.py`, with underscores."""
    label: str
    """In the navigation."""
    question: str
    """What it answers: its heading."""
    icon: str
    controls: tuple[str, ...] = ALL
    """What it takes from the sidebar; what is not here is chosen on the page itself, or does not matter to it."""

    @property
    def file(self) -> Path:
        """Its script."""
        return FOLDER / f"{self.name.replace('-', '_')}.py"


PAGES: Final = {
    entry.name: entry
    for entry in (
        Entry("start", "Start", "Would your step be faster on several streams?", "home", ()),
        Entry("verdict", "Verdict", "Should I use streams?", "gavel", (STEP, HARDWARE, STREAMS)),
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
#: Names that pages had: links to them still open.
OLD_NAMES: Final = {"overview": "verdict", "explore": "search", "fidelity": "accuracy"}
