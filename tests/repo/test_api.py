"""The Python front door: names, import cost, arguments, results and refusals."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest

import gpusim
from gpusim.errors import OptionError, ScheduleError, TraceError, UnknownNameError
from gpusim.formats.hardware import load_hardware
from gpusim.plan.schedule import write_schedule
from gpusim.trace.store import write_trace
from gpusim.units import parse_bytes
from tests.support.helpers import Step as Node
from tests.support.helpers import kernel, make_trace, wide_trace

ROOT = Path(__file__).parents[2]
FUNCTIONS = (
    "calibrate",
    "capture",
    "capture_step",
    "explain",
    "explore",
    "limits",
    "load",
    "replay",
    "simulate",
    "whatif",
)


@pytest.fixture(scope="module")
def step() -> gpusim.Step:
    """A step that gains from streams."""
    return gpusim.load(wide_trace(eager_ns=400_000, graph_ns=130_000), hw="h200")


@pytest.fixture(scope="module")
def best(step: gpusim.Step) -> gpusim.Explored:
    return gpusim.explore(step, evaluations=20)


def fresh(code: str) -> str:
    """Return the output of `code` in a new interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- Names ---


def test_every_public_name_is_there_listed_once_and_in_order() -> None:
    assert gpusim.__all__ == sorted(set(gpusim.__all__))
    assert [name for name in gpusim.__all__ if not hasattr(gpusim, name)] == []
    assert set(gpusim.__all__) <= set(dir(gpusim))
    assert set(FUNCTIONS) <= set(gpusim.__all__)


def test_no_module_takes_the_place_of_a_public_name() -> None:
    code = """
import importlib, json, pkgutil, types
import gpusim
skipped = []
for module in pkgutil.walk_packages(gpusim.__path__, "gpusim."):
    if module.name.endswith("__main__"):
        continue
    importlib.import_module(module.name)
print(json.dumps([n for n in gpusim.__all__ if isinstance(getattr(gpusim, n), types.ModuleType)]))
"""
    assert json.loads(fresh(code)) == []


def test_no_module_is_named_like_a_public_name() -> None:
    modules = {module.name for module in pkgutil.iter_modules(gpusim.__path__)}
    assert modules.isdisjoint(gpusim.__all__)


def test_unknown_name_is_an_attribute_error_as_of_any_module() -> None:
    with pytest.raises(AttributeError, match=r"^module 'gpusim' has no attribute 'optimise'$"):
        _ = gpusim.optimise  # type: ignore[attr-defined]


def test_import_alone_loads_nothing_heavy() -> None:
    code = "import sys, gpusim; dir(gpusim); print(sorted({name.partition('.')[0] for name in sys.modules}))"
    loaded = set(re.findall(r"'(\w+)'", fresh(code)))
    assert loaded.isdisjoint({"numba", "torch", "pandas", "numpy", "msgspec", "simpy", "click", "rich"})


def test_loading_a_step_needs_neither_compiler_nor_torch() -> None:
    code = "import sys, gpusim; gpusim.load('googlenet-infer-b1'); print(sorted(sys.modules))"
    loaded = {name.partition(".")[0] for name in re.findall(r"'([\w.]+)'", fresh(code))}
    assert loaded.isdisjoint({"numba", "torch", "pandas", "simpy", "click", "rich"})


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_has_types_and_a_docstring(name: str) -> None:
    function = getattr(gpusim, name)
    assert function.__doc__
    signature = inspect.signature(function)
    assert signature.return_annotation is not inspect.Signature.empty
    assert all(each.annotation is not inspect.Parameter.empty for each in signature.parameters.values())


# --- Steps ---


def test_load_takes_a_name_a_file_and_a_trace(tmp_path: Path) -> None:
    trace = wide_trace()
    write_trace(trace, tmp_path / "t.json")
    assert gpusim.load(trace).trace is trace
    for file in (tmp_path / "t.json", str(tmp_path / "t.json")):
        assert gpusim.load(file).trace == trace
    assert gpusim.load("googlenet-infer-b1").name == "googlenet-infer-b1"


