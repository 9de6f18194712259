"""Run of a recipe, with capture and replay replaced: measured, stored and reported results, and failures."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from gpusim.engine.reference import ReferenceEngine
from gpusim.errors import CaptureError, GpuError, OutputError, ReplayError, TraceError
from gpusim.formats.measurement import SCHEMA, Measurement, OutputCheck
from gpusim.formats.pairs import PairCase
from gpusim.formats.recipe import Case, Recipe
from gpusim.formats.results import read_results, results_name
from gpusim.formats.trace import Gpu, Timing, Trace, Variant, VariantSettings
from gpusim.plan.graph import OpGraph, is_legal_order
from gpusim.plan.lower import lower
from gpusim.plan.schedule import Schedule
from gpusim.trace.dependencies import dependencies
from gpusim.trace.store import bundled_traces, read_trace, structure_hash, write_trace
from gpusim.validation import case_work as steps
from gpusim.validation import run as run_module
from gpusim.validation.chosen import Chosen, choose_schedules, hardware_of
from gpusim.validation.pair_results import read_pairs
from gpusim.validation.replayed import SUFFIX, read_replayed
from gpusim.validation.run import run_recipe
from gpusim.version import code_version
from tests.support.helpers import wide_trace

GPU = Gpu(
    name="NVIDIA H200", driver="580.1", cuda="13.0", torch="2.13.0", cudnn="9", sm_clock_mhz=1980, mem_clock_mhz=1
)


def capture(case: Case, folder: Path, seed: int, command: str) -> Path:
    """Return a trace as if captured; some specs fail."""
    assert case.spec is not None
    assert case.mode is not None
    assert case.batch is not None
    if "fails to capture" in case.spec:
        raise CaptureError(f"cannot capture {case.spec}")
    made = wide_trace(eager_ns=400_000, graph_ns=130_000)
    model = msgspec.structs.replace(
        made.model, network=case.spec.rpartition(":")[2], mode=case.mode, batch=case.batch, dtype=case.dtype
    )
    path = folder / f"{model.network}.json"
    write_trace(msgspec.structs.replace(made, model=model), path)
    return path


def replay(
    path: Path, chosen: Chosen, recipe: Recipe, command: str, trust_code: bool
) -> tuple[Chosen, list[Measurement]]:
    """Return measurements as if replayed: each 10 % slower than predicted."""
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
    return chosen, [
        Measurement(
            schema=SCHEMA,
            trace=trace.name,
            trace_hash=structure_hash(trace),
            policy=schedule.policy,
            streams=schedule.stream_count,
            schedule=timing(round(schedule.predicted_ns * 1.1)),
            sequential=timing(130_000),
            predicted_ns=schedule.predicted_ns,
            predicted_interval_ns=(schedule.predicted_ns - 7, schedule.predicted_ns + 7),
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
        for schedule in chosen.schedules
    ]


def timing(median_ns: int) -> Timing:
    spread = {"fastest_ns": median_ns - 20, "slowest_ns": median_ns + 20}
    return Timing(median_ns=median_ns, lo_ns=median_ns - 10, hi_ns=median_ns + 10, rounds=24, **spread)


def pairs(path: Path, recipe: Recipe) -> list[PairCase]:
    """Return the requested pairs, as if measured: each predicted 10 % too long."""
    name = read_trace(path).name
    pair = PairCase(
        trace=name,
        ops=("one", "other"),
        kernels=("k", "k"),
        alone_ns=(900, 1000),
        together_ns=1500,
        predicted_ns=1650,
    )
    return [pair] * recipe.pairs


@pytest.fixture
def edge(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process of its own, no GPU; exploration is real."""

    def here(work: Callable[..., Any], *args: object) -> Any:
        return work(*args)

    monkeypatch.setattr(run_module, "alone", here)
    monkeypatch.setattr(run_module, "capture_case", capture)
    monkeypatch.setattr(run_module, "replay_chosen", replay)
    monkeypatch.setattr(run_module, "measure_pairs_of", pairs)
    monkeypatch.setattr(run_module, "ProcessPoolExecutor", lambda *_, **__: ThreadPoolExecutor(1))


