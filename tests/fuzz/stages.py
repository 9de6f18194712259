"""Files of recipes in stages: predictions, latencies of stages, trials, and results with what was replayed."""

from __future__ import annotations

import functools
import gzip
import random
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gpusim.formats.recipe import Case as RecipeCase
from gpusim.formats.recipe import Recipe
from gpusim.plan.graph import OpGraph
from gpusim.trace.store import read_trace, structure_hash, trace_sha256
from gpusim.validation import memory_again, memory_stages, predictions, replayed, stage_times, trials
from gpusim.validation.chosen import choose_schedules, hardware_of
from gpusim.validation.recipe import MEASURED_IOS
from tests.fuzz import bases
from tests.fuzz.bases import Document
from tests.fuzz.cases import Case
from tests.fuzz.mutate import change_bytes, changed, to_json, to_toml
from tests.support.made_results import case as result
from tests.support.made_results import make_results

#: Traces with variants and partitions, and with memory to plan for.
STEP, MEMORY_STEP = bases.traces()[3], bases.training_trace()
KEPT: Document = {"name": "kept", "policies": ["wavefront", "sequential"], "counts": [1, 2]}
MEMORY: Document = {"name": "kept", "memory_policies": ["vdnn_all", "keep_all"], "memory_budgets": [0.5]}
BY_STAGES: Document = {"name": "kept", "policies": [MEASURED_IOS], "trials": 1, "streams": 2}
PLAIN_RECIPE: Document = KEPT | {"random": 2, "recordings": 3, "rounds": 2, "streams": 4, "seed": 1}
FAIR: Document = {"name": "kept", "policies": ["wavefront", "nimble"], "trials": 2, "processes": 2, "streams": 3}
NEAR: Document = {"name": "kept", "neighbours": 2, "budget_s": 0.1, "streams": 2}
#: Shares of files that are no gzip, and whose compressed bytes are changed.
PLAIN, TORN = 0.1, 0.1


@functools.cache
def predicted() -> Document:
    """Return the predictions of a recipe for `STEP`."""
    with TemporaryDirectory() as folder:
        path, recipe = _trace_in(folder, STEP), _recipe(KEPT)
        made = predictions.predictions_of(path, read_trace(path), choose_schedules(path, recipe), recipe.name)
        return bases.plain(made) | {"date": "2026-01-01"}


@functools.cache
def memory_predicted() -> Document:
    """Return the predicted memory plans of a recipe for `MEMORY_STEP`."""
    with TemporaryDirectory() as folder:
        path = _trace_in(folder, MEMORY_STEP)
        memory_stages.predict_memory(path, _recipe(MEMORY))
        made = memory_stages.read_memory_predictions(memory_stages.memory_predictions_path(path), path)
        return bases.plain(made) | {"date": "2026-01-01"}


@functools.cache
def latencies() -> Document:
    """Return a latency of each stage of `STEP` that IOS compares."""
    with TemporaryDirectory() as folder:
        path = _trace_in(folder, STEP)
        trace = read_trace(path)
        stages = stage_times.stages_to_measure(OpGraph.build(trace, hardware_of(trace)), (2,))
        made = stage_times.StageTimes(
            schema=stage_times.SCHEMA, trace=trace.name, trace_sha256=trace_sha256(path), gpu="NVIDIA H200",
            date="2026-01-01", command="test", gpusim="",
            stages=tuple(stage_times.StageTime(groups=each, time_ns=1000 + n) for n, each in enumerate(stages)),
        )  # fmt: skip
        return bases.plain(made)


def tried() -> trials.Trials:
    """Return the trials of two contenders."""
    return trials.Trials(
        schema=trials.SCHEMA, recipe="kept", trace="t", predictions_sha256="0" * 64, gpu="NVIDIA H200",
        date="2026-01-01", gpusim="",
        tried=(trials.Tried(schedules=(0, 1), times_ns=(5, 6)), trials.Tried(schedules=(2,), times_ns=(7,))),
    )  # fmt: skip


@functools.cache
def replayed_schedules() -> tuple[Document, Document]:
    """Return results of two schedules of `STEP`, and these schedules."""
    trace = bases.as_trace(STEP)
    document = bases.plain(make_results([result(900, ns, trace=trace.name) for ns in (1000, 1100)], recipe="kept"))
    order = tuple(range(len(trace.ops)))
    schedules = tuple(
        replayed.ReplayedSchedule(
            trace=trace.name, trace_hash=structure_hash(trace), policy="random", order=order,
            stream_of=tuple(op % 2 for op in order), measured_ns=ns, sequential_ns=2000,
        )
        for ns in (1000, 1100)
    )  # fmt: skip
    return document, bases.plain(replayed.Replayed(schema=replayed.SCHEMA, schedules=schedules))


@functools.cache
def replayed_plans() -> tuple[Document, Document]:
    """Return results of the memory plans of `memory_predicted`, and these plans."""
    plans = [each["plan"] for each in memory_predicted()["plans"]]
    results = bases.plain(
        make_results([result(plan["predicted_ns"], 1000, trace=plan["trace"]) for plan in plans], recipe="kept")
    )
    for row, plan in zip(results["cases"], plans, strict=True):
        row["policy"] = plan["policy"]
    rows = [{"trace_sha256": "0" * 64, "budget_bytes": 0, "plan": plan, "barriers_first": True} for plan in plans]
    return results, {"schema": memory_again.SCHEMA, "plans": rows}


