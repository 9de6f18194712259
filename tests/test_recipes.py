"""Recipes and their results: reading, running with the GPU's edge replaced, the documents that come out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpusim.errors import CaptureError, GpuError, MeasurementError, OutputError, RecipeError, ReplayError
from gpusim.plan.measurement import SCHEMA, Measurement, OutputCheck
from gpusim.plan.schedule import Schedule
from gpusim.recipes import run as run_module
from gpusim.recipes.recipe import Case, Recipe, read_recipe
from gpusim.recipes.run import run_recipe
from gpusim.report.results import case_table, read_results, results_markdown, results_name, summary_lines
from gpusim.trace.schema import Gpu, Timing
from gpusim.trace.store import read_trace, write_trace
from tests.helpers import wide_trace

GOOD = """
name = "small"
policies = ["wavefront", "search"]
streams = 4
budget_s = 0.05

[[case]]
spec = "m.py:a"
mode = "infer"
batch = 1

[[case]]
spec = "m.py:b"
mode = "train"
batch = 8
dtype = "bf16"
memory_format = "channels_last"
fitted = true
"""


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "r.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


# --- The file ---


def test_recipe_is_read_with_its_defaults(tmp_path: Path) -> None:
    recipe = read_recipe(write(tmp_path, GOOD))
    assert (recipe.name, recipe.policies, recipe.streams, recipe.seed) == ("small", ("wavefront", "search"), 4, 0)
    first, second = recipe.case
    assert first == Case(spec="m.py:a", mode="infer", batch=1)
    assert (first.dtype, first.memory_format, first.frontend, first.fitted) == ("tf32", "contiguous", "aten", False)
    assert (second.dtype, second.memory_format, second.fitted) == ("bf16", "channels_last", True)


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parent.parent / "validate").glob("*.toml")), ids=lambda p: p.stem
)
def test_bundled_recipes_can_be_read(path: Path) -> None:
    assert read_recipe(path).case


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"name = ", "is not valid TOML: "),
        (b'{"name": "x"}', "is not valid TOML: "),
        (b"name = '\xff'", "is not valid TOML: "),
        (b"", "$: Object missing required field `name`"),
        (b'name = "x"', "$: Object missing required field `case`"),
        (b'name = "x"\ncase = []', "$.case: has no cases"),
        (GOOD.replace("streams", "stream").encode(), "$: Object contains unknown field `stream`"),
        (GOOD.replace("batch = 8", "batch = 0").encode(), "$.case[1].batch: Expected `int` >= 1"),
        (
            GOOD.replace("batch = 8", "batch = 8\nbacth = 1").encode(),
            "$.case[1]: Object contains unknown field `bacth`",
        ),
        (GOOD.replace('"infer"', '"inference"').encode(), "$.case[0].mode: Invalid enum value 'inference'"),
        (GOOD.replace("wavefront", "wavefrnt").encode(), "$.policies[0]: unknown policy 'wavefrnt' (there are: "),
    ],
)
def test_broken_recipe_is_one_line_with_file_and_place(text: bytes, complaint: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    with pytest.raises(RecipeError) as caught:
        read_recipe(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: {complaint}")
    assert "\n" not in message


def test_missing_recipe_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"r\.toml: cannot be read: No such file"):
        read_recipe(tmp_path / "r.toml")
    with pytest.raises(RecipeError, match="cannot be read: Is a directory"):
        read_recipe(tmp_path)


# --- Running, with capture and replay replaced ---

GPU = Gpu(
    name="NVIDIA H200", driver="580.1", cuda="13.0", torch="2.13.0", cudnn="9", sm_clock_mhz=1980, mem_clock_mhz=1
)


def capture(case: Case, folder: Path, seed: int, command: str) -> Path:
    """A trace as if captured; a spec that says so fails."""
    if "fails to capture" in case.spec:
        raise CaptureError(f"cannot capture {case.spec}")
    made = wide_trace(eager_ns=400_000, graph_ns=130_000)
    model = msgspec.structs.replace(
        made.model, network=case.spec.rpartition(":")[2], mode=case.mode, batch=case.batch, dtype=case.dtype
    )
    path = folder / f"{model.network}.json"
    write_trace(msgspec.structs.replace(made, model=model), path)
    return path


def replay(path: Path, schedules: tuple[Schedule, ...], seed: int, command: str) -> list[Measurement]:
    """Measurements as if replayed: each 10 % slower than predicted."""
    trace = read_trace(path)
    if "replay" in trace.model.network:
        raise ReplayError(f"cannot replay {trace.name}")
    outputs = OutputCheck(
        equal=True,
        bit_equal=False,
        sequential_repeats=False,
        worst_error=1e-6,
        sequential_error=1e-6,
        tolerance=1e-3,
        compared=9,
    )
    return [
        Measurement(
            schema=SCHEMA,
            trace=trace.name,
            trace_hash=schedule.trace_hash,
            policy=schedule.policy,
            streams=schedule.streams,
            schedule=timing(round(schedule.predicted_ns * 1.1)),
            sequential=timing(130_000),
            predicted_ns=schedule.predicted_ns,
            predicted_sequential_ns=130_000,
            hardware="h200",
            outputs=outputs,
            peak_bytes=300,
            sequential_peak_bytes=200,
            events=5,
            gpu=GPU,
            date="2025-01-01",
            command=command,
        )
        for schedule in schedules
    ]


def timing(median_ns: int) -> Timing:
    return Timing(median_ns=median_ns, lo_ns=median_ns - 10, hi_ns=median_ns + 10, rounds=24)


@pytest.fixture
def edge(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process of its own, no GPU; exploring stays as it is."""

    def here(work: Callable[..., Any], *args: object) -> Any:
        return work(*args)

    monkeypatch.setattr(run_module, "alone", here)
    monkeypatch.setattr(run_module, "_capture", capture)
    monkeypatch.setattr(run_module, "_replay", replay)
    monkeypatch.setattr(run_module, "EXPLORE_WORKERS", 1)


