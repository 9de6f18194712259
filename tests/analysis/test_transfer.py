"""Transfer of a schedule to another batch or GPU: mapping of ops, losses, refusals."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import gpusim
from gpusim.analysis.transfer import Setting, Transfer, TransferRow, moved
from gpusim.cli import main
from gpusim.errors import OptionError
from gpusim.formats.trace import Trace
from gpusim.plan.schedule import Schedule
from gpusim.report.figures.transfer import transfer_figure
from gpusim.report.transfer_table import transfer_document
from gpusim.trace.store import write_trace
from tests.support.helpers import WHOLE, chain_trace, make_trace, op, wide_trace

Run = Callable[..., tuple[int, str, str]]
EVALUATIONS = 20


def at(trace: Trace, batch: int) -> Trace:
    return msgspec.structs.replace(trace, model=msgspec.structs.replace(trace.model, batch=batch))


@pytest.fixture(scope="module")
def small() -> Trace:
    """Branches of one block: all of them fit side by side."""
    return at(wide_trace(6, graph_ns=130_000), 1)


@pytest.fixture(scope="module")
def large() -> Trace:
    """The same ops with kernels that fill the GPU: streams gain nothing."""
    return at(wide_trace(6, blocks=WHOLE, graph_ns=130_000), 64)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*words: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["gpusim", "transfer", *map(str, words)])
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as exited:
            code = int(exited.code or 0)
        return code, *capsys.readouterr()

    return call


def test_every_schedule_is_used_on_every_setting_and_lost_is_time_over_the_fastest(small: Trace, large: Trace) -> None:
    found = gpusim.transfer([small, large], hw=["h200", "a100-80gb"], evaluations=EVALUATIONS)
    names = [setting.name for setting in found.settings]
    assert names == [f"{trace.name} on {gpu}" for trace in (small, large) for gpu in ("h200", "a100-80gb")]
    assert [(row.used_on, row.tuned_for) for row in found.rows] == [(u, t) for u in names for t in names]
    for used in names:
        rows = [row for row in found.rows if row.used_on == used]
        fastest = min(row.time_ns for row in rows)
        assert {row.best_ns for row in rows} == {fastest}
        assert [row.lost_frac for row in rows] == [row.time_ns / fastest - 1.0 for row in rows]
        assert min(row.lost_frac for row in rows) == 0.0


def test_a_schedule_at_home_takes_what_explore_predicts(small: Trace, large: Trace) -> None:
    found = gpusim.transfer([small, large], evaluations=EVALUATIONS)
    for trace, setting in zip((small, large), found.settings, strict=True):
        fastest = min(row.makespan_ns for row in gpusim.explore(trace, evaluations=EVALUATIONS).rows)
        [home] = [row for row in found.rows if row.tuned_for == row.used_on == setting.name]
        assert home.time_ns == setting.tuned_ns == fastest


def test_a_gain_within_the_uncertainty_is_tuned_for_all_the_same() -> None:
    """The verdict keeps one stream there; what is used elsewhere is the fastest schedule that was found."""
    chain = [op(f"a{i}", f"a{i - 1}" if i else "x", dur_ns=10_000) for i in range(5)]
    steps = [*chain, op("b", "x", dur_ns=4_000), op("join", "a4 b", dur_ns=1_000)]
    trace = make_trace(steps, outputs="join", graph_ns=60_000)
    explored = gpusim.explore(gpusim.load(trace, "a100-80gb"), evaluations=EVALUATIONS)
    assert explored.best.policy == "sequential"
    [setting] = gpusim.transfer(trace, hw="a100-80gb", evaluations=EVALUATIONS).settings
    assert setting.tuned_ns == min(row.makespan_ns for row in explored.rows) < setting.sequential_ns


def test_a_schedule_tuned_for_full_kernels_loses_where_kernels_are_small(small: Trace, large: Trace) -> None:
    """Tuned for the large batch it needs few streams, and loses part of the streams' gain on the small one."""
    found = gpusim.transfer([small, large], evaluations=EVALUATIONS)
    one, other = found.settings
    assert other.streams < one.streams
    rows = {(row.tuned_for, row.used_on): row for row in found.rows}
    away, home = rows[other.name, one.name], rows[one.name, one.name]
    assert one.sequential_ns > away.time_ns > home.time_ns == away.best_ns
    assert found.worst == away
    assert f"{away.lost_frac:.1%} longer" in found.sentence


def test_a_schedule_moves_by_the_names_of_ops() -> None:
    first = make_trace([op("a", "x"), op("b", "x"), op("c", "a b")])
    other = make_trace([op("b", "x"), op("a", "x"), op("c", "a b")])
    there = moved(Schedule(order=(1, 0, 2), streams=(0, 1, 0)), first, other)
    names = [each.name for each in other.ops]
    assert [names[index] for index in there.order] == ["b", "a", "c"]
    assert dict(zip(names, there.streams, strict=True)) == {"a": 0, "b": 1, "c": 0}


@pytest.mark.parametrize("turned", [False, True])
def test_steps_with_other_ops_are_refused_with_the_first_that_differs(turned: bool) -> None:
    steps = [chain_trace(3), at(chain_trace(4), 2)]
    with pytest.raises(OptionError, match=r"not the same step: 'a3'"):
        gpusim.transfer(reversed(steps) if turned else steps, evaluations=EVALUATIONS)


