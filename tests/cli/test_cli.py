"""The command line as a user and a script meet it: help, JSON, files, refusals. Everything without a GPU."""

from __future__ import annotations

import errno
import gzip
import json
import os
import resource
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gpusim.cli import cli, main
from gpusim.formats.hardware import bundled_hardware, load_hardware
from gpusim.formats.schedule import read_schedule_document
from gpusim.io.file_limits import MAX_STREAMS
from gpusim.io.files import write_bytes
from gpusim.trace.store import write_trace
from tests.support.helpers import chain_trace, wide_trace

ROOT = Path(__file__).parents[2]
COMMANDS = ("explore", "simulate", "capture", "replay", "calibrate", "validate", "traces", "hardware")
QUICK = ("--budget", "0.05")


class Done(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command line in this process."""

    def call(*arguments: str | Path) -> Done:
        monkeypatch.setattr(sys, "argv", ["gpusim", *map(str, arguments)])
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as exited:
            code = int(exited.code or 0)
        return Done(code, *capsys.readouterr())

    return call


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace that gains from streams."""
    path = tmp_path_factory.mktemp("traces") / "wide.json.gz"
    write_trace(wide_trace(eager_ns=400_000, graph_ns=130_000), path)
    return path


def refused(done: Done) -> str:
    """Return the single line of a refused command."""
    assert (done.code, done.out) == (2, ""), done
    assert done.err.count("\n") == 1, done.err
    assert done.err.startswith("gpusim: ")
    assert "Traceback" not in done.err
    return done.err


def document(done: Done) -> dict[str, Any]:
    """Return the JSON document on standard output of a successful command."""
    assert done.code == 0, done
    found: dict[str, Any] = json.loads(done.out)
    return found


def times(value: Any, key: str = "") -> list[tuple[str, Any]]:
    """Return all values with a key that marks times."""
    if isinstance(value, dict):
        return [pair for name, part in value.items() for pair in times(part, name)]
    if isinstance(value, list):
        return [pair for part in value for pair in times(part, key)]
    return [(key, value)] if key.endswith("_ns") else []


# --- Help ---


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, run: Run) -> None:
    done = run(command, "--help")
    assert (done.code, done.err) == (0, "")
    assert f"gpusim {command} [OPTIONS]" in done.out.splitlines()[0]
    assert run(command, "-h").out == done.out


def test_commands_are_those_of_the_contract() -> None:
    assert set(COMMANDS) <= set(cli.commands)


def test_help_and_version_of_the_program(run: Run) -> None:
    assert all(f"\n  {command} " in run("--help").out for command in COMMANDS)
    assert run() == run("--help")
    assert run("--version").out.startswith("gpusim, version ")


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("explore", "--hw --streams --budget --seed -o --json"),
        ("simulate", "--hw --policy --streams --schedule --engine --perfetto --json"),
        ("capture", "--mode --batch --dtype --memory-format --frontend -o"),
        ("replay", "--trace --schedule --policy --streams -o --json"),
        ("calibrate", "-o"),
        ("validate", "-o"),
        ("traces", "--json"),
        ("hardware", "--json"),
    ],
)
def test_options_are_those_of_the_contract(command: str, options: str) -> None:
    """Names and flags may be added, never renamed (design, section 2)."""
    found = {name for parameter in cli.commands[command].params for name in parameter.opts}
    assert set(options.split()) <= found


# --- The main job ---


def test_explore_prints_one_json_document_with_the_keys_of_the_contract(trace: Path, run: Run) -> None:
    found = document(run("explore", trace, *QUICK, "--streams", "4", "--json"))
    assert {"trace", "hardware", "results", "best", "bounds", "verdict"} <= set(found)
    for row in (*found["results"], found["best"]):
        assert {"policy", "streams", "makespan_ns", "speedup"} <= set(row)
    assert {"critical_path_ns", "area_ns", "bandwidth_ns"} <= set(found["bounds"])
    assert {"worth_it", "text"} <= set(found["verdict"])
    assert {row["policy"] for row in found["results"]} >= {"sequential", "wavefront", "round_robin", "critical_path"}
    assert found["best"]["speedup"] > 1.5
    assert found["verdict"]["worth_it"] is True
    assert found["attribution"]["eager_ns"] == 400_000
    assert times(found)
    assert all(type(value) is int for _, value in times(found)), times(found)


