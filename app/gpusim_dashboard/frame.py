"""The frame around every page: navigation, title, and one place for errors.

What takes time to import (the engine) is imported once the navigation and the title are drawn.
"""

from __future__ import annotations

from pathlib import Path

import streamlit as st

#: Less empty space around a page than by default: figures need the width.
STYLE = """<style>
.stMainBlockContainer { padding: 4rem 2rem 2rem; }
.stMainBlockContainer h1 { font-size: 1.75rem; padding: 0 0 0.5rem; }
.st-key-no-verdict { background: rgba(128, 128, 128, 0.15); border-radius: 0.5rem; padding: 1rem; }
</style>"""
#: What this is, in one line above every page.
PURPOSE = (
    "<div><strong>gpusim</strong> predicts a PyTorch step on a GPU: would it be faster if independent operations ran "
    "at the same time, and by how much?</div>"
)
#: Not named `pages`: Streamlit would take the files in it for pages of their own.
FOLDER = Path(__file__).resolve().parent.parent / "views"
#: Name in addresses -> title and icon.
PAGES = {
    "overview": ("Overview", "dashboard"),
    "explore": ("Explore", "search"),
    "timeline": ("Timeline", "view_timeline"),
    "what-if": ("What-if", "tune"),
    "limits": ("Limits", "speed"),
    "memory": ("Memory", "memory"),
    "fidelity": ("Fidelity", "straighten"),
}


def main() -> None:
    """One run of the dashboard's script."""
    st.set_page_config(page_title="gpusim", page_icon="⏱️", layout="wide")
    st.html(STYLE)
    pages = {
        name: st.Page(
            FOLDER / f"{name.replace('-', '_')}.py",
            title=title,
            icon=f":material/{icon}:",
            url_path=name,
            default=name == "overview",
        )
        for name, (title, icon) in PAGES.items()
    }
    page = st.navigation(list(pages.values()))
    name = next(name for name, each in pages.items() if each.title == page.title)
    state = st.session_state
    # The address as it was opened: a change of page forgets it.
    link = state.setdefault("link", st.query_params.to_dict())
    new = "trace" not in state or "uploads" not in state
    wanted = link.get("page", name)
    # The page that the query names counts, not the path: a reload during a change of page has the old path.
    if new and wanted != name and wanted in PAGES:
        st.switch_page(pages[wanted])
    st.html(PURPOSE)
    st.title(page.title)

    from gpusim.errors import GpusimError, UnknownNameError
    from gpusim.text import message
    from gpusim_dashboard import changes, choice, controls, lifetime, ready, view

    if new:
        state.problems = choice.begin(link)
        state.what_if = changes.from_address(link, state.problems)
        if wanted not in PAGES:
            state.problems.append(f"page={wanted[:40]!r}: {UnknownNameError('page', wanted, PAGES)}")
    if state.problems:
        st.error(view.broken_address([message(problem) for problem in state.problems]), icon=":material/link_off:")
    state.problems = []
    with lifetime.script():
        controls.sidebar()
    choice.write_address(name, changes.settings() if name == "what-if" else None)
    try:
        with lifetime.script():
            if controls.upload_error():
                controls.show_upload_error()
            else:
                page.run()
    except GpusimError as error:  # the user's: one line, as on the command line
        st.error(view.plain(str(error)), icon=":material/error:")
    finally:
        ready.shown().set()