def recipe(*networks: str, **fields: Any) -> Recipe:
    cases = tuple(Case(spec=f"m.py:{name}", mode="infer", batch=1, fitted=name == "a") for name in networks)
    return Recipe(**({"name": "small", "case": cases, "streams": 4, "budget_s": 0.05} | fields))


@pytest.mark.usefixtures("edge")
def test_run_writes_results_after_each_case_and_a_failing_case_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Explored in processes, as on a GPU: inputs and outputs must be picklable."""
    monkeypatch.setattr(run_module, "ProcessPoolExecutor", ProcessPoolExecutor)
    monkeypatch.setattr(run_module, "EXPLORE_WORKERS", 1)
    said: list[str] = []
    on_disk: list[int] = []

    def say(text: str) -> None:
        said.append(text)
        files = list(tmp_path.glob("*.json"))
        on_disk.append(len(read_results(files[0]).cases) if files else 0)

    wanted = recipe("a", "fails to capture", "fails in replay", "b", policies=("wavefront", "search"))
    results = run_recipe(wanted, tmp_path, "gpusim validate r.toml", say, trust_code=True)
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
    """Check the keys of the contract; times are integers."""
    assert {"recipe", "gpu", "date", "command", "versions", "cases"} <= set(found)
    assert (found["recipe"], found["gpu"], found["command"]) == ("small", "NVIDIA H200", "gpusim validate r.toml")
    assert found["gpusim"] == code_version()
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
        assert case["predicted_interval_ns"] == [case["predicted_ns"] - 7, case["predicted_ns"] + 7]
        assert (case["fastest_ns"], case["slowest_ns"]) == (case["measured_ns"] - 20, case["measured_ns"] + 20)
        assert (case["sequential_fastest_ns"], case["sequential_slowest_ns"]) == (129_980, 130_020)


def check_markdown(text: str, source: str) -> None:
    """Check one row per case, and the sources."""
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
        run_recipe(recipe("1 fails to capture", "2 fails to capture"), tmp_path, "c", said.append, trust_code=True)
    assert [line.partition(" ")[0] for line in said] == ["capturing", "failed:"] * 2
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("edge")
def test_captures_are_kept_where_the_recipe_says(tmp_path: Path) -> None:
    results, traces = tmp_path / "results", tmp_path / "deep" / "traces"
    results.mkdir()
    run_recipe(recipe("a", traces=str(traces)), results, "c", lambda _: None, trust_code=True)
    assert [path.name for path in traces.iterdir()] == ["a.json"]
    (stem,) = {path.name.partition(".")[0] for path in results.iterdir()}
    assert {path.name.removeprefix(stem) for path in results.iterdir()} == {".json", ".md", ".schedules.json.gz"}


@pytest.mark.usefixtures("edge")
def test_every_replayed_schedule_is_kept_as_it_was_run(tmp_path: Path) -> None:
    """The schedules suffice for new predictions: next to the results, one per case, in their order."""
    kept = tmp_path / "traces"
    wanted = recipe("a", "b", policies=("wavefront",), counts=(2, 3), random=2, traces=str(kept))
    results = run_recipe(wanted, tmp_path, "c", lambda _: None, trust_code=True)
    assert [case.policy for case in results.cases] == ["wavefront", "wavefront", "random", "random"] * 2
    (path,) = tmp_path.glob(f"*{SUFFIX}")
    assert path.name == f"{results_name(results)}{SUFFIX}"
    replayed = read_replayed(path)
    assert [(r.trace, r.policy, r.measured_ns, r.sequential_ns) for r in replayed] == [
        (case.trace, case.policy, case.measured_ns, case.sequential_ns) for case in results.cases
    ]
    for case, schedule in zip(results.cases, replayed, strict=True):
        trace = read_trace(kept / f"{case.network}.json")
        assert schedule.trace_hash == structure_hash(trace)
        assert is_legal_order(schedule.order, dependencies(trace))
        assert max(schedule.stream_of) + 1 == case.streams
        graph = OpGraph.build(trace, hardware_of(trace))
        assert ReferenceEngine().run(lower(graph, schedule.schedule), graph.hardware).makespan_ns == case.predicted_ns


@pytest.mark.usefixtures("edge")
def test_pairs_are_kept_beside_the_results_and_marked_as_fitted_where_their_case_is(tmp_path: Path) -> None:
    said: list[str] = []
    results = run_recipe(
        recipe("a", "b", policies=("wavefront",), pairs=3), tmp_path, "c", said.append, trust_code=True
    )
    path = tmp_path / f"{results_name(results)}.pairs.json"
    found = read_pairs(path)
    assert (found.recipe, found.gpu, found.hardware, found.versions) == ("small", GPU.name, "h200", results.versions)
    assert [(case.trace, case.fitted) for case in found.cases] == [
        *[("a-infer-b1", True)] * 3,
        *[("b-infer-b1", False)] * 3,
    ]
    assert "| all | warm | 6 | 1.50 | 10.0% | 10.0% | +10.0% |" in path.with_suffix(".md").read_text(encoding="utf-8")
    assert "b-infer-b1: 3 pairs and triples of kernels" in said


@pytest.mark.usefixtures("edge")
def test_pairs_that_cannot_be_measured_leave_the_schedules_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object) -> list[PairCase]:
        raise GpuError("GPU out of memory")

    monkeypatch.setattr(run_module, "measure_pairs_of", no_memory)
    said: list[str] = []
    results = run_recipe(recipe("a", policies=("wavefront",), pairs=3), tmp_path, "c", said.append, trust_code=True)
    assert len(results.cases) == 1
    assert "failed: GPU out of memory" in said
    assert not list(tmp_path.glob("*.pairs.*"))


@pytest.mark.usefixtures("edge")
def test_trace_of_a_case_is_replayed_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file and a bundled one; nothing is captured, and no copy is made."""
    asked: list[tuple[Path, int]] = []

    def noting(
        path: Path, chosen: Chosen, recipe: Recipe, command: str, trust_code: bool
    ) -> tuple[Chosen, list[Measurement]]:
        asked.append((path, recipe.recordings))
        return replay(path, chosen, recipe, command, trust_code)

    monkeypatch.setattr(run_module, "replay_chosen", noting)
    monkeypatch.delattr(run_module, "capture_case")
    mine = tmp_path / "mine.json"
    write_trace(wide_trace(eager_ns=400_000, graph_ns=130_000), mine)
    cases = (Case(trace=str(mine)), Case(trace="squeezenet1_1-infer-b1", fitted=True))
    kept = tmp_path / "traces"
    wanted = recipe(case=cases, policies=("wavefront",), recordings=3, counts=(2,), traces=str(kept))
    results = run_recipe(wanted, tmp_path, "c", lambda _: None, trust_code=True)
    assert asked == [(mine, 3), (bundled_traces()["squeezenet1_1-infer-b1"], 3)]
    assert [(case.network, case.fitted) for case in results.cases] == [("tiny", False), ("squeezenet1_1", True)]
    assert not list(kept.iterdir())


