"""The settings of every page, kept in its address: a reload restores them and a link shows the same page.

Each page keeps its settings in the session as strings by name. A control parses and checks its own string, and stores
it only if it differs from the default. Invalid values in an address are reported once, in a banner, and replaced by the
defaults.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import streamlit as st

from gpusim.errors import GpusimError, OptionError, UnknownNameError
from gpusim.text import message
from gpusim_dashboard import choice, view
from gpusim_dashboard.pages import PAGES

Value = TypeVar("Value")
#: Names allowed in the address of every page.
COMMON = ("page", *choice.NAMES)


def begin(link: Mapping[str, str], page: str) -> None:
    """Store the settings that an address gives for its page; each control checks its own."""
    st.session_state.settings = {page: {name: text for name, text in link.items() if name not in COMMON}}
    st.session_state.about = {}


def open_banner() -> None:
    """Reserve the place of the banner and clear the problems of the previous run."""
    st.session_state.banner = st.empty()
    st.session_state.problems = []


def complain(*problems: str) -> None:
    """Show problems of the address in the banner."""
    state = st.session_state
    state.problems += map(message, problems)
    if state.problems:
        state.banner.error(view.broken_address(state.problems), icon=":material/link_off:")


def drop_unasked(page: str) -> None:
    """Drop settings that an address gives for a page without settings."""
    if page not in st.session_state.about:
        st.session_state.settings.pop(page, None)


def write(page: str) -> None:
    """Write the page, the step, hardware, policy and streams, and its settings into the address."""
    state = st.session_state
    wanted = {"page": page}
    if PAGES[page].controls:
        wanted |= {name: str(state[name]) for name in choice.NAMES}
    wanted |= state.settings.get(page, {})
    if st.query_params.to_dict() != wanted:
        st.query_params.from_dict(wanted)


class Settings:
    """The settings of one page, and the controls that change them.

    `about` identifies their subject, such as the step: a change of it resets them.
    """

    def __init__(self, page: str, *about: object) -> None:
        state = st.session_state
        self.page = page
        self.about = repr(about)
        if state.about.setdefault(page, self.about) != self.about:
            state.settings[page] = {}
            state.about[page] = self.about
        self.texts: dict[str, str] = state.settings.setdefault(page, {})
        self._known: set[str] = set()

    def reset(self) -> None:
        """Return every setting to its default."""
        self.texts.clear()
        # The keys of controls contain the round, so new controls start at their defaults.
        rounds = st.session_state.setdefault("rounds", {})
        rounds[self.page] = rounds.get(self.page, 0) + 1

    def __bool__(self) -> bool:
        """Return whether any setting differs from its default."""
        return bool(self.texts)

    def value(self, name: str, default: Value, read: Callable[[str], Value]) -> Value:
        """Return a setting's value; if its string is invalid, report that and return the default."""
        self._known.add(name)
        text = self.texts.get(name)
        if text is None:
            return default
        try:
            return read(text)
        except GpusimError as error:
            del self.texts[name]
            complain(f"{name}={text[:40]!r}: {error}")
            return default

    def keep(self, name: str, value: Any, default: Any) -> None:
        """Store a setting, unless it has its default value."""
        self._known.add(name)
        self.texts.pop(name, None)
        if value != default:
            self.texts[name] = _text(value)

    def finish(self) -> None:
        """Report and drop settings that no control read, then write the address. Call it after the last control."""
        for name in sorted(set(self.texts) - self._known):
            complain(f"{name[:40]!r}: {UnknownNameError('setting', name, self._known)}")
            del self.texts[name]
        write(self.page)

    def forget(self, mark: str) -> None:
        """Drop the settings whose names begin with `mark`: their controls are hidden."""
        for name in [name for name in self.texts if name.startswith(mark)]:
            del self.texts[name]

    def select(self, cell: Any, label: str, name: str, options: Iterable[Value], default: Value, **more: Any) -> Value:
        """A choice of one option. `kind` names another widget than a select box, `known` adds options valid in an
        address.
        """
        offered = list(options)
        kind = more.pop("kind", "selectbox")
        start = self.value(name, default, lambda text: one_of(text, _words(name), offered))
        key = self._key(name, start, *map(_text, offered))
        if st.session_state[key] not in offered:
            st.session_state[key] = start
        value: Value = getattr(cell, kind)(label, offered, key=key, **more)
        if value is None:  # a segment that was clicked off
            value = start
        self.keep(name, value, default)
        return value

    def choose_several(
        self, cell: Any, label: str, name: str, options: Iterable[str], default: Iterable[str] = (), **more: Any
    ) -> list[str]:
        """A choice of several options."""
        offered, usual = list(options), list(default)
        start = self.value(name, usual, lambda text: [one_of(part, _words(name), offered) for part in _parts(text)])
        key = self._key(name, start, *offered)
        value: list[str] = cell.multiselect(label, offered, key=key, **more)
        self.keep(name, value, usual)
        return value

    def slider(self, cell: Any, label: str, name: str, low: Any, high: Any, default: Any, **more: Any) -> Any:
        """A slider; whole numbers if `low` is one."""
        read = _whole_between(low, high) if isinstance(low, int) else _number_between(low, high)
        key = self._key(name, self.value(name, default, read), low, high)
        value = cell.slider(label, low, high, key=key, **more)
        self.keep(name, value, default)
        return value

    def number(
        self, cell: Any, label: str, name: str, low: int, high: int, default: int | None, **more: Any
    ) -> int | None:
        """A field for a whole number; None if empty."""
        key = self._key(name, self.value(name, default, _whole_between(low, high)), low, high)
        value: int | None = cell.number_input(label, low, high, key=key, **more)
        self.keep(name, value, default)
        return value

    def text(self, cell: Any, label: str, name: str, **more: Any) -> str:
        """A line of text."""
        key = self._key(name, self.value(name, "", str))
        value = str(cell.text_input(label, key=key, **more)).strip()
        self.keep(name, value, "")
        return value

    def toggle(self, cell: Any, label: str, name: str, default: bool = False, **more: Any) -> bool:
        """On or off."""
        start = self.value(name, default, lambda text: one_of(text, _words(name), ["on", "off"]) == "on")
        key = self._key(name, start)
        value = bool(cell.toggle(label, key=key, **more))
        self.keep(name, value, default)
        return value

    def _key(self, name: str, start: Any, *about: object) -> str:
        """The key of a control, which starts at `start`. A change of anything in `about` makes a new control."""
        turn = st.session_state.get("rounds", {}).get(self.page, 0)
        key = f"{self.page} {name} {turn} {hash((self.about, *about)):x}"
        if key not in st.session_state:
            st.session_state[key] = start
        return key


def one_of(text: str, kind: str, known: Iterable[Value]) -> Value:
    """Return the value that a string stands for. Raises `UnknownNameError`."""
    texts = {_text(value): value for value in known}
    if text not in texts:
        raise UnknownNameError(kind, text, texts)
    return texts[text]


def _words(name: str) -> str:
    """A setting's name in a message."""
    return name.replace("_", " ")


def _text(value: Any) -> str:
    """A value as written in an address."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return ",".join(map(_text, value))
    return str(value)


def _parts(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def _whole_between(low: int, high: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        value = int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else low - 1
        if not low <= value <= high:
            raise OptionError(f"a number between {low} and {high}")
        return value

    return read


def _number_between(low: float, high: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise OptionError(f"a number between {low:g} and {high:g}")
        return value

    return read