def test_load_takes_hardware_as_name_file_and_model(tmp_path: Path) -> None:
    model = load_hardware("a100-80gb")
    file = ROOT / "hwmodels" / "a100-80gb.json"
    for hw in ("a100-80gb", file, str(file), model):
        assert gpusim.load(wide_trace(), hw=hw).hardware == model
    assert gpusim.load(wide_trace()).on("a100-80gb").hardware == model


def test_step_is_built_once(step: gpusim.Step) -> None:
    assert step.graph is step.graph


def test_saved_step_loads_again(step: gpusim.Step, tmp_path: Path) -> None:
    step.save(tmp_path / "t.json.gz")
    assert gpusim.load(tmp_path / "t.json.gz").trace == step.trace


def test_load_refuses_what_is_no_trace() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'googlenet-infer-b1'"):
        gpusim.load("googlenet-infer-b2")
    with pytest.raises(OptionError, match=r"^load: int is no trace; "):
        gpusim.load(3)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"^hw=3: "):
        gpusim.load(wide_trace(), hw=3)  # type: ignore[arg-type]


def test_kernel_that_the_gpu_does_not_admit_is_an_error_of_the_file_that_was_given(tmp_path: Path) -> None:
    trace = make_trace([Node("a", makes="x", kernels=(kernel(1000, threads=2048),))])
    write_trace(trace, tmp_path / "t.json")
    with pytest.raises(TraceError, match=f"^{re.escape(str(tmp_path / 't.json'))}: ") as caught:
        gpusim.simulate(tmp_path / "t.json")
    assert "2048" in str(caught.value)


# --- What they give ---


def test_explore_gives_schedule_verdict_bounds_and_rows(best: gpusim.Explored) -> None:
    assert isinstance(best.schedule, gpusim.Schedule)
    assert isinstance(best.verdict, gpusim.Verdict)
    assert isinstance(best.bounds, gpusim.Bounds)
    assert best.verdict.worth_it
    assert "sequential" in {row.policy for row in best.rows}


def test_explore_takes_the_same_arguments_to_the_same_schedule(step: gpusim.Step, best: gpusim.Explored) -> None:
    assert gpusim.explore(step, evaluations=20).schedule == best.schedule


def test_simulating_what_was_explored_takes_what_was_predicted(
    step: gpusim.Step, best: gpusim.Explored, tmp_path: Path
) -> None:
    best.save(tmp_path / "best.json")
    for schedule in (best.schedule, tmp_path / "best.json", str(tmp_path / "best.json")):
        simulated = gpusim.simulate(step, schedule)
        assert simulated.makespan_ns == best.best.makespan_ns
        assert simulated.sequential_ns == best.sequential_ns
        assert simulated.policy == best.best.policy


def test_recommended_is_what_explore_recommends(step: gpusim.Step) -> None:
    recommended = gpusim.simulate(step, "recommended", streams=4)
    assert recommended.makespan_ns <= gpusim.simulate(step, "critical_path", streams=4).makespan_ns


def test_both_engines_give_the_same_times(step: gpusim.Step) -> None:
    fast, reference = (gpusim.simulate(step, engine=engine) for engine in ("fast", "reference"))
    assert fast.timeline.end_ns == reference.timeline.end_ns
    assert fast.recorded.occupied == reference.timeline.occupied != ()


def test_streams_from_the_host_are_slower_than_in_a_graph(step: gpusim.Step) -> None:
    in_graph, from_host = (gpusim.simulate(step, launch=launch) for launch in ("graph", "stream"))
    assert from_host.makespan_ns > in_graph.makespan_ns
    assert from_host.sequential_ns == in_graph.sequential_ns


def test_explained_causes_add_up_to_the_gap(step: gpusim.Step) -> None:
    explained = gpusim.explain(step, streams=2)
    assert sum(explained.causes_ns().values()) == pytest.approx(explained.step().gap_ns)


