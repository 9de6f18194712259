"""Fill docs/commands/*.md with each command's usage and options, from click: python scripts/make_command_pages.py.

With --check nothing is written, and the exit status is 1 where a page is out of date or missing.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import click

from gpusim.cli import cli
from gpusim.io.files import write_bytes
from gpusim.report.pages import with_section

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "commands"
BEGIN, END = "<!-- options:begin -->", "<!-- options:end -->"
#: Options of every command, described in docs/commands/index.md.
COMMON = ("-h", "--json")


def group_context() -> click.Context:
    """Return the context of `gpusim` with its settings, so that click keeps a command's first help option."""
    return click.Context(cli, info_name="gpusim", **cli.context_settings)


def options(name: str, command: click.Command) -> str:
    """Return usage and options of a command. Rows have no spaces at their bars, so that bars do not count as words."""
    context = click.Context(command, info_name=name, parent=group_context())
    rows = []
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is None or not record[1] or parameter.opts[0] in COMMON:
            continue
        names, text = (" ".join(part.split()).replace("|", "\\|") for part in record)
        rows.append(f"|`{names.replace(' INTEGER RANGE', ' N').replace(' INTEGER', ' N')}`|{text}|")
    usage = " ".join(command.get_usage(context).removeprefix("Usage: ").split())
    lines = ["", "```sh", usage, "```", ""]
    lines += ["|option|meaning|", "|---|---|", *rows, ""] if rows else []
    return "\n".join(lines)


def commands() -> dict[str, click.Command]:
    """Return every command by name."""
    context = group_context()
    by_name = {name: cli.get_command(context, name) for name in cli.list_commands(context)}
    return {name: command for name, command in by_name.items() if command is not None}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the pages are up to date")
    checked = parser.parse_args(arguments)
    stale = 0
    for name, command in commands().items():
        page = FOLDER / f"{name}.md"
        if not page.is_file():
            raise SystemExit(f"docs/commands/{name}.md: missing; write it with a part between {BEGIN} and {END}")
        old = page.read_text(encoding="utf-8")
        new = with_section(old, page.name, BEGIN, END, options(name, command))
        if new == old:
            continue
        stale += 1
        if checked.check:
            print(f"docs/commands/{name}.md is out of date: run python scripts/make_command_pages.py")
        else:
            write_bytes(page, new.encode())
            print(page)
    return int(checked.check and stale > 0)


if __name__ == "__main__":
    raise SystemExit(main())