def test_a_batch_is_that_of_a_trace_given_or_of_a_bundled_one_and_never_made_up() -> None:
    found = gpusim.transfer("googlenet-train-b8", batch=[8, 32], evaluations=EVALUATIONS)
    assert [setting.trace for setting in found.settings] == ["googlenet-train-b8", "googlenet-train-b32"]
    with pytest.raises(OptionError, match=r"^batch=64: there is no trace of googlenet, train.*there are: 8, 32\)"):
        gpusim.transfer("googlenet-train-b8", batch=[8, 64], evaluations=EVALUATIONS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"steps": []}, "no step"),
        ({"hw": []}, "no hardware model"),
        ({"batch": [0]}, "batch=0: a whole number of at least 1"),
        ({"batch": ["8"]}, "batch='8': a whole number"),
        ({"streams": 0}, "streams=0"),
        ({"seed": -1}, "seed=-1"),
        ({"evaluations": 0}, "evaluations=0"),
        ({"evaluations": 10**400}, "evaluations=1000"),
        ({"hw": ["h200", "h200"]}, "given twice, the second time by 'vgg16-infer-b1'"),
        ({"hw": ["h200"], "steps": ["vgg16-infer-b1"] * 65}, "given twice"),
    ],
)
def test_arguments_out_of_range_are_one_line(arguments: dict[str, Any], words: str) -> None:
    options = {"steps": "vgg16-infer-b1", "evaluations": EVALUATIONS, **arguments}
    with pytest.raises(OptionError) as caught:
        gpusim.transfer(options.pop("steps"), **options)
    assert words in str(caught.value)


def test_more_settings_than_a_question_may_have_are_refused() -> None:
    steps = [at(chain_trace(2), batch) for batch in range(1, 66)]
    with pytest.raises(OptionError, match="65 settings"):
        gpusim.transfer(steps, evaluations=EVALUATIONS)


def test_an_imported_step_without_data_dependencies_is_refused(small: Trace) -> None:
    from gpusim.formats.trace import ImportedFrom

    source = ImportedFrom(
        format="kineto",
        writer="torch",
        files=("a.json",),
        step="whole file",
        device=0,
        dependency_quality="stream",
        observed_ns=1,
        busy_ns=1,
        concurrent_ns=0,
    )
    provenance = msgspec.structs.replace(small.provenance, imported_from=source)
    with pytest.raises(OptionError, match="without data dependencies"):
        gpusim.transfer(msgspec.structs.replace(small, provenance=provenance))


def test_json_has_the_contract_s_rows(small: Trace, large: Trace, tmp_path: Path, run: Run) -> None:
    for trace in (small, large):
        write_trace(trace, tmp_path / f"{trace.name}.json")
    files = [tmp_path / f"{trace.name}.json" for trace in (small, large)]
    code, out, _ = run(*files, "--hw", "h200", "--batch", "64,1", "--evaluations", EVALUATIONS, "--json")
    document = json.loads(out)
    assert code == 0
    assert [setting["batch"] for setting in document["settings"]] == [64, 1]
    assert len(document["rows"]) == 4
    assert set(document["rows"][0]) == {"tuned_for", "used_on", "time_ns", "best_ns", "lost_frac"}
    found = gpusim.transfer([large, small], hw="h200", evaluations=EVALUATIONS)
    assert document == json.loads(json.dumps(transfer_document(found)))


def test_the_table_says_what_is_lost_and_what_is_uncalibrated(run: Run) -> None:
    code, out, _ = run("vgg16-infer-b1", "--hw", "h200,v100", "--evaluations", EVALUATIONS)
    assert code == 0
    assert "vgg16-infer-b1 on v100" in out
    assert "Uncalibrated: v100" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--batch", "8,x"), "--batch '8,x': whole numbers"),
        (("--batch", "8"), "--batch 8: there is no trace of vgg16"),
        (("--hw", "h200,"), "--hw 'h200,': names"),
        (("--hw", "h2000"), "unknown hardware 'h2000'"),
        (("--streams", "0"), "--streams 0"),
    ],
)
def test_bad_options_are_one_line_and_exit_2(words: tuple[str, ...], said: str, run: Run) -> None:
    code, out, err = run("vgg16-infer-b1", *words)
    assert (code, out) == (2, "")
    [line] = err.splitlines()
    assert said in line


def test_the_heat_map_has_a_cell_for_each_row_in_percent() -> None:
    settings = tuple(Setting(f"net-b{b}", b, "h200", True, "critical_path", 2, 100, 200) for b in (1, 2))
    names = [setting.name for setting in settings]
    times = {(0, 0): 100, (0, 1): 150, (1, 0): 120, (1, 1): 100}
    rows = tuple(
        TransferRow(names[tuned], names[used], times[tuned, used], 100) for used in range(2) for tuned in range(2)
    )
    figure = transfer_figure(Transfer(settings, rows))
    assert [list(line) for line in figure.data[0].z] == [[0.0, pytest.approx(50.0)], [pytest.approx(20.0), 0.0]]
    assert [each.text for each in figure.layout.annotations] == ["0.0%", "50.0%", "20.0%", "0.0%"]


def test_a_figure_is_written_where_asked_for(tmp_path: Path, run: Run) -> None:
    target = tmp_path / "transfer.html"
    code, out, _ = run("vgg16-infer-b1", "--hw", "h200,a100-80gb", "--evaluations", EVALUATIONS, "--html", target)
    assert code == 0
    assert f"figure written to {target}" in out
    assert "tuned for" in target.read_text("utf-8")
