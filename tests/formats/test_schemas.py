"""The shipped JSON Schemas, the classes and the documentation of the file formats agree."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from gpusim.errors import FileError
from gpusim.formats.hardware import bundled_hardware
from gpusim.formats.schemas import KINDS, schema_file, schema_of, schema_text
from gpusim.io.files import decode_document
from gpusim.plan.schedule import Schedule
from gpusim.trace.store import parse_trace
from tests.repo.test_readme import script
from tests.support.helpers import build_graph

PAGE = (Path(__file__).parents[2] / "docs" / "formats.md").read_text(encoding="utf-8")
#: Documents with an example on the page.
SHOWN = ("trace", "schedule", "measurement")


def example(kind: str) -> dict[str, Any]:
    """Return the complete example in the documentation."""
    blocks = [json.loads(block) for block in re.findall(r"^```json\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)]
    (found,) = [block for block in blocks if block["schema"].startswith(f"gpusim-{kind}/")]
    return found


def validator(kind: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json.loads(schema_file(kind).read_bytes()))


@pytest.mark.parametrize("kind", KINDS)
def test_shipped_file_is_what_the_classes_give(kind: str) -> None:
    assert schema_file(kind).read_bytes() == schema_text(kind), "run python scripts/make_schemas.py"


def test_check_finds_a_file_that_is_out_of_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = script("make_schemas")
    monkeypatch.setattr(made, "schema_file", lambda kind: tmp_path / kind)
    assert made.main(["--check"]) == 1
    assert list(tmp_path.iterdir()) == []
    assert made.main([]) == 0
    assert made.main(["--check"]) == 0


def test_no_other_schema_is_shipped() -> None:
    shipped = {path.name for path in schema_file("trace").parent.glob("*.json")}
    assert shipped == {schema_file(kind).name for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_schema_is_valid(kind: str) -> None:
    jsonschema.Draft202012Validator.check_schema(schema_of(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_docstrings_become_descriptions(kind: str) -> None:
    definitions = schema_of(kind)["$defs"]
    assert [name for name, definition in definitions.items() if not definition["description"]] == []
    assert any("description" in field for d in definitions.values() for field in d.get("properties", {}).values())


@pytest.mark.parametrize("kind", SHOWN)
def test_example_in_the_documentation_is_valid(kind: str) -> None:
    validator(kind).validate(example(kind))


def test_bundled_hardware_is_valid() -> None:
    for path in bundled_hardware().values():
        validator("hardware").validate(json.loads(path.read_bytes()))


def read(kind: str, data: bytes) -> Any:
    """Read as the library does; messages call the file 'example'."""
    if kind == "trace":
        return parse_trace(data, "example")
    return decode_document(data, KINDS[kind], f"gpusim-{kind}/1", "example", FileError)


def test_examples_can_be_read_and_belong_together() -> None:
    trace, schedule, measurement = (read(kind, msgspec.json.encode(example(kind))) for kind in SHOWN)
    value = Schedule.from_document(schedule, build_graph(trace))
    assert (value.order, value.streams) == ((0, 1, 2), (0, 1, 0))
    assert measurement.trace_hash == schedule.trace_hash
    assert measurement.trace == schedule.trace == trace.name


def _set(*path: str | int, value: Any) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        for step in path[:-1]:
            document = document[step]
        document[path[-1]] = value

    return change


def _drop(*path: str | int) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        for step in path[:-1]:
            document = document[step]
        del document[path[-1]]

    return change


BROKEN: list[tuple[str, str, Callable[[Any], None]]] = [
    ("trace", "another version", _set("schema", value="gpusim-trace/0")),
    ("trace", "missing field", _drop("tensors")),
    ("trace", "unknown field", _set("ops", 0, "colour", value="red")),
    ("trace", "negative time", _set("ops", 0, "kernels", 0, "dur_ns", value=-1)),
    ("trace", "time with a fraction", _set("ops", 0, "kernels", 0, "dur_ns", value=1.5)),
    ("trace", "empty grid", _set("ops", 0, "kernels", 0, "grid", value=[0, 1, 1])),
    ("trace", "grid of two dimensions", _set("ops", 0, "kernels", 0, "grid", value=[1, 1])),
    ("trace", "unknown role", _set("tensors", 0, "role", value="passenger")),
    ("trace", "share over 1", _set("ground_truth", "attributed_frac", value=1.5)),
    ("trace", "argument with an unknown key", _set("ops", 0, "args", 0, value={"code": "print()"})),
    ("trace", "argument with two keys", _set("ops", 0, "args", 0, value={"tensor": 0, "float": "inf"})),
    ("trace", "text for a tensor", _set("ops", 0, "args", 0, value=[[{"tensor": "0"}]])),
    ("schedule", "negative stream", _set("placements", 0, "stream", value=-1)),
    ("schedule", "missing op", _drop("placements", 0, "op")),
    ("schedule", "no stream at all", _set("streams", value=0)),
    ("measurement", "text for a number", _set("outputs", "worst_error", value="small")),
]


@pytest.mark.parametrize(("kind", "change"), [b[::2] for b in BROKEN], ids=[f"{b[0]}: {b[1]}" for b in BROKEN])
def test_broken_document_is_not_valid_and_not_read(kind: str, change: Callable[[Any], None]) -> None:
    document = copy.deepcopy(example(kind))
    change(document)
    assert not validator(kind).is_valid(document)
    with pytest.raises(FileError, match=r"^example: "):
        read(kind, msgspec.json.encode(document))


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_of_a_document_has_a_description(kind: str) -> None:
    undescribed = [
        f"{name}.{field}"
        for name, part in schema_of(kind)["$defs"].items()
        for field, described in part.get("properties", {}).items()
        if name != "Argument" and "description" not in described
    ]
    assert undescribed == []