def test_simulate_prints_one_json_document_with_the_keys_of_the_contract(trace: Path, run: Run) -> None:
    found = document(run("simulate", trace, "--policy", "wavefront", "--streams", "3", "--json"))
    wanted = {"trace", "hardware", "policy", "streams", "makespan_ns", "sequential_ns", "speedup", "bounds"}
    assert wanted <= set(found)
    assert {"critical_path_ns", "area_ns", "bandwidth_ns"} <= set(found["bounds"])
    assert (found["policy"], found["streams"]) == ("wavefront", 3)
    assert found["speedup"] == pytest.approx(found["sequential_ns"] / found["makespan_ns"])
    assert all(type(value) is int for _, value in times(found))


@pytest.mark.parametrize("arguments", [("explore", *QUICK), ("simulate",), ("simulate", "--launch", "stream")])
def test_same_command_prints_a_table_for_people(arguments: tuple[str, ...], trace: Path, run: Run) -> None:
    done = run(arguments[0], trace, *arguments[1:])
    assert (done.code, done.err) == (0, "")
    assert "tiny-infer-b1" in done.out
    assert "bound" in done.out.lower()


def test_eager_time_says_which_gpu_it_was_measured_on(trace: Path, run: Run) -> None:
    """Otherwise, next to a prediction for another GPU, it would be read as that GPU's time."""
    assert "400 us measured at the capture on NVIDIA H200" in run("simulate", trace, "--hw", "v100").out


def test_explored_schedule_simulates_to_what_explore_predicted(trace: Path, tmp_path: Path, run: Run) -> None:
    schedule = tmp_path / "best.json"
    best = document(run("explore", trace, *QUICK, "-o", schedule, "--json"))["best"]
    found = document(run("simulate", trace, "--schedule", schedule, "--json"))
    assert found["makespan_ns"] == read_schedule_document(schedule).predicted_ns == best["makespan_ns"]
    assert found["policy"] == best["policy"]


def test_explore_says_where_it_wrote_the_schedule(trace: Path, tmp_path: Path, run: Run) -> None:
    schedule = tmp_path / "best.json"
    assert f"schedule written to {schedule}" in run("explore", trace, *QUICK, "-o", schedule).out.replace("\n", "")


def test_step_with_nothing_to_win_keeps_the_sequential_schedule(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "chain.json"
    write_trace(chain_trace(), path)
    found = document(run("explore", path, *QUICK, "--json"))
    assert (found["best"]["policy"], found["verdict"]["worth_it"]) == ("sequential", False)


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_perfetto_file_holds_the_timeline(name: str, trace: Path, tmp_path: Path, run: Run) -> None:
    path = tmp_path / name
    assert document(run("simulate", trace, "--perfetto", path, "--json"))
    data = path.read_bytes()
    text = gzip.decompress(data) if name.endswith(".gz") else data
    slices = [event for event in json.loads(text)["traceEvents"] if event["ph"] == "X" and event["cat"] == "kernel"]
    assert len(slices) == 14


def test_single_stream_is_the_sequential_graph(trace: Path, run: Run) -> None:
    found = document(run("simulate", trace, "--streams", "1", "--json"))
    assert found["makespan_ns"] == found["sequential_ns"]


def test_seed_and_stream_limits_are_accepted(trace: Path, run: Run) -> None:
    assert document(run("simulate", trace, "--streams", MAX_STREAMS, "--json"))
    assert document(run("explore", trace, *QUICK, "--seed", "7", "--json"))["search"]["seed"] == 7


# --- Hardware that was never measured ---


@pytest.mark.parametrize("name", sorted(bundled_hardware()))
def test_uncalibrated_hardware_is_marked_in_every_output(name: str, trace: Path, run: Run) -> None:
    calibrated = load_hardware(name).calibrated
    for command in (("explore", *QUICK), ("simulate",)):
        arguments = (command[0], trace, *command[1:], "--hw", name)
        found = document(run(*arguments, "--json"))
        assert found["calibrated"] is calibrated
        assert ("uncalibrated" in found["hardware"]) is not calibrated
        assert ("uncalibrated" in run(*arguments).out) is not calibrated


def test_hardware_lists_what_is_bundled(run: Run) -> None:
    found = document(run("hardware", "--json"))["hardware"]
    assert {model["name"] for model in found} == set(bundled_hardware())
    assert {model["name"] for model in found if model["calibrated"]} == {"h200"}
    table = run("hardware").out
    assert all(name in table for name in bundled_hardware())
    assert table.count("no: data sheet only") == len(found) - 1


def test_traces_lists_what_is_bundled(run: Run) -> None:
    assert isinstance(document(run("traces", "--json"))["traces"], list)
    assert run("traces").code == 0


# --- Refusals: one line, exit code 2, nothing written ---


@pytest.mark.parametrize("streams", ["0", "-1", str(MAX_STREAMS + 1)])
@pytest.mark.parametrize("command", ["explore", "simulate", "replay"])
def test_stream_count_out_of_range(command: str, streams: str, trace: Path, run: Run) -> None:
    given = ("--trace", trace, "--policy", "wavefront") if command == "replay" else (trace,)
    text = refused(run(command, *given, "--streams", streams))
    assert text == f"gpusim: --streams {streams}: the number of streams lies between 1 and {MAX_STREAMS}\n"


@pytest.mark.parametrize("budget", ["0", "-1", "nan", "inf", "-inf", "1e9"])
def test_budget_out_of_range(budget: str, trace: Path, run: Run) -> None:
    assert f"--budget {float(budget)}: " in refused(run("explore", trace, "--budget", budget))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--policy", "wavefrnt"), "unknown policy 'wavefrnt'; did you mean 'wavefront'?"),
        (("--hw", "h20"), "unknown hardware 'h20'; did you mean 'h200'?"),
        (("--hw", "H100"), "unknown hardware 'H100'; did you mean 'h100-sxm'?"),  # the beginning, not 'v100'
        (("--engine", "refrence"), "unknown engine 'refrence'; did you mean 'reference'?"),
        (("--launch", "graf"), "unknown launch mode 'graf'; did you mean 'graph'?"),
    ],
)
def test_unknown_name_suggests_the_nearest(arguments: tuple[str, ...], complaint: str, trace: Path, run: Run) -> None:
    text = refused(run("simulate", trace, *arguments))
    assert complaint in text
    assert "(there are: " in text


