"""`gpusim parallel` and `gpusim.parallel`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

import gpusim
from gpusim.cli import cli, main
from gpusim.errors import OptionError, TopologyError, UnknownNameError
from gpusim.formats.topology import load_topology
from gpusim.io.files import write_document
from gpusim.report.parallel_table import _times

Run = Callable[..., tuple[int, str, str]]
TRACE = "vgg16-infer-b1"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["gpusim", *map(str, arguments)])
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as exited:
            code = int(exited.code or 0)
        return code, *capsys.readouterr()

    return call


@pytest.fixture(scope="module")
def plain() -> str:
    """Return what the command prints for two GPUs."""
    done = CliRunner().invoke(cli, ["parallel", TRACE, "--gpus", "2", "--json"], catch_exceptions=False)
    return done.stdout


def test_json_has_every_plan_and_every_layer(run: Run) -> None:
    code, out, _ = run("parallel", "resnet50-train-b8", "--gpus", "4", "--json")
    assert code == 0
    found = json.loads(out)
    assert [plan["plan"] for plan in found["plans"]] == ["data", "model", "owt", "layer"]
    keys = {"plan", "step_ns", "additive_ns", "compute_ns", "transfer_ns", "sync_ns", "bytes"}
    assert all(keys <= set(plan) for plan in found["plans"])
    assert all(type(plan[key]) is int for plan in found["plans"] for key in keys - {"plan"})
    assert (found["trace"], found["gpus"], found["communication"]) == ("resnet50-train-b8", 4, "measured")
    assert found["search"]["exact"]
    assert len(found["layers"]) == 73
    steps = {plan["plan"]: plan["step_ns"] for plan in found["plans"]}
    assert steps["layer"] == min(steps.values())
    for plan in found["plans"]:
        assert plan["additive_ns"] == pytest.approx(plan["compute_ns"] + plan["transfer_ns"] + plan["sync_ns"], abs=3)


def test_the_table_names_plan_basis_and_proof(run: Run) -> None:
    code, out, _ = run("parallel", TRACE, "--gpus", "2")
    assert code == 0
    for words in ("on 2 GPUs", "over data parallelism", "measured curves", "(exact)", "The layer-wise plan", "owt"):
        assert words in out


def test_a_slow_plan_leaves_the_digits_of_the_others() -> None:
    assert _times([11.75e6, 14.5e6, 999e6]) == ["11.750 ms", "14.500 ms", "999.000 ms"]
    assert _times([11.75e6, 14.5e6, 42.204e9]) == ["11.75 ms", "14.5 ms", "42.2 s"]
    assert _times([0.0, 0.0]) == ["0 ns", "0 ns"]


def test_a_written_plan_can_be_compared(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    assert run("parallel", TRACE, "--gpus", "2", "-o", file)[0] == 0
    found = json.loads(run("parallel", TRACE, "--gpus", "2", "--plan", file, "--json")[1])
    steps = {plan["plan"]: plan["step_ns"] for plan in found["plans"]}
    assert steps["mine"] == steps["layer"]


def test_a_file_replaces_neither_the_baseline_nor_the_result(run: Run, plain: str, tmp_path: Path) -> None:
    """Files named after plans: all layers by channels is slower than data parallelism here, and not what is written."""
    layers = [{"name": f"features.{number}", "c": 2} for number in (0, 2, 5, 7)]
    document = {"schema": "gpusim-parallel-plan/1", "network": TRACE, "gpus": 2, "layers": layers}
    for name in ("data", "layer"):
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    words = ("parallel", TRACE, "--gpus", "2", "--json")
    files = (tmp_path / "data.json", "--plan", tmp_path / "layer.json")
    found = json.loads(run(*words, "--plan", *files, "-o", tmp_path / "out.json")[1])
    steps = {plan["plan"]: plan["step_ns"] for plan in found["plans"]}
    assert list(steps) == ["data", "model", "owt", "data (file)", "layer (file)", "layer"]
    assert steps["data"] == json.loads(plain)["plans"][0]["step_ns"] < steps["data (file)"] == steps["layer (file)"]
    written = json.loads((tmp_path / "out.json").read_text())
    assert {x["name"]: x.get("c", 1) for x in written["layers"]} == {x["name"]: x["c"] for x in found["layers"]}


def test_notes_on_a_given_plan_are_shown(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"schema": "gpusim-parallel-plan/1", "network": "other", "gpus": 2}))
    found = json.loads(run("parallel", TRACE, "--gpus", "2", "--plan", file, "--json")[1])
    assert found["notes"] == [f"plan mine: made for other, not for {TRACE}"]


def test_a_layer_without_a_rule_is_on_every_gpu(run: Run) -> None:
    found = json.loads(run("parallel", "decoder_small-infer-b1-bf16", "--gpus", "2", "--json")[1])
    assert {layer["devices"] for layer in found["layers"] if layer["replicated"]} == {2}


def test_links_of_other_gpus_are_said(run: Run) -> None:
    found = json.loads(run("parallel", TRACE, "--gpus", "2", "--topology", "p100", "--json")[1])
    assert found["notes"] == ["topology p100 is of p100 GPUs; computation is that of h200"]


def test_long_names_of_links_and_their_gpus_are_shortened(run: Run, tmp_path: Path) -> None:
    named = msgspec.structs.replace(load_topology("p100"), name="l" * 3000, hardware="h" * 3000)
    file = tmp_path / "long.json"
    write_document(file, named)
    shown = "".join(run("parallel", TRACE, "--gpus", "2", "--topology", file)[1].split())
    assert shown.count("...(3,000characters)") == 3, "in the line on communication, and twice in a note"
    assert "l" * 201 not in shown
    assert "h" * 201 not in shown


def test_equal_questions_have_equal_answers(run: Run, plain: str) -> None:
    assert run("parallel", TRACE, "--gpus", "2", "--json") == (0, plain, "")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--gpus", "0"), "--gpus 0: a whole number between 1 and 1024"),
        (("--gpus", "2000"), "--gpus 2000: a whole number between 1 and 1024"),
        (("--gpus", "32", "--topology", "p100"), "p100: $.nodes: has 4 x 4 = 16 GPUs, and 32 are asked for"),
        (("--gpus", "2", "--topology", "h2000"), "unknown topology 'h2000'"),
        (("--gpus", "2", "--topology", "gone.json"), "gone.json"),
        (("--gpus", "2", "--plan", "gone.json"), "gone.json"),
        (("--gpus", "2", "--batch-norm", "global"), "unknown batch norm 'global'"),
        (("--gpus", "2", "--by", "luck"), "unknown objective 'luck'"),
        (("--gpus", "2", "--memory", "1KiB"), "--memory 1 KiB: no plan fits"),
        (("--gpus", "2", "--memory", "much"), "--memory much: a size such as 8GiB"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run: Run, words: tuple[str, ...], line: str) -> None:
    code, out, err = run("parallel", TRACE, *words)
    assert (code, out) == (2, "")
    assert line in err
    assert len(err.strip().splitlines()) == 1


def test_a_topology_without_a_link_is_refused_with_its_file(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "links.json"
    link = {"bytes_per_ns": 100.0, "latency_ns": 1000.0, "source": "made up"}
    document = {"schema": "gpusim-topology/1", "name": "links", "hardware": "h200", "nodes": 2, "gpus_per_node": 2}
    file.write_text(json.dumps({**document, "links": {"node": link}}))
    assert run("parallel", TRACE, "--gpus", "2", "--topology", file, "--json")[0] == 0
    code, _, err = run("parallel", TRACE, "--gpus", "4", "--topology", file)
    assert code == 2
    assert f"{file}: $.links.network: has no link between nodes" in err


def test_python_has_the_same_answer_and_the_same_errors() -> None:
    step = gpusim.load(TRACE)
    found = gpusim.parallel(step, gpus=2)
    assert found.best.step_ns <= found.plan("data").step_ns
    assert len(repr(found)) < 200
    assert "<table>" in found._repr_html_()
    with pytest.raises(OptionError, match=r"gpus=2\.5"):
        gpusim.parallel(step, gpus=2.5)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"plans=plan\.json: a list of paths"):
        gpusim.parallel(step, gpus=2, plans="plan.json")
    with pytest.raises(TopologyError):
        gpusim.parallel(step, gpus=32, topology="p100")
    with pytest.raises(UnknownNameError):
        gpusim.parallel(step, gpus=2, by="luck")


def test_figure_has_a_row_for_each_layer(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    assert run("parallel", TRACE, "--gpus", "4", "--html", page)[0] == 0
    text = page.read_text()
    assert "Part of each layer on each GPU" in text
    assert "classifier.0" in text
