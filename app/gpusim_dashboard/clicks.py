"""Clicks on the bars of a figure in which dragging selects a time window.

Streamlit reports either drags or clicks of a figure, so this adds its own listener in the browser.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import streamlit as st

#: Listens to the page's figure, also after Streamlit has replaced it.
SCRIPT: Final = """
export default function ({ setTriggerValue }) {
  const listen = () => {
    const figure = document.querySelector('.js-plotly-plot');
    if (!figure?.on) return;
    if (!figure.gpusimClicked) figure.on('plotly_click', (event) => figure.gpusimClicked(event));
    figure.gpusimClicked = (event) => {
      const task = event.points.map((point) => point.customdata).flat().find((each) => each >= 0);
      if (task !== undefined) setTriggerValue('clicked', task);
    };
  };
  listen();
  const timer = setInterval(listen, 200);
  return () => clearInterval(timer);
}
"""
KEY: Final = "clicks on bars"


def listen(take: Callable[[int], None]) -> None:
    """Call `take` with the task of a bar (its `customdata`) that is clicked, before the page runs again."""

    def clicked() -> None:
        task = st.session_state[KEY].get("clicked")
        if task is not None:
            take(int(task))

    _component()(key=KEY, on_clicked_change=clicked, height=1)


@st.cache_resource(show_spinner=False)
def _component() -> Any:
    return st.components.v2.component("gpusim_clicks", html="<span></span>", js=SCRIPT)
