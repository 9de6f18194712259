"""JSON Schemas of the documents, generated from their classes, with docstrings as descriptions.

The generated files are in this package; `scripts/make_schemas.py` writes them. A schema
has types, ranges and names. Further conditions (references, order, sizes) are checked on reading.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from gpusim.errors import UnknownNameError
from gpusim.formats.arguments import TAGS, TENSOR
from gpusim.formats.hardware import HardwareModel
from gpusim.formats.measurement import Measurement
from gpusim.formats.parallel_plan import ParallelPlan
from gpusim.formats.schedule import ScheduleDocument
from gpusim.formats.topology import Topology
from gpusim.formats.trace import Trace
from gpusim.io.files import Document

KINDS: dict[str, type[Document]] = {
    "trace": Trace,
    "schedule": ScheduleDocument,
    "hardware": HardwareModel,
    "measurement": Measurement,
    "topology": Topology,
    "parallel-plan": ParallelPlan,
}

DIALECT = "https://json-schema.org/draft/2020-12/schema"

#: Encoded operator arguments (`gpusim.formats.arguments`), which the classes leave untyped.
ARGUMENT: dict[str, Any] = {
    "title": "Argument",
    "description": "An operator argument: plain JSON for itself, an object with one key for everything else.",
    "anyOf": [
        {"type": ["null", "boolean", "number", "string"]},
        {"type": "array", "items": {"$ref": "#/$defs/Argument"}},
        {
            "type": "object",
            "properties": {
                tag: {"type": "integer", "minimum": 0} if tag == TENSOR else {"type": "string"} for tag in sorted(TAGS)
            },
            "minProperties": 1,
            "maxProperties": 1,
            "additionalProperties": False,
        },
    ],
}


def schema_of(kind: str) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a kind of document. Raises `UnknownNameError`."""
    document = _document(kind)
    generated = msgspec.json.schema(document)
    definitions: dict[str, Any] = generated["$defs"]
    for struct in structs_of(document):
        definition = definitions[struct.__name__]
        definition["description"] = " ".join(definition["description"].split())
        for name, text in field_docs(struct).items():
            definition["properties"][name]["description"] = text
    if "Op" in definitions:
        arguments = definitions["Op"]["properties"]
        arguments["args"]["items"] = arguments["kwargs"]["additionalProperties"] = {"$ref": "#/$defs/Argument"}
        definitions["Argument"] = ARGUMENT
    _null_last(definitions)
    version = max(definitions[document.__name__]["properties"]["schema"]["enum"])  # a trace's older ones are read, too
    return {
        "$schema": DIALECT,
        "$id": f"urn:{version.replace('/', ':')}",
        "title": version,
        "description": definitions[document.__name__]["description"],
        **generated,
    }


def schema_text(kind: str) -> bytes:
    """Return the JSON Schema of a kind of document, as stored in its file."""
    return msgspec.json.format(msgspec.json.encode(schema_of(kind)), indent=1) + b"\n"


def schema_file(kind: str) -> Path:
    """Return the shipped JSON Schema file of a kind of document. Raises `UnknownNameError`."""
    _document(kind)
    return Path(__file__).parent / f"{kind}.schema.json"


def structs_of(document: type[Document]) -> list[type[msgspec.Struct]]:
    """Return the classes of a document, itself first, each once."""
    return list(dict.fromkeys(_structs(msgspec.inspect.type_info(document))))


def field_docs(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Return the docstring below each field of a class; a field may have none."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(struct))).body
    assert isinstance(definition, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        ):
            docs[field.target.id] = " ".join(below.value.value.split())
    return docs


def _document(kind: str) -> type[Document]:
    if kind not in KINDS:
        raise UnknownNameError("kind of document", kind, KINDS)
    return KINDS[kind]


def _null_last(schema: Any) -> None:
    """Sort alternatives with null last; the order differs between versions of msgspec."""
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        _null_last(part)
    if isinstance(schema, dict) and "anyOf" in schema:
        schema["anyOf"] = sorted(schema["anyOf"], key=lambda choice: choice.get("type") == "null")


def _structs(info: Any) -> Iterator[type[msgspec.Struct]]:
    """Yield the structs in msgspec's description of a type."""
    if isinstance(info, msgspec.inspect.StructType):
        yield info.cls
        for field in info.fields:
            yield from _structs(field.type)
    elif isinstance(info, msgspec.inspect.VarTupleType):
        yield from _structs(info.item_type)
    elif isinstance(info, msgspec.inspect.UnionType):
        for part in info.types:
            yield from _structs(part)
    elif isinstance(info, msgspec.inspect.Metadata):
        yield from _structs(info.type)