@pytest.mark.usefixtures("edge")
def test_given_trace_gets_variants_where_the_recipe_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The extended trace is kept, also as the case of a later run; the given file is unchanged."""
    asked: list[str] = []

    def with_variants(trace: Trace, seed: int) -> Trace:
        asked.append(trace.name)
        half = msgspec.structs.replace(trace.ops[1].kernels[0], dur_ns=1)
        other = Variant(name="other", settings=VariantSettings(), kernels=(half,))
        ops = (trace.ops[0], msgspec.structs.replace(trace.ops[1], variants=(other,)), *trace.ops[2:])
        return msgspec.structs.replace(trace, ops=ops)

    edge = ModuleType("gpusim.gpu.capture.variants")
    edge.with_variants = with_variants  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gpusim.gpu.capture.variants", edge)
    mine, kept = tmp_path / "mine.json", tmp_path / "traces"
    write_trace(wide_trace(eager_ns=400_000, graph_ns=130_000), mine)
    before = mine.read_bytes()
    fields: dict[str, Any] = {"policies": ("wavefront", "fastest kernels"), "counts": (2,), "traces": str(kept)}
    results = run_recipe(recipe(case=(Case(trace=str(mine), variants=True),), **fields), tmp_path, "c", lambda _: None)
    (varied,) = kept.iterdir()
    wavefront, fastest = results.cases
    assert (fastest.policy, fastest.streams) == ("fastest kernels", 1)
    assert fastest.predicted_ns < wavefront.predicted_sequential_ns
    assert (asked, mine.read_bytes()) == ([read_trace(mine).name], before)
    run_recipe(recipe(case=(Case(trace=str(mine)),), **fields), tmp_path, "c", lambda _: None)
    assert len(asked) == 1
    run_recipe(recipe(case=(Case(trace=str(varied), variants=True),), **fields), tmp_path, "c", lambda _: None)
    assert len(asked) == 2
    assert list(kept.iterdir()) == [varied]


@pytest.mark.parametrize(("measure", "wanted"), [(0, 0), (3, 2)])
def test_searched_schedule_is_the_contender_that_is_fastest_in_a_trial(
    measure: int, wanted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is then measured again, with the other schedules. Without a trial the prediction decides."""
    edge = ModuleType("gpusim.gpu.replay.replay")
    asked: list[tuple[Schedule, ...]] = []

    def measured(graph: OpGraph, schedules: tuple[Schedule, ...], *_: object, **__: object) -> list[Measurement]:
        asked.append(schedules)
        return []

    edge.trial_ns = lambda graph, schedules, **_: [300, 200, 100][: len(schedules)]  # type: ignore[attr-defined]
    edge.replay = measured  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gpusim.gpu.replay.replay", edge)
    path = tmp_path / "t.json"
    write_trace(wide_trace(eager_ns=400_000, graph_ns=130_000), path)
    chosen = choose_schedules(path, recipe(policies=("wavefront", "search"), measure=measure))
    found, _ = steps.replay_chosen(path, chosen, recipe(), "c", False)
    assert asked == [found.schedules]
    assert found.schedules[0] == chosen.schedules[0]
    assert found.schedules[1] == (chosen.contenders[wanted] if measure else chosen.schedules[1])