@pytest.mark.parametrize(
    ("option", "value", "nearest"),
    [
        ("--mode", "trian", "train"),
        ("--dtype", "fp23", "fp32"),
        ("--memory-format", "channel_last", "channels_last"),
        ("--frontend", "inducter", "inductor"),
    ],
)
def test_unknown_word_of_capture_suggests_the_nearest(option: str, value: str, nearest: str, run: Run) -> None:
    options = {"--mode": "infer", "--batch": "1", "-o": "t.json"} | {option: value}
    text = refused(run("capture", "m.py:f", *(word for pair in options.items() for word in pair)))
    assert f"'{value}'; did you mean '{nearest}'?" in text


def test_explain_says_in_words_that_nothing_was_lost(tmp_path: Path, run: Run) -> None:
    """Not by the heads of empty tables."""
    chain = tmp_path / "chain.json"
    write_trace(chain_trace(3, dur_ns=10_000), chain)
    for window in ((), ("--window", "5us:6us")):
        printed = run("explain", chain, "--policy", "sequential", *window).out
        assert "delayed" in printed
        assert "cause" not in printed
        assert "Longest delays" not in printed


def test_missing_files_are_named(trace: Path, tmp_path: Path, run: Run) -> None:
    missing = tmp_path / "missing.json"
    assert f"{missing}: cannot be read: No such file" in refused(run("simulate", missing))
    assert f"{missing}: cannot be read: No such file" in refused(run("simulate", trace, "--schedule", missing))
    assert f"{missing}: cannot be read: No such file" in refused(run("simulate", trace, "--hw", missing))
    assert "unknown trace 'googlenett'" in refused(run("explore", "googlenett"))


def test_schedule_of_another_trace_is_refused(trace: Path, tmp_path: Path, run: Run) -> None:
    schedule, other = tmp_path / "best.json", tmp_path / "other.json"
    write_trace(chain_trace(), other)
    run("explore", trace, *QUICK, "-o", schedule)
    text = refused(run("simulate", other, "--schedule", schedule))
    assert f"{schedule}: $.trace_hash: is a schedule of another trace" in text