def recipe(*networks: str, **fields: Any) -> Recipe:
    cases = tuple(Case(spec=f"m.py:{name}", mode="infer", batch=1, fitted=name == "a") for name in networks)
    return Recipe(**({"name": "small", "case": cases, "streams": 4, "budget_s": 0.05} | fields))


@pytest.mark.usefixtures("edge")
def test_run_writes_results_after_each_case_and_a_failing_case_does_not_stop_the_others(tmp_path: Path) -> None:
    said: list[str] = []
    on_disk: list[int] = []

    def say(text: str) -> None:
        said.append(text)
        files = list(tmp_path.glob("*.json"))
        on_disk.append(len(read_results(files[0]).cases) if files else 0)

    wanted = recipe("a", "fails to capture", "fails in replay", "b", policies=("wavefront", "search"))
    results = run_recipe(wanted, tmp_path, "gpusim validate r.toml", say)
    assert [(case.network, case.policy) for case in results.cases] == [
        ("a", "wavefront"),
        ("a", "search"),
        ("b", "wavefront"),
        ("b", "search"),
    ]
    assert [text for text in said if text.startswith("failed: ")] == [
        "failed: cannot capture m.py:fails to capture",
        "failed: cannot replay fails in replay-infer-b1",
    ]
    assert 2 in on_disk, "the first case was on the disk before the second was done"
    (path,) = tmp_path.glob("*.json")
    assert path.name == f"small_h200_{results.date.replace('-', '')}.json"
    assert read_results(path) == results
    check_document(json.loads(path.read_bytes()))
    check_markdown(path.with_suffix(".md").read_text(encoding="utf-8"), path.name)


def check_document(found: dict[str, Any]) -> None:
    """The keys of the contract (design, section 5); times are integers."""
    assert {"recipe", "gpu", "date", "command", "versions", "cases"} <= set(found)
    assert (found["recipe"], found["gpu"], found["command"]) == ("small", "NVIDIA H200", "gpusim validate r.toml")
    assert found["versions"] == {"driver": "580.1", "cuda": "13.0", "torch": "2.13.0", "cudnn": "9"}
    wanted = (
        "network mode batch dtype frontend policy streams predicted_ns measured_ns interval_ns sequential_ns eager_ns "
        "outputs_equal fitted baselines predicted_peak_bytes measured_peak_bytes"
    )
    for case in found["cases"]:
        assert set(wanted.split()) <= set(case)
        assert all(type(case[key]) is int for key in ("predicted_ns", "measured_ns", "sequential_ns", "eager_ns"))
        assert case["interval_ns"] == [case["measured_ns"] - 10, case["measured_ns"] + 10]
        assert case["eager_ns"] == 400_000
        assert case["outputs_equal"] is True
        assert case["fitted"] is (case["network"] == "a")
        assert case["measured_ns"] == round(case["predicted_ns"] * 1.1)