@pytest.mark.usefixtures("edge")
def test_trace_without_measured_times_fails_before_it_is_replayed(tmp_path: Path) -> None:
    mine = tmp_path / "mine.json"
    write_trace(wide_trace(), mine)
    with pytest.raises(TraceError, match=r"mine\.json: \$\.ground_truth: has no measured times$"):
        run_recipe(recipe(case=(Case(trace=str(mine)),)), tmp_path, "c", lambda _: None)


@pytest.mark.usefixtures("edge")
def test_folder_for_results_is_made_with_its_parents(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "results"
    run_recipe(recipe("a"), folder, "c", lambda _: None, trust_code=True)
    assert len(list(folder.glob("*.json"))) == 1


def test_folder_for_results_that_cannot_be_made_is_found_before_anything_is_captured(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="no folder for the results: "):
        run_recipe(recipe("a"), tmp_path / "file" / "results", "c", lambda _: None, trust_code=True)


def test_error_that_is_not_ours_is_not_swallowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug in a case keeps its traceback; a missing GPU is an error of ours."""

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(run_module, "alone", broken)
    with pytest.raises(ZeroDivisionError):
        run_recipe(recipe("a"), tmp_path, "c", lambda _: None, trust_code=True)

    def no_gpu(*_: object) -> None:
        raise GpuError("no GPU")

    monkeypatch.setattr(run_module, "alone", no_gpu)
    with pytest.raises(GpuError, match="no GPU"):
        run_recipe(recipe("a"), tmp_path, "c", lambda _: None, trust_code=True)