def test_options_that_exclude_each_other(trace: Path, tmp_path: Path, run: Run) -> None:
    schedule = tmp_path / "s.json"
    refused(run("simulate", trace, "--schedule", schedule, "--policy", "wavefront"))
    refused(run("simulate", trace, "--schedule", schedule, "--streams", "2"))
    assert "one of --schedule FILE, --policy P and --memory-plan FILE" in refused(run("replay", "--trace", trace))
    refused(run("replay", "--trace", trace, "--schedule", schedule, "--policy", "wavefront"))


@pytest.mark.parametrize(
    "arguments",
    [
        ("simulate",),
        ("explore", "t.json", "--streams", "many"),
        ("explore", "t.json", "--seed", "-1"),
        ("capture", "m.py:f", "--mode", "infer", "--batch", "0", "-o", "t.json"),
        ("capture", "m.py:f", "--mode", "infer", "-o", "t.json"),
        ("explroe", "t.json"),
        ("explore", "t.json", "--speed", "3"),
    ],
)
def test_words_that_do_not_parse_exit_with_2_and_say_which(arguments: tuple[str, ...], run: Run) -> None:
    done = run(*arguments)
    assert (done.code, done.out) == (2, "")
    [line] = done.err.splitlines()
    assert line.startswith("gpusim: ")


# --- Output files ---

WRITERS = [
    ("explore", *QUICK, "-o"),
    ("simulate", "--perfetto"),
]


@pytest.mark.parametrize("writer", WRITERS, ids=["explore", "simulate"])
def test_output_that_cannot_be_written_is_refused_before_the_work(
    writer: tuple[str, ...], trace: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trace does not exist, so an error about the output shows that the output is checked first."""
    command, *options = writer
    missing = tmp_path / "no" / "out.json"
    assert f"{missing}: cannot be written: there is no folder" in refused(
        run(command, "missing.json", *options, missing)
    )
    assert "it is a folder" in refused(run(command, "missing.json", *options, tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    target = tmp_path / "out.json"
    assert f"{target}: cannot be written: no permission" in refused(run(command, "missing.json", *options, target))
    assert not list(tmp_path.iterdir())


def test_output_that_the_command_line_names_twice_is_refused(trace: Path, tmp_path: Path, run: Run) -> None:
    """It would replace the input, or the other output. Devices take both, and names of what is bundled are no files."""
    data, link = trace.read_bytes(), tmp_path / "link.json"
    link.symlink_to(trace)
    twice = "cannot be written: the command line names this file twice"
    for output in (trace, link, trace.parent / "." / trace.name):
        assert twice in refused(run("explore", trace, *QUICK, "-o", output))
    both = tmp_path / "both.json"
    assert twice in refused(run("simulate", trace, "--perfetto", both, "--html", both))
    model = tmp_path / "model.py"
    assert twice in refused(run("capture", f"{model}:make", "--mode", "infer", "--batch", "1", "-o", model))
    assert trace.read_bytes() == data
    assert [path.name for path in tmp_path.iterdir()] == [link.name]
    assert run("export", trace, "--kineto", os.devnull, "--execution-trace", os.devnull).code == 0


@pytest.mark.parametrize("writer", WRITERS, ids=["explore", "simulate"])
def test_full_disk_leaves_nothing_half_written(
    writer: tuple[str, ...], trace: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out.json"

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        text = refused(run(writer[0], trace, *writer[1:], target))
    assert text == f"gpusim: {target}: cannot be written: No space left on device\n"
    assert not list(tmp_path.iterdir())
    target.write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        refused(run(writer[0], trace, *writer[1:], target))
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_pipe_is_written_to_and_stays_a_pipe(trace: Path, tmp_path: Path) -> None:
    """A rename would replace the device by a file, as with `-o /dev/stdout`."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_bytes(pipe, b"schedule")
    assert (os.read(reader, 100), pipe.is_fifo()) == (b"schedule", True)
    os.close(reader)
    assert [path.name for path in tmp_path.iterdir() if path != trace] == ["pipe"]


# --- In a process of its own ---


def gpusim(*arguments: str | Path, before: Callable[[], None] | None = None, code: str = "") -> Done:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    program = ["-c", code] if code else ["-m", "gpusim"]
    command = [sys.executable, *program, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, preexec_fn=before)
    return Done(done.returncode, done.stdout, done.stderr)


def test_write_that_really_fails_half_way_leaves_nothing(trace: Path, tmp_path: Path) -> None:
    """The system refuses files beyond 200 bytes, whose first half is then on disk."""
    target = tmp_path / "out.json"

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))

    text = refused(gpusim("explore", trace, *QUICK, "-o", target, before=limit))
    assert text == f"gpusim: {target}: cannot be written: File too large\n"
    assert not list(tmp_path.iterdir())


