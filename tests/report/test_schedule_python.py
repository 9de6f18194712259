"""Schedules as Python: the code runs, gives the step's results, and has exactly the necessary waits."""

from __future__ import annotations

import ast
import csv
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from click.testing import CliRunner

import gpusim
from gpusim.api.other_tools import export
from gpusim.cli import cli
from gpusim.errors import GpusimError, OperatorError, OptionError, OutputError
from gpusim.formats.trace import Trace
from gpusim.gpu.replay.allowlist import allowed_operators
from gpusim.gpu.replay.execute import InitialState, results_of
from gpusim.gpu.replay.operators import resolve
from gpusim.importers import import_files
from gpusim.plan.sync import works
from gpusim.report.schedule_python import VIEWS_IN_PLACE, given_names, returns_list, schedule_python
from gpusim.report.schedule_table import schedule_csv, schedule_markdown, schedule_rows
from gpusim.trace.store import load_trace
from tests.support.fake_streams import Races, Streams, stand_in
from tests.support.helpers import Step, in_place, kernel, make_trace, op
from tests.support.networks import NETWORKS, OnCpu, on_cpu

NAME = "squeezenet1_1-infer-b1"


def with_kernels(trace: Trace) -> Trace:
    """Return a trace recorded on the CPU, with a synthetic kernel in each op."""
    ops = [
        msgspec.structs.replace(found, kernels=(kernel(1000 + 137 * (index % 7)),) if works(found) else ())
        for index, found in enumerate(trace.ops)
    ]
    return msgspec.structs.replace(trace, ops=tuple(ops))


def function(code: str) -> Callable[..., Any]:
    scope: dict[str, Any] = {}
    exec(compile(code, "exported.py", "exec"), scope)
    found: Callable[..., Any] = scope["step"]
    return found


def ran(
    code: str, trace: Trace, initial: dict[int, torch.Tensor], streams: Streams
) -> tuple[list[torch.Tensor], Races]:
    """Run the code; returns its results and races."""
    given = {key: initial[index] for index, key in given_names(trace).items()}
    with Races(streams, list(initial.values())) as races:
        results = function(code)(given, device="cpu")
    return list(results.values()), races


def expected(network: OnCpu) -> dict[int, torch.Tensor]:
    """The results of the same trace run op by op, and the states that it changes."""
    runner = network.rerun()
    runner.run_in_order()
    return results_of(network.trace, runner.tensors)


