"""An error about a command line repeats at most 200 characters of a word, for any command and option."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from gpusim.cli import cli, main
from gpusim.cli.common import USAGE_CHARACTERS, usage_line
from gpusim.errors import MOST_LISTED
from gpusim.text import MESSAGE_CHARACTERS, VALUE_CHARACTERS, visible
from gpusim.trace.store import write_trace
from tests.fuzz.families import COMMANDS, NOT_CHANGED
from tests.support.helpers import chain_trace

#: Long values that patterns trip over: blanks, quotes of either kind, and characters that grow when shown.
LONG = {
    "one word": "a" * 5000,
    "words": "x y " * 1000,
    "apostrophes": "it's so " * 600,
    "both quotes": "a\"b'c `d` " * 400,
    "escapes": "\x1b[2J \u202e " * 100,
    "digits": "9" * 5000,
    "lines": "a b\n" * 1000,
    "emoji": "\U0001f600 " * 500,
}
#: A usage line, or an unknown name with all known names.
LONGEST_LINE = max(USAGE_CHARACTERS + len("gpusim: "), VALUE_CHARACTERS + MOST_LISTED + 60)
#: Further arguments: without its trace, most commands would report that first.
WORDS = {**COMMANDS, "app": (), "import": ("trace.json", "-o", "out.json"), "doctor": ("trace.json",), "policies": ()}


def options() -> Iterator[tuple[str, str]]:
    """Yield every option that takes a value, with its command."""
    for name, command in cli.commands.items():
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.is_flag and not parameter.count:
                for option in parameter.opts:
                    if option not in NOT_CHANGED:
                        yield name, option


@pytest.fixture
def refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    """Return the error for words that the command line refuses."""
    write_trace(chain_trace(3), tmp_path / "trace.json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("the dashboard was started"))

    def call(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["gpusim", *words])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exited:
            main()
        assert exited.value.code == 2, words
        return capsys.readouterr().err

    return call


def is_short(err: str, value: str) -> bool:
    """Whether the error shows at most the permitted part of a value, and its line is short enough."""
    shown = visible(" ".join(value.split()))
    repeated = any(shown[at : at + VALUE_CHARACTERS + 1] in err for at in range(0, len(shown) - VALUE_CHARACTERS, 7))
    return not repeated and max(map(len, err.splitlines())) <= MESSAGE_CHARACTERS


@pytest.mark.parametrize("kind", LONG)
def test_every_option_with_a_long_value_is_refused_in_short_lines(refusal, kind: str) -> None:  # type: ignore[no-untyped-def]
    for command, option in options():
        for words in ((option, LONG[kind]), (f"{option}={LONG[kind]}",)):
            err = refusal(command, *WORDS.get(command, ()), *words)
            assert is_short(err, LONG[kind]), f"{command} {option}: {err}"


@pytest.mark.parametrize("kind", LONG)
def test_long_words_that_no_command_knows_are_refused_in_short_lines(refusal, kind: str) -> None:  # type: ignore[no-untyped-def]
    value = LONG[kind]
    for name in cli.commands:
        words = WORDS.get(name, ())
        for more in ((value,), (value, value), (f"--{value}",), (f"-{value}",)):
            err = refusal(name, *words, *more)
            assert is_short(err, value), f"{name} {more[0][:20]}: {err}"
        said = refusal(name, *words, *value.split()[:500])
        assert max(map(len, said.splitlines())) <= LONGEST_LINE, said
    assert is_short(refusal(value), value)
    assert is_short(refusal(f"--{value}"), value)


def test_value_that_click_writes_between_quotes_is_cut_with_all_quotes_in_it() -> None:
    value = "a\"b'c " * 100
    said = usage_line(f"Invalid value for '--streams': {value!r} is not a valid integer.", ["--streams", value])
    assert said.startswith("Invalid value for '--streams': '")
    assert said.endswith("... (599 characters)' is not a valid integer.")
    assert len(said) < 2 * VALUE_CHARACTERS


def test_line_of_many_short_words_is_cut_too() -> None:
    words = [f"w{number}" for number in range(3000)]
    assert len(usage_line(f"Got unexpected extra arguments ({' '.join(words)})", words)) == USAGE_CHARACTERS