def test_change_of_nothing_changes_nothing(step: gpusim.Step, best: gpusim.Explored) -> None:
    for schedule in ("critical_path", best.schedule):
        answer = gpusim.whatif(step, schedule)
        assert answer.speedup == 1.0


def test_faster_op_and_more_bandwidth_never_take_longer_on_one_stream(step: gpusim.Step) -> None:
    name = step.trace.ops[0].name
    answer = gpusim.whatif(step, "sequential", ops={name: 2.0}, bandwidth=2.0)
    assert answer.speedup > 1.0
    assert answer.changed.sequential_ns < answer.baseline.sequential_ns
    assert {row[0].partition(",")[0] for row in answer.sensitivities()} >= {"SMs", "launch cost"}


def test_bundled_names_stand_for_their_steps() -> None:
    by_name = gpusim.simulate("googlenet-infer-b1")
    assert by_name.makespan_ns == gpusim.simulate(gpusim.load("googlenet-infer-b1")).makespan_ns


def test_lists_name_what_load_and_simulate_take() -> None:
    assert "googlenet-train-b8" in gpusim.list_traces()
    assert "h200" in gpusim.list_hardware()
    assert {"critical_path", "ios", "recommended"} <= set(gpusim.list_policies())


def test_memory_limit_takes_bytes_and_sizes(step: gpusim.Step) -> None:
    assert gpusim.explore(step, evaluations=5, memory_limit="8GiB").memory_limit_bytes == 8 * 2**30
    assert gpusim.explore(step, evaluations=5, memory_limit=2**33).memory_limit_bytes == 2**33


def test_no_memory_limit_is_kept_by_a_step_of_unknown_memory() -> None:
    """A profile has no tensors: its peak of 0 B would keep any limit."""
    profile = msgspec.structs.replace(wide_trace(), tensors=())
    with pytest.raises(OptionError, match=r"^memory_limit=1GiB: '.*' has no tensors, so its memory is unknown$"):
        gpusim.explore(profile, evaluations=5, memory_limit="1GiB")


@pytest.mark.parametrize(
    ("text", "bare", "size"),
    [
        ("8GiB", 1, 8 * 2**30),
        ("8 gib", 1, 8 * 2**30),
        ("1.5KiB", 1, 1536),
        ("40GB", 1, 40 * 10**9),
        ("3B", 1, 3),
        ("400", 2**20, 400 * 2**20),
        ("519.5", 2**20, 519 * 2**20 + 2**19),
        ("7", 1, 7),
        ("2KB", 2**20, 2000),
    ],
)
def test_sizes_are_read_as_they_are_written(text: str, bare: int, size: int) -> None:
    assert parse_bytes(text, bare) == size


@pytest.mark.parametrize("text", ["", "GiB", "8iB", "8 XiB", "-8GiB", "1e9", "8GiB!", "٣GiB", "9" * 30])
def test_other_text_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        parse_bytes(text)


# --- What they refuse ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"streams": 300}, "streams=300: the number of streams lies between 1 and 128"),
        ({"streams": 0}, "streams=0: the number of streams lies between 1 and 128"),
        ({"streams": "8"}, "streams='8': the number of streams lies between 1 and 128"),
        ({"budget_s": 0}, "budget_s=0: the search takes between 0 and 86400 seconds"),
        ({"budget_s": float("nan")}, "budget_s=nan: the search takes between 0 and 86400 seconds"),
        ({"evaluations": 0}, "evaluations=0: a whole number from 1 to 1,000,000,000"),
        ({"evaluations": 10**400}, "evaluations=1000"),
        ({"seed": -1}, "seed=-1: a whole number between 0 and "),
        ({"memory_limit": "much"}, "memory_limit=much: a size such as 8GiB, or a number of bytes"),
        ({"memory_limit": 2**60 + 1}, "memory_limit=1152921504606846977: a size such as 8GiB"),
        ({"memory_limit": -5}, "memory_limit=-5: a size such as 8GiB, or a number of bytes"),
        ({"memory_limit": 1}, "memory limit 1 B: the least that any schedule found needs is "),
    ],
)
def test_argument_out_of_range_is_named_as_python_names_it(
    step: gpusim.Step, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=f"^{re.escape(message)}"):
        gpusim.explore(step, **({"evaluations": 5} | arguments))


