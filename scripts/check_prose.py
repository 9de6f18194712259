"""Check the manual's prose: python scripts/check_prose.py [--wrap PAGE ...].

The check covers README, CONTRIBUTING, CHANGELOG, docs/ and the docstrings of the public API. No sentence has over 40
words, and no line over 120 characters (except tables and code blocks). Each list item ends with a full stop. docs/ has
at most 18,000 words. research/ is exempt. --wrap breaks the long lines of pages, except in tables and code blocks.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import gpusim

ROOT = Path(__file__).resolve().parent.parent
MAX_WORDS = 40
MAX_LINE = 120
MAX_DOCS_WORDS = 18_000
ITEM = re.compile(r"^\s*(?:[-*]|\d+\.) ")
#: A full stop ends a sentence where a space or a closing mark follows; not in 1.5, `a.b` or `file.md`.
END = re.compile(r"(?<=[.!?])[*_)\"']*(?:\s+|$)")
CLOSED = re.compile(r"[.!?:;][*_)\"'`]*$")


def pages() -> list[Path]:
    """Return the pages at the top level and every page of docs/."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *manual()]


def manual() -> list[Path]:
    """Return every page of docs/."""
    return sorted((ROOT / "docs").rglob("*.md"))


def blocks(text: str) -> Iterator[tuple[bool, str]]:
    """Yield paragraphs, list items and table cells without code blocks, each as one line, and whether it is a list
    item.
    """
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    lines: list[str] = []
    for line in [*text.splitlines(), ""]:
        starts = bool(ITEM.match(line))
        if lines and (starts or not line.strip() or line.startswith(("|", "#"))):
            yield bool(ITEM.match(lines[0])), " ".join(part.strip() for part in lines)
            lines = []
        if line.startswith("|"):
            yield from ((False, cell) for cell in line.strip("|").split("|"))
        elif line.startswith("#"):
            yield False, line
        elif line.strip():
            lines.append(line)


def sentences(text: str) -> list[str]:
    """Return the sentences of one paragraph."""
    return [part for part in END.split(text) if part.strip()]


def problems(text: str, place: str) -> list[str]:
    """Return the problems of one text, a line each."""
    lines, code = [], False
    for number, line in enumerate(text.splitlines(), 1):
        code ^= line.startswith("```")
        if len(line) > MAX_LINE and not code and not line.startswith("|"):
            lines.append(f"{place}:{number}: line of {len(line)} characters")
    for item, block in blocks(text):
        for sentence in sentences(block):
            if len(sentence.split()) > MAX_WORDS:
                lines.append(f"{place}: sentence of {len(sentence.split())} words: {sentence.strip()[:70]} ...")
        if item and not CLOSED.search(block):
            lines.append(f"{place}: list item without a full stop: {block[-60:]}")
    return lines


def public_docstrings() -> Iterator[tuple[str, str]]:
    """Yield name and docstring of each name in `gpusim.__all__`, and of the public members of its classes."""
    yield "gpusim", inspect.getdoc(gpusim) or ""
    for name in getattr(gpusim, "__all__", ()):
        value = getattr(gpusim, name)
        if not callable(value):
            continue
        if not getattr(value, "__module__", "").startswith("gpusim"):
            continue
        yield f"gpusim.{name}", inspect.getdoc(value) or ""
        for member, part in vars(value).items() if isinstance(value, type) else ():
            if not member.startswith("_") and (callable(part) or isinstance(part, property)):
                yield f"gpusim.{name}.{member}", inspect.getdoc(part) or ""


def all_problems() -> list[str]:
    """Return all problems, a line each."""
    lines = []
    for page in pages():
        lines += problems(page.read_text(encoding="utf-8"), page.relative_to(ROOT).as_posix())
    for name, text in public_docstrings():
        lines += problems(text, name)
    words = sum(len(page.read_text(encoding="utf-8").split()) for page in manual())
    if words > MAX_DOCS_WORDS:
        lines.append(f"docs: {words} words; at most {MAX_DOCS_WORDS}")
    return lines


def wrapped(text: str) -> str:
    """Return the text with its paragraphs and list items broken into lines."""
    lines: list[str] = []
    part: list[str] = []
    code = False

    def close() -> None:
        if part:
            mark = ITEM.match(part[0])
            first = mark.group() if mark else ""
            words = " ".join([part[0][len(first) :], *(line.strip() for line in part[1:])])
            lines.extend(
                textwrap.wrap(
                    words,
                    MAX_LINE,
                    initial_indent=first,
                    subsequent_indent=" " * len(first),
                    break_long_words=False,
                    break_on_hyphens=False,
                )
            )
            part.clear()

    for line in text.split("\n"):
        fence = line.startswith("```")
        if code or fence or not line.strip() or line.startswith(("|", "#", "<!--", "![")):
            close()
            lines.append(line)
            code ^= fence
            continue
        if ITEM.match(line):
            close()
        part.append(line)
    close()
    return "\n".join(lines)


def main() -> int:
    """Print the problems, or wrap pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wrap", nargs="+", type=Path, metavar="PAGE", help="break the long lines of these pages")
    options = parser.parse_args()
    for page in options.wrap or ():
        page.write_text(wrapped(page.read_text(encoding="utf-8")), encoding="utf-8")
    lines = all_problems()
    print("\n".join(lines))
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
