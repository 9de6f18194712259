"""Fill docs/formats.md with the fields of each document, from its classes: python scripts/make_format_pages.py.

With --check nothing is written, and the exit status is 1 where the page is out of date.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect as types

from gpusim.formats.schemas import KINDS, field_docs, structs_of
from gpusim.io.files import write_bytes
from gpusim.report.pages import with_section

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "formats.md"
PLAIN = {
    types.IntType: "integer",
    types.FloatType: "number",
    types.StrType: "text",
    types.BoolType: "boolean",
    types.NoneType: "null",
    types.AnyType: "any",
    types.DictType: "object",
}


def type_text(info: Any) -> str:
    """Describe a field's type."""
    if isinstance(info, types.Metadata):
        return type_text(info.type)
    if isinstance(info, types.StructType):
        return f"`{info.cls.__name__}`"
    if isinstance(info, types.LiteralType | types.EnumType):
        return ", ".join(f"`{value}`" for value in getattr(info, "values", ()))
    if isinstance(info, types.UnionType):
        return " or ".join(type_text(part) for part in sorted(info.types, key=lambda part: type(part).__name__))
    if isinstance(info, types.VarTupleType | types.ListType):
        return f"list of {type_text(info.item_type)}"
    if isinstance(info, types.TupleType):
        return f"{len(info.item_types)} x {type_text(info.item_types[0])}"
    return PLAIN[type(info)]


def default_text(field: Any) -> str:
    """Return the default of a field; empty where the field is required."""
    if field.required:
        return ""
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    encoded = msgspec.json.encode(value).decode()
    return encoded if value is None or isinstance(value, bool | int | float) else f"`{encoded}`"


def _cell(text: str) -> str:
    return text.rstrip(".").replace("|", "\\|")


def struct_lines(struct: type[msgspec.Struct]) -> list[str]:
    """Return the section of one class. Rows have no spaces at their bars, so that bars do not count as words."""
    docs = field_docs(struct)
    doc = " ".join((struct.__doc__ or "").split())
    lines = [f"### `{struct.__name__}`", "", doc, "", "|field|type, default|meaning|", "|---|---|---|"]
    for field in types.type_info(struct).fields:  # type: ignore[attr-defined]
        meaning = _cell(docs.get(field.encode_name, ""))
        default = default_text(field)
        lines.append(f"|`{field.encode_name}`|{type_text(field.type)}{default and f', {default}'}|{meaning}|")
    return lines


def wrapped(line: str, width: int = 120) -> list[str]:
    """Break a line of prose into lines of at most `width` characters; a table's row stays one line."""
    if line.startswith("|") or len(line) <= width:
        return [line]
    lines, rest = [], line
    while len(rest) > width:
        cut = rest.rindex(" ", 0, width + 1)
        lines.append(rest[:cut])
        rest = rest[cut + 1 :]
    return [*lines, rest]


def fields() -> str:
    """Return the sections of all classes, by kind of document; a class of several kinds is in the first."""
    done: set[str] = set()
    lines: list[str] = []
    for kind, document in KINDS.items():
        title = "hardware model" if kind == "hardware" else kind
        lines += [f"## Fields of a {title}", ""]
        for struct in structs_of(document):
            if struct.__name__ not in done:
                done.add(struct.__name__)
                lines += [*struct_lines(struct), ""]
    return "\n".join(part for line in lines[:-1] for part in wrapped(line))


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the page is up to date")
    options = parser.parse_args(arguments)
    old = PAGE.read_text(encoding="utf-8")
    new = with_section(old, PAGE.name, "<!-- fields:begin -->", "<!-- fields:end -->", "\n" + fields() + "\n")
    if options.check:
        if new != old:
            print("docs/formats.md is out of date: run python scripts/make_format_pages.py")
        return int(new != old)
    write_bytes(PAGE, new.encode())
    print(PAGE)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