@pytest.mark.parametrize(
    "arguments",
    [
        {"budget_s": "3"},
        {"budget_s": 10**400},
        {"partitions": [1]},
        {"partitions": 5},
        {"memory_limit": float("inf")},
        {"memory_limit": []},
        {"policies": 5},
        {"policies": [[]]},
        {"streams": True},
        {"seed": 1.0},
        {"evaluations": "5"},
    ],
)
def test_argument_of_another_type_to_explore_is_one_line(step: gpusim.Step, arguments: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=f"^{next(iter(arguments))}="):
        gpusim.explore(step, **({"evaluations": 5} | arguments))


def test_what_is_no_result_of_its_function_is_not_written_and_said_in_one_line(
    step: gpusim.Step, tmp_path: Path
) -> None:
    best = gpusim.explore(step, evaluations=5)
    path = tmp_path / "x.json"
    with pytest.raises(OptionError, match=r"^simulated=Explored: give what gpusim\.simulate returns$"):
        gpusim.write_perfetto(best, path)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"^plans=Explored: give what gpusim\.parallel returns$"):
        gpusim.write_parallel_plan(best, path)  # type: ignore[arg-type]
    assert not path.exists()


def test_schedule_of_another_step_says_how_large_its_own_is(step: gpusim.Step) -> None:
    other = gpusim.load(wide_trace(width=3))
    schedule = gpusim.simulate(other, "sequential").schedule
    ops = len(other.trace.ops), len(step.trace.ops)
    with pytest.raises(ScheduleError, match=f"is of another trace, of {ops[0]} ops: '{step.name}' has {ops[1]}"):
        gpusim.simulate(step, schedule)


@pytest.mark.parametrize(
    "arguments",
    [{"sms": "66"}, {"sms": 66.5}, {"sms": True}, {"queues": []}, {"bandwidth": "2"}, {"ops": 5}, {"ops": {"a": "b"}}],
)
def test_argument_of_another_type_to_whatif_is_one_line(step: gpusim.Step, arguments: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=f"^{next(iter(arguments))}="):
        gpusim.whatif(step, **arguments)


def test_other_arguments_of_another_type_are_one_line(step: gpusim.Step, best: gpusim.Explored) -> None:
    for wrong in ([], None, 5):
        with pytest.raises(OptionError, match=r"^engine="):
            gpusim.simulate(step, engine=wrong)  # type: ignore[arg-type]
    for path in ("a\0b.json", 5):
        for saved in (step, best):
            with pytest.raises(OptionError, match=r"^path="):
                saved.save(path)  # type: ignore[arg-type]


def test_numpy_integers_are_counts(step: gpusim.Step) -> None:
    taken = gpusim.explore(step, streams=np.int64(2), evaluations=np.int32(5), seed=np.uint8(0))  # type: ignore[arg-type]
    assert taken.schedule == gpusim.explore(step, streams=2, evaluations=5, seed=0).schedule
    changed = gpusim.whatif(step, sms=np.int64(66)).changed  # type: ignore[arg-type]
    assert changed.makespan_ns == gpusim.whatif(step, sms=66).changed.makespan_ns


def test_text_that_names_a_file_is_a_schedule_file(step: gpusim.Step, best: gpusim.Explored, tmp_path: Path) -> None:
    for name in ("b.json.gz", "b.json", "b"):
        path = tmp_path / name
        write_schedule(best.schedule, step.trace, path)
        assert gpusim.simulate(step, str(path)).schedule == best.schedule
    with pytest.raises(ScheduleError, match="cannot be read"):
        gpusim.simulate(step, "missing.json.gz")


