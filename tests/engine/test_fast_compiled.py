"""Compiled functions, their cache, and the commands that run them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numba
import pytest
from click.testing import CliRunner

from gpusim.cli import cli
from gpusim.defaults import DEFAULT_ENGINE
from gpusim.engine.base import ENGINES
from gpusim.engine.compiled import arrays, jit
from gpusim.formats.hardware import load_hardware
from gpusim.trace.store import load_trace

# --- What is compiled, and where it is kept ---


def test_digest_of_the_sources_changes_with_each_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in jit.SOURCES:
        shutil.copytree(Path(jit.__file__).parents[2] / name, tmp_path / name)
    monkeypatch.setattr(jit, "__file__", str(tmp_path / "engine" / "compiled" / "jit.py"))
    digests = {jit.sources_digest.__wrapped__()}
    assert digests == {jit.sources_digest()}
    changed = ("engine/pool.py", "engine/compiled/heap.py", "engine/compiled/simulate.py", "rules/launch.py")
    for name in changed:
        with (tmp_path / name).open("a") as file:
            file.write("#\n")
        digests.add(jit.sources_digest.__wrapped__())
    assert len(digests) == 1 + len(changed)


def test_what_is_kept_has_the_digest_in_its_name_and_replaces_that_of_other_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    def use(digest: str) -> set[str]:
        def add_one(number: int) -> int:
            return number + 1

        monkeypatch.setattr(jit, "sources_digest", lambda: digest)
        assert jit.entry(add_one)(41) == 42
        return {path.name for path in tmp_path.rglob("*.nb[ci]")}

    first, second = use("aaaa"), use("bbbb")
    assert len(first) == len(second) == 2  # an index and a function
    assert all("add_one-aaaa" in name for name in first)
    assert all("add_one-bbbb" in name for name in second)


def test_hardware_record_has_every_number_of_its_sections() -> None:
    hardware = load_hardware("h200")
    record = arrays.encode_hardware(hardware)[0]
    for section in arrays.SECTIONS:
        values = msgspec.to_builtins(getattr(hardware, section))
        assert {name: float(record[section][name]) for name in values} == values


def test_where_nothing_can_be_kept_functions_are_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(dispatcher: Any) -> None:
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr(type(numba.njit(lambda: None)), "enable_caching", refuse)

    @jit.entry
    def twice(number: int) -> int:
        return 2 * number

    assert twice(21) == 42


# --- The command line ---


def invoke(*arguments: str) -> Any:
    result = CliRunner().invoke(cli, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    return json.loads(result.stdout)


def test_bench_says_what_each_engine_does_in_a_second_and_that_they_agree() -> None:
    found = invoke("bench", "--trace", "squeezenet1_1-infer-b1", "--seconds", "0.001")
    kernels = sum(len(each.kernels) for each in load_trace("squeezenet1_1-infer-b1").ops)
    assert found["kernels"] == kernels
    for name in (
        "reference",
        "fast",
        "fast_run",
        "fast_with_lowering",
        "fast_all_cores",
        "list_fast",
    ):
        assert found[name]["schedules_per_s"] > 0
        assert found[name]["kernels_per_s"] == pytest.approx(kernels * found[name]["schedules_per_s"])
    assert found["ratio"] == found["fast"]["schedules_per_s"] / found["reference"]["schedules_per_s"] > 1
    assert found["makespans_equal"] is True


def test_simulate_uses_the_fast_engine_unless_told_otherwise_and_both_say_the_same() -> None:
    command = ("simulate", "squeezenet1_1-infer-b1", "--streams", "3")
    default = invoke(*command)
    assert default["engine"] == DEFAULT_ENGINE
    for name in ENGINES:
        assert invoke(*command, "--engine", name) == default | {"engine": name}


def test_perfetto_file_of_the_fast_engine_has_what_only_the_reference_records(tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.json" for name in ENGINES]
    for name, file in zip(ENGINES, files, strict=True):
        invoke("simulate", "squeezenet1_1-infer-b1", "--engine", name, "--perfetto", str(file))
    contents = [json.loads(file.read_text())["traceEvents"] for file in files]
    assert any(event["ph"] == "C" for event in contents[0])
    assert contents[0] == contents[1]