@pytest.mark.parametrize("policy", ["round_robin", "critical_path"])
@pytest.mark.parametrize("name", NETWORKS)
def test_code_of_a_training_step_gives_its_results_without_a_race(
    name: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = on_cpu(name)
    trace = with_kernels(network.trace)
    code = schedule_python(gpusim.simulate(trace, policy, streams=4))
    streams = stand_in(monkeypatch)
    initial = InitialState.copy_of(network.recorded.initial).tensors
    torch.manual_seed(network.options.seed)
    results, races = ran(code, trace, initial, streams)
    assert races.found == []
    assert streams.joined
    assert len(streams.all) == trace_streams(code)
    wanted = expected(network)
    returned = [index for index in wanted if trace.tensors[index].role in ("output", "gradient")]
    for index, result in zip(returned, results, strict=True):
        assert torch.equal(result, wanted[index]) or bool(result.isnan().any())
    for index, tensor in initial.items():
        if index in wanted:
            assert torch.equal(tensor, wanted[index])


def trace_streams(code: str) -> int:
    found = re.search(r"^STREAMS = (\d+)$", code, re.MULTILINE)
    assert found
    return int(found[1])


def test_code_of_a_captured_network_gives_the_results_of_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpusim.gpu.replay.execute import make_initial

    trace = load_trace(NAME)
    initial = make_initial(trace, torch.device("cpu"), 0).tensors
    results = []
    for policy in ("sequential", "critical_path"):
        code = schedule_python(gpusim.simulate(trace, policy, streams=4))
        found, races = ran(code, trace, initial, stand_in(monkeypatch))
        assert races.found == []
        results.append(found[0])
    assert torch.equal(*results)
    assert results[0].shape == (1, 1000)


def test_each_wait_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any one of the waits, an op uses memory that another stream may still write or read."""
    network = on_cpu("branches")
    trace = with_kernels(network.trace)
    lines = schedule_python(gpusim.simulate(trace, "round_robin", streams=3)).splitlines()
    waits = [number for number, line in enumerate(lines) if ".wait_event(" in line]
    assert len(waits) > 10
    for number in waits:
        streams = stand_in(monkeypatch)
        code = "\n".join(lines[:number] + lines[number + 1 :])
        initial = InitialState.copy_of(network.recorded.initial).tensors
        _, races = ran(code, trace, initial, streams)
        assert races.found or not streams.joined, lines[number]


def test_code_of_an_imported_step_calls_each_op_after_those_that_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"kineto": tmp_path / "k.json", "execution_trace": tmp_path / "e.json"}
    export(gpusim.simulate("googlenet-infer-b1", "sequential"), files)
    trace = import_files([str(path) for path in files.values()]).trace
    code = schedule_python(gpusim.simulate(trace, "critical_path", streams=4))
    streams = stand_in(monkeypatch)
    number = {found.name: index for index, found in enumerate(trace.ops)}
    done: dict[int, tuple[int, int]] = {}

    def run(name: str) -> None:
        index = number[name]
        assert all(streams.current.knows(done[edge.op]) for edge in trace.ops[index].after)
        done[index] = streams.current.tick()

    function(code)(run)
    assert sorted(done) == list(range(len(trace.ops)))
    assert streams.joined
    assert len(streams.all) == 4


def test_code_of_a_compiled_step_names_its_kernels_and_calls_none() -> None:
    step = Step("a", "x", "a", kernels=(kernel(5),), target="inductor.kernel")
    trace = make_trace([step], outputs="a")
    trace = msgspec.structs.replace(trace, model=msgspec.structs.replace(trace.model, frontend="inductor"))
    code = schedule_python(gpusim.simulate(trace, "sequential"))
    assert "def step(run)" in code
    assert "torch.ops" not in code


# --- What it is made of ---


def test_lists_and_views_in_place_are_those_of_torch() -> None:
    lists, views = set(), set()
    for target in sorted(allowed_operators()):
        try:
            found = resolve(target)
        except OperatorError:  # of torchvision, or of another version
            continue
        name = target.split(".")[1]
        returns = [str(value.type) for value in found._schema.returns]
        if returns == ["List[Tensor]"]:
            lists.add(target)
        if torch.Tag.inplace_view in found.tags:
            views.add(name)
        assert returns == ["List[Tensor]"] or "List[Tensor]" not in returns, target
    assert {target for target in allowed_operators() if returns_list(target)} >= lists
    assert not [t for t in allowed_operators() if returns_list(t) and t not in lists and _in_torch(t)]
    assert views <= VIEWS_IN_PLACE


def _in_torch(target: str) -> bool:
    try:
        resolve(target)
    except OperatorError:
        return False
    return True


HOSTILE = [
    "import os",
    "x\nimport os",
    'x"""\nimport os',
    "x'); import os; ('",
    "\\",
    "# x",
    "class",
    "torch",
    "aten",
    "s",
    "tensors",
    "\u202ex",
    "\u212aelvin",
    "1",
    "",
    "a" * 5000,
    "__import__",
    "{0}",
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_names_of_a_file_are_names_and_texts_in_the_code_and_nothing_else(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = on_cpu("own_loss")
    plain = with_kernels(network.trace)
    ops = [msgspec.structs.replace(o, name=f"{text}{i}", layer=text) for i, o in enumerate(plain.ops)]
    tensors = [msgspec.structs.replace(t, name=f"{text}{i}" if i % 2 else text) for i, t in enumerate(plain.tensors)]
    model = msgspec.structs.replace(plain.model, network=text, spec=text)
    trace = msgspec.structs.replace(plain, ops=tuple(ops), tensors=tuple(tensors), model=model)
    code = schedule_python(gpusim.simulate(trace, "round_robin", streams=3))
    assert code.isascii() or "\u202e" not in code
    nodes = ast.parse(code).body
    assert [type(node).__name__ for node in nodes] == ["Import", "Assign", *["FunctionDef"] * (len(nodes) - 2)]
    for node in ast.walk(nodes[-1]):
        assert not isinstance(node, ast.Import | ast.ImportFrom | ast.Lambda | ast.JoinedStr)
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert re.fullmatch(
                r"aten\.\w+\.\w+|s\[\d\]\.(wait|record)_event|torch\.(no_grad|cuda\.(Stream|stream|current_stream))|range|\w+\.detach|float",
                called,
            )
    initial = InitialState.copy_of(network.recorded.initial).tensors
    results, races = ran(code, trace, initial, stand_in(monkeypatch))
    assert races.found == []
    assert results


@pytest.mark.parametrize(
    "target", ["aten.from_file.default", "os.system.default", "aten.add", "aten.add_.Tensor\nimport os"]
)
def test_operator_that_replay_would_not_call_is_not_written_either(target: str) -> None:
    relu, other = (
        Step(n, i, n, kernels=(kernel(5),), target=t)
        for n, i, t in (("a", "x", "aten.relu.default"), ("b", "a", target))
    )
    trace = make_trace([relu, other], outputs="b")
    with pytest.raises(OperatorError, match=r"^t\.json: \$\.ops\[1\]"):
        schedule_python(gpusim.simulate(trace, "sequential"), "t.json")


@pytest.mark.parametrize("text", ["x');__import__('os')", 'a"', "\\'"])
def test_text_arguments_are_refused_or_written_as_texts(text: str) -> None:
    step = Step("g", "x", "g", kernels=(kernel(5),), target="aten.gelu.default")
    trace = make_trace([step], outputs="g")
    ops = (msgspec.structs.replace(trace.ops[0], kwargs={"approximate": text}),)
    with pytest.raises(OperatorError):
        schedule_python(gpusim.simulate(msgspec.structs.replace(trace, ops=ops), "sequential"))


# --- Tables ---


def branches() -> Trace:
    """`a` makes the input of `b` and `c`; `d` reads both and changes `a`."""
    steps = [op("a", "x", dur_ns=1000), op("b", "a", dur_ns=5000), op("c", "a", dur_ns=5000), in_place("d", "a", "b c")]
    return make_trace(steps, outputs="b")


def test_table_has_each_op_once_with_its_waits_and_times() -> None:
    rows = schedule_rows(gpusim.simulate(branches(), "round_robin", streams=2))
    assert [(row.place, row.op, row.stream) for row in rows] == [(1, "a", 0), (2, "b", 0), (3, "c", 1), (4, "d", 0)]
    assert [row.waits_for for row in rows] == [(), (), ("a",), ("c",)]
    assert all(row.end_ns - row.start_ns > 0 for row in rows if row.end_ns is not None and row.start_ns is not None)
    assert rows[2].start_ns is not None
    assert rows[0].end_ns is not None
    assert rows[2].start_ns >= rows[0].end_ns


def test_csv_is_read_back_with_integers_in_ns_and_no_cell_is_a_formula() -> None:
    trace = branches()
    ops = tuple(msgspec.structs.replace(o, layer="=1+1") for o in trace.ops)
    text = schedule_csv(gpusim.simulate(msgspec.structs.replace(trace, ops=ops), "round_robin", streams=2))
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["op"] for row in rows] == ["a", "b", "c", "d"]
    assert all(row["layer"] == "'=1+1" for row in rows)
    assert all(int(row["end_ns"]) > int(row["start_ns"]) >= 0 for row in rows)


def test_markdown_has_as_many_cells_in_each_line_whatever_names_hold() -> None:
    trace = branches()
    ops = tuple(msgspec.structs.replace(o, layer="a|b\n<img src=x>`" + "x" * 500) for o in trace.ops)
    simulated = gpusim.simulate(msgspec.structs.replace(trace, ops=ops), "round_robin", streams=2)
    first, blank, *lines = schedule_markdown(simulated).splitlines()
    assert "2 streams" in first
    assert blank == ""
    assert len(lines) == 2 + 4
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {11}
    assert "<img" not in "".join(lines).replace("\\<", "")


# --- The command ---


def invoke(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["export", NAME, *words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


def test_command_writes_all_kinds_and_says_so_as_json(tmp_path: Path) -> None:
    paths = {kind: str(tmp_path / name) for kind, name in KINDS.items()}
    words = [word for kind, path in paths.items() for word in (f"--{kind.replace('_', '-')}", path)]
    code, text = invoke("--policy", "round_robin", "--streams", "2", "--json", *words)
    document = json.loads(text)
    assert code == 0
    assert list(document) == ["trace", "hardware", "policy", "streams", "makespan_ns", "sequential_ns", "files"]
    assert document["files"] == paths
    assert (document["policy"], document["streams"]) == ("round_robin", 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(KINDS.values())
    assert "def step(tensors" in Path(paths["python"]).read_text()


KINDS = {
    "kineto": "k.json.gz",
    "execution_trace": "e.json",
    "chakra": "c.et",
    "table": "t.csv",
    "python": "p.py",
}


def test_command_exports_a_schedule_from_a_file(tmp_path: Path) -> None:
    schedule, table = tmp_path / "s.json", tmp_path / "t.md"
    explored = gpusim.explore(NAME, evaluations=8, budget_s=5)
    explored.save(schedule)
    code, text = invoke("--schedule", str(schedule), "--table", str(table), "--json")
    assert code == 0
    assert json.loads(text)["makespan_ns"] == explored.best.makespan_ns
    with pytest.raises(OptionError, match="--schedule goes without --policy"):
        invoke("--schedule", str(schedule), "--policy", "sequential", "--table", str(table))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((), "nothing to write: give --kineto, --execution-trace, --chakra, --table or --python"),
        (("--table", "t.txt"), r"ends in \.csv or \.md"),
        (("--python", "p.txt"), r"ends in \.py"),
        (("--python", "nowhere/p.py"), "there is no folder"),
        (("--kineto", "k.json", "--table", "t.txt"), r"ends in \.csv or \.md"),
    ],
)
def test_command_refuses_in_one_line_and_writes_nothing(
    words: tuple[str, ...], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((OptionError, OutputError), match=problem):
        invoke(*words)
    assert not list(tmp_path.iterdir())


def test_unknown_kind_is_refused_and_nothing_is_written_where_one_file_cannot_be_made(tmp_path: Path) -> None:
    trace = make_trace([op("a", "x")], outputs="a")  # an unlisted operator
    simulated = gpusim.simulate(trace, "sequential")
    with pytest.raises(OptionError, match="one of kineto"):
        export(simulated, {"svg": tmp_path / "x.svg"})
    with pytest.raises(GpusimError):
        export(simulated, {"kineto": tmp_path / "k.json", "python": tmp_path / "p.py"})
    assert not list(tmp_path.iterdir())