def test_replay_looks_for_a_gpu_before_it_explores(step: gpusim.Step, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("gpusim.api.gpu.resolve_schedule", lambda *_: pytest.fail("explored"))
    with pytest.raises(gpusim.GpuError, match=r"^no GPU: "):
        gpusim.replay("squeezenet1_1-infer-b1", "recommended")


def test_unknown_names_say_the_nearest(step: gpusim.Step) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'wavefront'"):
        gpusim.simulate(step, "wavefrnt")
    with pytest.raises(UnknownNameError, match="did you mean 'reference'"):
        gpusim.simulate(step, engine="referense")
    with pytest.raises(UnknownNameError, match="did you mean 'stream'"):
        gpusim.simulate(step, launch="streams")
    with pytest.raises(UnknownNameError, match="unknown policy"):
        gpusim.explore(step, policies=["waves"])


def test_schedule_of_another_step_is_refused(step: gpusim.Step) -> None:
    other = gpusim.explore("googlenet-infer-b1", evaluations=1, policies=["wavefront"])
    with pytest.raises(ScheduleError):
        gpusim.simulate(step, other.schedule)


def test_what_is_no_schedule_is_refused(step: gpusim.Step, best: gpusim.Explored) -> None:
    with pytest.raises(OptionError, match=r"^Explored is no schedule: "):
        gpusim.simulate(step, best)  # type: ignore[arg-type]


def test_no_gpu_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for call in (lambda: gpusim.replay("squeezenet1_1-infer-b1", "nimble"), gpusim.calibrate):
        with pytest.raises(gpusim.GpuError, match=r"^no GPU: ") as caught:
            call()
        assert "\n" not in str(caught.value)


def test_command_line_translates_arguments_into_its_options(tmp_path: Path) -> None:
    write_trace(wide_trace(), tmp_path / "t.json")
    for options, message in (
        (["--streams", "300"], "--streams 300: the number of streams lies between 1 and 128"),
        (["--budget", "0"], "--budget 0.0: the search takes between 0 and 86400 seconds"),
        (["--memory", "much"], "--memory much: a size such as 8GiB, or a number of MiB"),
        (["--memory", "0"], "--memory 0: a size such as 8GiB, or a number of MiB"),
    ):
        words = [sys.executable, "-m", "gpusim", "explore", str(tmp_path / "t.json"), *options]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"gpusim: {message}\n"


def test_memory_of_the_command_line_takes_sizes_and_mib(tmp_path: Path) -> None:
    limits = []
    for size in ("2GiB", "2048"):
        code = f"""
import sys
import gpusim
run = gpusim.explore
def noted(*arguments, **options):
    print(options["memory_limit"])
    raise gpusim.OptionError("enough")
gpusim.explore = noted
sys.argv = ["gpusim", "explore", "googlenet-infer-b1", "--memory", "{size}"]
from gpusim.cli import cli
try:
    cli(standalone_mode=False)
except gpusim.OptionError:
    pass
"""
        limits.append(fresh(code).strip())
    assert limits == [str(2 * 2**30)] * 2


def test_library_speaks_of_no_options() -> None:
    """A message may name a command with its options, or an option with its Python counterpart; no option alone."""
    wrong = []
    for path in (ROOT / "gpusim").rglob("*.py"):
        if {"cli", "figures", "sweep", "__main__.py"} & set(path.parts):
            continue
        for raised in ast.walk(ast.parse(path.read_text())):
            if not isinstance(raised, ast.Raise):
                continue
            text = "".join(
                part.value
                for part in ast.walk(raised)
                if isinstance(part, ast.Constant) and isinstance(part.value, str)
            )
            alone = re.sub(r"`\w+ [^`]*`", "", text)  # without whole commands, of other programs too
            if re.search(r"(?<!\w)--[a-z]", alone) and "gpusim " not in text and "in Python" not in text:
                wrong.append(f"{path.relative_to(ROOT)}:{raised.lineno}: {text}")
    assert wrong == []


def test_submodules_stay_importable(step: gpusim.Step) -> None:
    for name in ("gpusim.trace", "gpusim.formats", "gpusim.policies"):
        assert isinstance(importlib.import_module(name), ModuleType)
