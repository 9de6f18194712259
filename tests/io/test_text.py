"""Text from files in the output: visible, bounded, without markup or formulas."""

from __future__ import annotations

import csv
import io
import json
import pickle
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusim.errors import FileError, GpusimError, TraceError, UnknownNameError
from gpusim.report.terminal import PlainConsole, Table, styled
from gpusim.text import MESSAGE_CHARACTERS, VALUE_CHARACTERS, csv_cell, json_ascii, message, shortened, visible

DIRECTIONS = [chr(code) for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C)]
HIDDEN = [
    *map(chr, (*range(0x20), *range(0x7F, 0xA0))),
    *DIRECTIONS,
    *"\u200b\u200c\u200d\u2060\ufeff\u2028\u2029\u00ad",
    "\ud800",
    "\udfff",
    "\U000e0041",
    "\u0600",
    "\U00013430",
]
ANY_TEXT = st.text(st.one_of(st.characters(), st.sampled_from(HIDDEN)))


def is_clean(text: str) -> bool:
    """Whether no character of the text is hidden, moves a cursor or changes the direction."""
    return not any(unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") for character in set(text))


@pytest.mark.parametrize("character", HIDDEN, ids=ascii)
def test_every_hidden_character_becomes_its_escape(character: str) -> None:
    shown = visible(f"a{character}b")
    assert shown.startswith("a\\")
    assert shown.isascii()
    assert is_clean(shown)


def test_words_of_any_language_and_ordinary_signs_stay() -> None:
    text = "Grüße, 世界, مرحبا, [bold] <b> $x$ \\ 😀"
    assert visible(text) == text


def test_layout_keeps_line_feeds_and_tabs_alone() -> None:
    assert visible("a\n\tb\r\x1b[31m", layout=True) == "a\n\tb\\r\\x1b[31m"


@given(ANY_TEXT)
def test_visible_text_of_visible_text_is_the_same(text: str) -> None:
    assert visible(visible(text)) == visible(text)


@given(ANY_TEXT, st.integers(60, 400))
def test_shortened_text_fits_and_says_how_long_it_was(text: str, most: int) -> None:
    short = shortened(text, most)
    assert len(short) <= most
    assert short == text or short.endswith(f"... ({len(text):,} characters)")
    assert shortened(short, most) == short


@given(ANY_TEXT)
def test_an_error_is_one_clean_line_of_bounded_length(text: str) -> None:
    for error in (GpusimError(text), TraceError(text, text, place=text), UnknownNameError("op", text, [text, "a"])):
        line = str(error)
        assert len(line) <= MESSAGE_CHARACTERS
        assert is_clean(line)
        assert line == message(line)
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error)
        assert str(again) == line


@pytest.mark.parametrize("value", ["x" * 10_000, "'" + "a b " * 3_000 + "'", '"' + "a b " * 3_000 + '"'])
def test_a_long_value_in_a_message_is_cut_and_the_rest_stays(value: str) -> None:
    line = str(TraceError("t.json", f"found {value} in it", place="$.ops[3]"))
    assert line.startswith("t.json: $.ops[3]: found ")
    assert line.endswith(" in it")
    assert " characters)" in line
    assert len(line) <= VALUE_CHARACTERS + 60


def test_apostrophes_of_prose_quote_no_value() -> None:
    text = f"the GPU's limit {'is small ' * 40}in the plan's words"
    assert message(text) == text


def test_a_message_in_a_message_keeps_the_mark_of_what_was_cut() -> None:
    inner = str(GpusimError(f"kernel '{'x' * 900}' is too long"))
    assert "(900 characters)" in str(FileError("t.json", inner))


def test_an_unknown_name_lists_all_of_a_few_and_the_nearest_of_many() -> None:
    assert str(UnknownNameError("policy", "b", ["c", "a"])).endswith("(there are: a, c)")
    many = [f"convolution_{number}" for number in range(3_000)]
    line = str(UnknownNameError("op", "convolution_12x", many))
    assert "did you mean 'convolution_12'?" in line
    assert line.endswith(" and 2,995 more)")
    assert len(line) < 300


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1"])
def test_a_text_cell_is_never_a_formula(text: str) -> None:
    cell = csv_cell(text)
    assert cell.startswith("'")
    assert is_clean(cell)


@pytest.mark.parametrize("value", [-1, -1.5, 0, True, None, "googlenet", "a=b", ""])
def test_numbers_and_other_cells_stay(value: object) -> None:
    assert csv_cell(value) == value


@given(st.lists(ANY_TEXT.map(lambda text: text.encode("utf-8", "ignore").decode()), min_size=2, max_size=5))
def test_csv_cells_keep_their_row_and_start_no_formula(cells: list[str]) -> None:
    out = io.StringIO()
    csv.writer(out).writerow(map(csv_cell, cells))
    rows = list(csv.reader(io.StringIO(out.getvalue())))
    assert len(rows) == 1
    assert len(rows[0]) == len(cells)
    assert not any(cell.startswith(("=", "+", "-", "@")) for cell in rows[0])


@given(ANY_TEXT.map(lambda text: text.encode("utf-8", "ignore").decode()))
def test_json_says_the_same_without_hidden_characters(text: str) -> None:
    document = json_ascii(json.dumps({"a": text}, ensure_ascii=False, indent=1))
    assert json.loads(document) == {"a": text}
    assert is_clean(document.replace("\n", ""))


@pytest.mark.parametrize(
    "text", ["[/red]", "[bold]x[/bold]", "[link=http://evil.example]x[/link]", ":smile:", "\x1b[2J"]
)
def test_a_console_takes_text_as_it_is(text: str) -> None:
    out = io.StringIO()
    console = PlainConsole(file=out, width=200)
    console.print(text)
    console.print(styled((text, "bold"), "!"))
    table = Table(text)
    table.add_row(text)
    console.print(table)
    assert out.getvalue().count(visible(text)) == 4
    assert is_clean(out.getvalue().replace("\n", ""))


def test_a_cell_is_one_line() -> None:
    out = io.StringIO()
    table = Table("name")
    table.add_row("a\nVerdict. Worth it")
    PlainConsole(file=out, width=200).print(table)
    assert "a\\nVerdict. Worth it" in out.getvalue()
