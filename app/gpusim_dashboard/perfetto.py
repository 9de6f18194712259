"""A button for Perfetto: it opens in a new tab and receives the timeline from this one as a message.

The file stays in the browser: it passes through no third-party server. Nothing is loaded from Perfetto before the
click.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import streamlit as st

#: Opens Perfetto's page at once, as browsers let a click do, asks this server for the timeline, and hands it over when
#: both are there. Perfetto answers PING with PONG once it listens (https://perfetto.dev/docs/visualization/deep-linking-to-perfetto-ui).
SCRIPT = """
export default function ({ parentElement, data, setTriggerValue }) {
  const ORIGIN = 'https://ui.perfetto.dev';
  const button = parentElement.querySelector('button');
  const state = (window.__gpusimPerfetto ??= {});
  button.disabled = false;
  button.onclick = () => {
    const tab = window.open(ORIGIN);
    if (!tab) { button.textContent = 'The browser blocked the new tab'; return; }
    Object.assign(state, { tab, ready: false, sent: false });
    window.addEventListener('message', function listen(event) {
      if (event.source !== tab || event.origin !== ORIGIN || event.data !== 'PONG') return;
      window.removeEventListener('message', listen);
      state.ready = true;
      send();
    });
    const timer = setInterval(() => {
      if (state.ready || tab.closed) clearInterval(timer); else tab.postMessage('PING', ORIGIN);
    }, 100);
    setTriggerValue('wanted', Date.now());
  };
  const send = () => {
    if (!state.ready || !state.file || state.sent || !state.tab) return;
    state.sent = true;
    const bytes = Uint8Array.from(atob(state.file), (character) => character.charCodeAt(0));
    state.tab.postMessage(
      { perfetto: { buffer: bytes.buffer, title: state.title, keepApiOpen: false } }, ORIGIN);
    state.file = null;
  };
  if (data && data.file) { state.file = data.file; state.title = data.title; send(); }
}
"""
MARKUP = '<button type="button">Open in Perfetto</button>'
CSS = """
button { font: inherit; font-size: 0.875rem; width: 100%; min-height: 2.5rem; padding: 0.25rem 0.75rem; cursor: pointer;
  color: inherit; background: transparent; border-radius: 0.5rem;
  border: 1px solid color-mix(in srgb, currentColor 25%, transparent); }
button:hover, button:focus-visible { border-color: currentColor; }
"""


def button(cell: Any, make: Callable[[], bytes], title: str, key: str) -> None:
    """Draw the button; `make` returns the file (gzipped JSON) after a click."""
    with cell:
        wanted = st.session_state.pop(f"{key} wanted", False)
        data = {"file": base64.b64encode(make()).decode(), "title": title} if wanted else {}

        def asked() -> None:
            st.session_state[f"{key} wanted"] = True

        _component()(key=key, data=data, on_wanted_change=asked, width="content")


@st.cache_resource(show_spinner=False)
def _component() -> Any:
    return st.components.v2.component("gpusim_perfetto", html=MARKUP, css=CSS, js=SCRIPT)
