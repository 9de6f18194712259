"""The frame of every page: navigation, heading, and error handling.

Slow imports (the engine) happen after the navigation and the heading are drawn.
"""

from __future__ import annotations

import contextlib

import streamlit as st

from gpusim_dashboard.pages import FIRST, FOLDER, OLD_NAMES, PAGES
from gpusim_dashboard.style import STYLE


def main() -> None:
    """One run of the dashboard's script."""
    st.set_page_config(page_title="gpusim", page_icon="⏱️", layout="wide")
    st.html(STYLE)
    st.logo(FOLDER.parent / "logo.svg", size="large")
    pages = {
        name: st.Page(
            entry.file,
            title=entry.label,
            icon=f":material/{entry.icon}:",
            url_path=name,
            default=name == FIRST,
        )
        for name, entry in PAGES.items()
    }
    page = st.navigation(list(pages.values()), expanded=True)
    name = next(name for name, each in pages.items() if each.title == page.title)
    state = st.session_state
    # The address as first opened; navigation changes it.
    link = state.setdefault("link", st.query_params.to_dict())
    new = "uploads" not in state
    wanted = link.get("page", name)
    wanted = OLD_NAMES.get(wanted, wanted)
    # The query decides the page, not the path: a reload during navigation still has the old path.
    if new and wanted != name and wanted in PAGES:
        st.switch_page(pages[wanted])
    st.title(PAGES[name].question, anchor=False)

    from gpusim.errors import GpusimError, UnknownNameError
    from gpusim_dashboard import address, choice, controls, html, lifetime, ready, view

    state.pages = pages
    address.open_banner()
    if new:
        address.complain(*choice.begin(link))
        address.begin(link, name)
        if wanted not in PAGES:
            address.complain(f"page={wanted[:40]!r}: {UnknownNameError('page', wanted, PAGES)}")
    address.write(name)
    try:
        with lifetime.script():
            state.sidebar = PAGES[name].controls
            if not PAGES[name].answer_first:
                controls.sidebar()
            page.run()
            controls.sidebar()
        html.copies()
        address.drop_unasked(name)
    except GpusimError as error:  # the user's: one line, as on the command line
        st.error(view.plain(str(error)), icon=":material/error:")
        controls.sidebar()
    finally:
        with contextlib.suppress(RuntimeError):  # a session that has ended meanwhile has no address
            address.write(name)
        ready.shown().set()