def check_markdown(text: str, source: str) -> None:
    """One row a case, and where it all comes from."""
    rows = [line for line in text.splitlines() if line.startswith(("| a-", "| b-"))]
    assert len(rows) == 4
    assert all("| equal |" in row and "-9.1%" in row for row in rows)
    assert f"Generated from `{source}`" in text
    assert "Command: `gpusim validate r.toml`" in text
    assert "SM clock 1980 MHz" in text
    assert "prediction error median 9.1%" in text


@pytest.mark.usefixtures("edge")
def test_run_in_which_everything_fails_raises_the_first_error(tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(CaptureError, match=r"cannot capture m\.py:1 fails to capture"):
        run_recipe(recipe("1 fails to capture", "2 fails to capture"), tmp_path, "c", said.append)
    assert len(said) == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("edge")
def test_captures_are_kept_where_the_recipe_says(tmp_path: Path) -> None:
    results, traces = tmp_path / "results", tmp_path / "deep" / "traces"
    results.mkdir()
    run_recipe(recipe("a", traces=str(traces)), results, "c", lambda _: None)
    assert [path.name for path in traces.iterdir()] == ["a.json"]
    assert {path.suffix for path in results.iterdir()} == {".json", ".md"}


def test_missing_folder_for_results_is_found_before_anything_is_captured(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="there is no such folder for the results"):
        run_recipe(recipe("a"), tmp_path / "no", "c", lambda _: None)


def test_error_that_is_not_ours_is_not_swallowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug in a case keeps its traceback; a GPU that is not there is an error of ours."""

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(run_module, "alone", broken)
    with pytest.raises(ZeroDivisionError):
        run_recipe(recipe("a"), tmp_path, "c", lambda _: None)

    def no_gpu(*_: object) -> None:
        raise GpuError("no GPU")

    monkeypatch.setattr(run_module, "alone", no_gpu)
    with pytest.raises(GpuError, match="no GPU"):
        run_recipe(recipe("a"), tmp_path, "c", lambda _: None)


# --- Results ---


@pytest.fixture
def results(tmp_path: Path) -> Any:
    """Results of two cases without running anything."""
    path = tmp_path / "r.json"
    case = {
        "trace": "a-infer-b1", "network": "a", "mode": "infer", "batch": 1, "dtype": "tf32",
        "memory_format": "contiguous", "frontend": "aten", "policy": "search", "streams": 4, "predicted_ns": 90,
        "measured_ns": 100, "interval_ns": [99, 101], "sequential_ns": 150, "sequential_interval_ns": [149, 151],
        "predicted_sequential_ns": 153, "eager_ns": 400, "outputs_equal": True, "bit_equal": True, "worst_error": 0.0,
        "sequential_error": 0.0, "fitted": False, "worth_it": True, "bounds_ns": {"area": 50},
        "predicted_peak_bytes": 1, "measured_peak_bytes": 1, "sequential_peak_bytes": 1, "events": 2,
        "sm_clock_mhz": 1980, "baselines": {},
    }  # fmt: skip
    other = case | {"policy": "wavefront", "predicted_ns": 104, "bit_equal": False, "outputs_equal": False}
    other |= {"sm_clock_mhz": 1965}
    document = {
        "schema": "gpusim-results/1", "recipe": "r", "gpu": "NVIDIA A100 80GB", "date": "2025-03-04", "command": "c",
        "hardware": "h200", "versions": {"torch": "2"}, "cases": [case, other],
    }  # fmt: skip
    path.write_text(json.dumps(document))
    return read_results(path)


def test_ratios_of_a_case(results: Any) -> None:
    case = results.cases[0]
    assert (case.speedup, case.predicted_speedup) == (1.5, 1.7)
    assert (case.error, case.sequential_prediction_error) == pytest.approx((-0.1, 0.02))


def test_name_of_a_results_file(results: Any) -> None:
    assert results_name(results) == "r_a100-80gb_20250304"


def test_table_says_when_outputs_differ(results: Any) -> None:
    rows = case_table(results.cases)[2:]
    assert [row.rsplit("|", 2)[1].strip() for row in rows] == ["bit-equal", "DIFFERENT"]
    assert "1965-1980 MHz" in results_markdown(results, "r.json")


def test_summary_counts_each_sequential_graph_once(results: Any) -> None:
    first, second = summary_lines(results.cases)
    assert first.startswith("- 2 multi-stream schedules: prediction error median 7.0%, ")
    assert second.startswith("- 1 sequential graphs: prediction error median 2.0%, ")


@pytest.mark.parametrize("text", ["", "{}", '{"schema": "gpusim-results/2"}', '{"schema": "gpusim-results/1"}'])
def test_broken_results_file_is_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(MeasurementError) as caught:
        read_results(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