def test_json_is_alone_on_standard_output(trace: Path) -> None:
    done = gpusim("explore", trace, *QUICK, "--json")
    assert document(done)
    assert done.err == ""


@pytest.mark.parametrize("command", ["capture", "replay", "calibrate", "validate"])
def test_without_torch_the_commands_that_need_it_say_how_to_get_it(command: str, trace: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('name = "r"\n[[case]]\nspec = "torchvision:resnet18"\nmode = "infer"\nbatch = 1\n')
    arguments: dict[str, tuple[str | Path, ...]] = {
        "capture": ("m.py:f", "--mode", "infer", "--batch", "1", "-o", tmp_path / "t.json"),
        "replay": ("--trace", tmp_path / "allowed.json", "--policy", "wavefront"),
        "calibrate": ("-o", tmp_path / "h.json"),
        "validate": (recipe,),
    }
    text = trace.read_bytes()
    (tmp_path / "allowed.json").write_bytes(gzip.decompress(text).replace(b"aten.test.default", b"aten.relu.default"))
    code = "import sys; sys.modules['torch'] = None; from gpusim.cli import main; main()"
    text_of_error = refused(gpusim(command, *arguments[command], code=code))
    assert text_of_error.startswith("gpusim: no GPU: torch is not installed")
    assert "pip install 'gpusim[gpu]'" in text_of_error


def test_without_torch_an_estimate_says_that_it_needs_torch_and_no_gpu(tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from gpusim.cli import main; main()"
    words = ("m.py:f", "--mode", "infer", "--batch", "1", "--estimate", "-o", tmp_path / "t.json")
    assert refused(gpusim("capture", *words, code=code)).startswith("gpusim: torch is not installed, and --estimate")


def test_without_a_gpu_validate_is_one_line_before_anything_is_captured_or_made(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('name = "r"\n[[case]]\nspec = "m.py:f"\nmode = "infer"\nbatch = 1\n')
    code = "import os; os.environ['CUDA_VISIBLE_DEVICES'] = ''; from gpusim.cli import main; main()"
    new = tmp_path / "new" / "results"
    assert refused(gpusim("validate", recipe, "--trust-code", "-o", new, code=code)).startswith("gpusim: no GPU: ")
    assert not new.parent.exists(), "nothing is left of a run that could not begin"


def test_validate_refuses_files_and_folders_before_it_looks_for_a_gpu(tmp_path: Path, run: Run) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('name = "r"\n[[case]]\nspec = "torchvision:resnet18"\nmode = "infer"\nbatch = 1\n')
    for wrong in (recipe, recipe / "results"):
        expected = f"gpusim: {wrong}: cannot be a folder: '{recipe}' is a file"
        assert refused(run("validate", recipe, "-o", wrong)).strip() == expected
    assert "no GPU" not in refused(run("validate", tmp_path / "missing.toml"))


def test_reader_that_goes_away_is_no_error_of_ours() -> None:
    """As in `gpusim hardware --json

    head -1`.
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "gpusim", "hardware", "--json"]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(command, env=environment, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writer)
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 1)


@pytest.mark.parametrize("factor", ["nan", "1e400"])
def test_factor_of_an_op_that_cannot_be_is_refused_by_the_name_of_its_option(
    factor: str, trace: Path, run: Run
) -> None:
    problem = "names of ops, each with a factor above 0"
    assert refused(run("whatif", trace, "--op", "stem", factor)).strip() == f"gpusim: --op {float(factor)}: {problem}"


def test_interrupt_is_one_line(trace: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gpusim.trace.store.read_trace", interrupted)
    done = run("simulate", trace)
    assert (done.code, done.out) == (130, "")
    assert done.err.strip() == "gpusim: interrupted"


def test_interrupt_while_the_command_line_is_imported_is_one_line() -> None:
    code = """
import sys
import tomllib
from importlib.metadata import EntryPoint

class Interrupt:
    def find_spec(self, name, *_):
        if name == "gpusim.cli.limits":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
EntryPoint("gpusim", sys.argv.pop(), "console_scripts").load()()
"""
    installed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["gpusim"]
    assert gpusim(installed, code=code) == Done(130, "", "gpusim: interrupted\n")
