"""The manual: plain sentences, a word budget, and generated parts that are up to date."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

from gpusim.cli import cli
from gpusim.formats.hardware import Contention, GraphCosts
from tests.repo.test_readme import script

ROOT = Path(__file__).parents[2]
LIMITS = {"docs/accuracy.md": 1_200, "docs/hardware-rules.md": 1_500}


@pytest.fixture(scope="module")
def prose() -> ModuleType:
    return script("check_prose")


def test_manual_and_docstrings_of_the_api_are_plain(prose: ModuleType) -> None:
    assert prose.all_problems() == []


@pytest.mark.parametrize("page", LIMITS)
def test_page_keeps_its_word_budget(page: str) -> None:
    assert len((ROOT / page).read_text(encoding="utf-8").split()) < LIMITS[page]


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("word\n" * 39 + "end.", ""),
        ("word\n" * 20 + "word " * 20 + "end.", "sentence of 41 words"),
        ("word " * 20 + "end.\n" + "word " * 20 + "end!", ""),
        ("- an item.\n- another one\n  on two lines.\n", ""),
        ("- an item\n", "list item without a full stop"),
        ("1. an item.\n2. another\n", "list item without a full stop"),
        ("x" * 121, "line of 121 characters"),
        ("| " + "x" * 121 + " |", ""),
        ("| " + "word " * 41 + " |", "sentence of 41 words"),
        ("```\n" + "word " * 41 + "\n```", ""),
        ("version 1.5 and file.md\n" * 11, "sentence of 44 words"),
    ],
)
def test_check_finds_long_sentences_long_lines_and_open_items(prose: ModuleType, text: str, wrong: str) -> None:
    found = prose.problems(text, "page")
    assert bool(found) == bool(wrong)
    assert not wrong or wrong in found[0]


def test_wrapping_leaves_words_tables_and_code_as_they_are(prose: ModuleType) -> None:
    item = "- " + "word " * 35 + "end."
    text = f"# Title\n\n{item}\n- short.\n\n| {'x' * 130} |\n\n```\n{'y ' * 80}\n```\n"
    new = prose.wrapped(text)
    assert new.split() == text.split()
    assert len(prose.problems(text, "page")) == 1
    assert prose.problems(new, "page") == []
    assert prose.wrapped(new) == new


@pytest.mark.parametrize(
    "name",
    [
        "make_accuracy_page",
        "make_command_pages",
        "make_format_pages",
        "make_manifest",
        "make_optimize_table",
        "make_rule_values",
        "make_schemas",
    ],
)
def test_generated_parts_are_up_to_date(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert script(name).main(["--check"]) == 0, capsys.readouterr().out


def test_every_command_has_a_page_and_every_page_a_command() -> None:
    pages = {page.stem for page in (ROOT / "docs" / "commands").glob("*.md")} - {"index"}
    assert pages == set(script("make_command_pages").commands())


def test_rules_page_has_every_constant_of_launches_and_contention() -> None:
    page = (ROOT / "docs" / "hardware-rules.md").read_text(encoding="utf-8").split("<!-- values:begin -->")[0]
    names = (*GraphCosts.__struct_fields__, *Contention.__struct_fields__)
    assert [name for name in names if name not in page] == []


#: A command and the part of its output on the command's page.
EXAMPLE = re.compile(r"```sh\n(gpusim [^\n]*)\n```\n\n```\n(.*?)\n```", re.DOTALL)
#: Commands whose output has no measured seconds, and which take files of this repository alone.
REPEATABLE = ("explain", "explore", "hardware", "limits", "policies", "simulate", "traces", "validate", "whatif")


def plain(text: str) -> str:
    """Return the text without table bars, with single blanks."""
    return " ".join(re.sub(r"[^\x00-\x7f]", " ", text).split())


def lines_not_printed(name: str) -> list[str]:
    """Run the example of a command's page, and return the lines on the page that it does not print."""
    page = (ROOT / "docs" / "commands" / f"{name}.md").read_text(encoding="utf-8")
    ((command, shown),) = EXAMPLE.findall(page)
    result = CliRunner().invoke(cli, shlex.split(command)[1:], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    printed = plain(result.output)
    return [line for line in shown.splitlines() if plain(line) not in printed]


@pytest.mark.parametrize("name", REPEATABLE)
def test_example_of_a_command_page_is_what_the_command_prints(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert lines_not_printed(name) == []


def test_examples_of_export_and_import_are_what_the_two_print_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert [lines_not_printed(name) for name in ("export", "import")] == [[], []]


def test_verdict_that_the_pages_explain_is_the_readmes() -> None:
    readme = plain((ROOT / "README.md").read_text(encoding="utf-8"))
    verdict = (ROOT / "docs" / "read-a-verdict.md").read_text(encoding="utf-8").split("```")[1]
    assert plain(verdict) in readme
    page = (ROOT / "docs" / "should-i-use-streams.md").read_text(encoding="utf-8")
    for way, time in re.findall(r"^\| ([^|]+) \| ([\d.]+ ms) \|", page, re.MULTILINE):
        assert f"{way} {time}" in readme