def _trace_in(folder: str, document: Document) -> Path:
    path = Path(folder) / "trace.json"
    path.write_bytes(to_json(document))
    return path


def _recipe(document: Document) -> Recipe:
    return Recipe(**{**document, **_tuples(document)}, case=(RecipeCase(trace="trace.json"),))


def _tuples(document: Document) -> Document:
    return {key: tuple(value) for key, value in document.items() if isinstance(value, list)}


# --- Cases ---


def _packed(data: bytes, rng: random.Random) -> bytes:
    """Compress a file, as its name says; some are not, and some are broken."""
    draw = rng.random()
    if draw < PLAIN:
        return data
    whole = gzip.compress(data, 1, mtime=0)
    return change_bytes(whole, "", rng)[0] if draw < PLAIN + TORN else whole


def _stage_case(
    family: str, suffix: str, document: Callable[[], Document], recipe: Document, step: Document, reader: str = ""
) -> Callable[[random.Random], Case]:
    """Return a generator of files next to a trace, read by the stage `predict`, or by `reader` as later stages do."""

    def make(rng: random.Random) -> Case:
        data, what = changed(document(), document(), rng)
        name = f"trace{suffix}"
        recipe_file = to_toml(recipe | {"case": [{"trace": "trace.json"}]})
        files = {"recipe.toml": recipe_file, "trace.json": to_json(step), name: _packed(data, rng)}
        argv = ("validate", "recipe.toml", "--stage", "predict", "-o", ".", *rng.choice(((), ("--json",))))
        if reader and rng.random() < 0.5:
            argv = (reader, name)
        return Case(family, argv, files, (name,), (), what)

    return make


predictions_case = _stage_case("predictions", predictions.SUFFIX, predicted, KEPT, STEP, "@predictions")
memory_predictions_case = _stage_case(
    "memory_predictions", memory_stages.SUFFIX, memory_predicted, MEMORY, MEMORY_STEP, "@memory_predictions"
)


def stage_times_case(rng: random.Random) -> Case:
    """Latencies that the stage `predict` plans with; its predictions are its output."""
    data, what = changed(latencies(), latencies(), rng)
    name, target = f"trace{stage_times.SUFFIX}", f"trace{predictions.SUFFIX}"
    recipe = to_toml(BY_STAGES | {"case": [{"trace": "trace.json"}]})
    files = {"recipe.toml": recipe, "trace.json": to_json(STEP), name: _packed(data, rng)}
    return Case(
        "stage_times", ("validate", "recipe.toml", "--stage", "predict", "-o", "."), files, (name,), (target,), what
    )


def recipe_stage_case(rng: random.Random) -> Case:
    """Recipes of which the stage `predict` makes predictions."""
    recipes = [each | {"case": [{"trace": "trace.json"}]} for each in (PLAIN_RECIPE, MEMORY, FAIR, NEAR)]
    data, what = changed(rng.choice(recipes), rng.choice(recipes), rng, to_toml)
    files = {"recipe.toml": data, "trace.json": to_json(MEMORY_STEP)}
    argv = ("validate", "recipe.toml", "--stage", "predict", "-o", ".")
    return Case("recipe_stage", argv, files, ("recipe.toml", "trace.json"), ("*",), what)


def trials_case(rng: random.Random) -> Case:
    document = bases.plain(tried())
    data, what = changed(document, document, rng)
    name = f"kept_t{trials.SUFFIX}"
    return Case("trials", ("@trials", name), {name: _packed(data, rng)}, (name,), (), what)


def _again_case(
    family: str,
    suffix: str,
    documents: Callable[[], tuple[Document, Document]],
    step: Document,
    options: tuple[tuple[str, ...], ...],
) -> Callable[[random.Random], Case]:
    """Return a generator of results and of what was replayed, one of them changed, which `--again` predicts anew."""
    beside = f"results{suffix}"

    def make(rng: random.Random) -> Case:
        results, ran = documents()
        files: dict[str, Any] = {f"{bases.as_trace(step).name}.json.gz": gzip.compress(to_json(step), 1, mtime=0)}
        if rng.random() < 0.4:
            data, what = changed(results, bases.results()[1], rng)
            files |= {"results.json": data, beside: gzip.compress(to_json(ran), 1, mtime=0)}
        else:
            data, what = changed(ran, ran, rng)
            files |= {"results.json": to_json(results), beside: _packed(data, rng)}
        words = ("validate", "results.json", "--again", "--traces", ".")
        argv = (*words, *rng.choice(options))
        # All of them: what does not match may be named by either.
        return Case(family, argv, files, tuple(files), (), what)

    return make


PLAIN_OR_JSON = ((), ("--json",))
again_case = _again_case(
    "again", replayed.SUFFIX, replayed_schedules, STEP, (*PLAIN_OR_JSON, ("--models",), ("--models", "--json"))
)
memory_again_case = _again_case("memory_again", memory_again.SUFFIX, replayed_plans, MEMORY_STEP, PLAIN_OR_JSON)
