"""Tables at 80, 100 and 120 columns: names and numbers are complete, nothing is wider than the terminal."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpusim.analysis.limits import limits
from gpusim.analysis.whatif import LONGEST_OPS
from gpusim.cli import main
from gpusim.formats.hardware import bundled_hardware
from gpusim.policies.registry import POLICIES
from gpusim.report.fit import print_table
from gpusim.report.limits_table import print_limits
from gpusim.report.terminal import PlainConsole, Table, console
from gpusim.sweep.summary import FOLDED_TRACE
from gpusim.trace.store import bundled_traces, load_trace
from gpusim.units import format_times_ns
from tests.support.helpers import build_graph, make_hardware, wide_trace

WIDTHS = (80, 100, 120)
STEP = "googlenet-train-b8"
#: A number without its end, or an ellipsis of any kind.
CUT = re.compile(r"…|(?<![\w.])[\d,]+\.(?!\d)(?!$|\s)")

Out = Callable[..., str]


@pytest.fixture
def out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Out:
    """Return the piped output of a command at a width given by `COLUMNS`."""

    def call(width: int, *arguments: str | Path) -> str:
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setattr(sys, "argv", ["gpusim", *map(str, arguments)])
        capsys.readouterr()
        main()
        return capsys.readouterr().out

    return call


def whole(text: str, width: int) -> None:
    assert not [line for line in text.splitlines() if CUT.search(line)]
    assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize("width", WIDTHS)
def test_traces_can_be_copied_by_name(width: int, out: Out) -> None:
    text = out(width, "traces")
    whole(text, width)
    assert set(bundled_traces()) <= set(text.split())
    assert ("\n(date" in text) == (width < 120), "dates go first"


@pytest.mark.parametrize("width", WIDTHS)
def test_hardware_can_be_copied_by_name(width: int, out: Out) -> None:
    text = out(width, "hardware")
    whole(text, width)
    assert set(bundled_hardware()) <= set(text.split())
    assert "0.29 TB/s" in text
    assert "15.8 GiB" in text


@pytest.mark.parametrize("width", WIDTHS)
def test_explained_ops_are_whole(width: int, out: Out) -> None:
    text = out(width, "explain", STEP)
    whole(text, width)
    names = {op.name for op in load_trace(STEP).ops}
    rows = [line.split() for line in text.partition("Longest delays")[2].splitlines()[2:]]
    first = [row[0] for row in rows if row[0] in names]
    assert len(first) == 12
    assert " layer " in text, "a layer is a name that users know"
    assert all(re.search(r"\d\d\.\d us", text) for _ in first)


@pytest.mark.parametrize("width", WIDTHS)
def test_policies_and_their_times_are_whole(width: int, out: Out) -> None:
    text = out(width, "explore", "squeezenet1_1-infer-b1", "--evaluations", "32")
    whole(text, width)
    for name in POLICIES:
        if not POLICIES[name].slow:
            assert re.search(rf"(?m)^ {name} +│ +\d+ │ +[\d.]+ us │ +\d\.\d\dx │", text), name
    for way in ("eager", "one CUDA graph"):
        assert re.search(rf"(?m)^ {way} +│ +\d+\.\d{{3}} ms │", text), way


@pytest.mark.parametrize("width", WIDTHS)
def test_simulate_and_whatif_print_numbers_whole(width: int, out: Out) -> None:
    assert not CUT.search(out(width, "simulate", STEP))
    text = out(width, "whatif", STEP)
    assert not CUT.search(text)
    assert len(re.findall(r"speed of \S+ \S+ \(\w+\), 0\.5x to 2x: [\d.]+ ms to [\d.]+ ms", text)) == LONGEST_OPS


@pytest.mark.parametrize("width", WIDTHS)
def test_limits_are_whole(width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    found = limits(build_graph(wide_trace(6, 1_234_567, 2), make_hardware(chain_ns=1_300)), streams=4)
    print_limits(found)
    text = capsys.readouterr().out
    whole(text, width)
    (scope,) = found.scopes
    for time_ns in (scope.sequential_ns, scope.best_ns, scope.parallelism.work_ns, scope.parallelism.span_ns):
        assert format_times_ns([time_ns])[0] in text
    assert f"{scope.speedup:.2f}x" in text


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of results: the first width fills it, the others show what is there."""
    return tmp_path_factory.mktemp("sweep") / "s.sqlite"


@pytest.mark.parametrize("width", WIDTHS)
def test_sweep_keeps_names_of_traces_apart(width: int, store: Path, out: Out) -> None:
    names = ("googlenet-infer-b1", "squeezenet1_1-infer-b1", "vgg16-infer-b1")
    options = [word for name in names for word in ("--trace", name)]
    text = out(
        width, "sweep", *options, "--hw", "h200", "--hw", "a100-80gb", "--policy", "sequential", "--streams", "1",
        "-o", store,
    )  # fmt: skip
    assert not CUT.search(text)
    names_shown = "".join(line.split("│")[0].strip() for line in text.splitlines() if "│" in line)
    assert sorted(re.findall(r".+?-b1", names_shown)) == sorted(names * 2)


def test_sweep_fits_80_columns_with_the_longest_names_and_shares_the_room(tmp_path: Path, out: Out) -> None:
    """Of the bundled traces, on a hardware model that is marked as uncalibrated."""
    name = max(bundled_traces(), key=len)
    text = out(
        80, "sweep", "--trace", name, "--hw", "a100-80gb", "--policy", "critical_path", "--streams", "4",
        "-o", tmp_path / "s.sqlite",
    )  # fmt: skip
    lines = text.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith(" trace"))
    head, _, first, second = lines[begin : begin + 4]
    assert max(map(len, (head, first, second))) <= 80
    assert [column.strip() for column in head.split("┃")] == [
        "trace", "hardware", "best policy", "streams", "predicted", "speed-up",
    ]  # fmt: skip
    cells = [line.split("│")[0].strip() for line in lines[begin + 2 :] if "│" in line]
    assert "".join(cells) == name
    assert len(cells[0]) >= FOLDED_TRACE
    assert lines[-2] == "(points, at most: only in a wider terminal)"


def table(*columns: str, rows: list[list[str]], right: tuple[str, ...] = ()) -> Table:
    found = Table(show_edge=False)
    for column in columns:
        found.add_column(column, justify="right" if column in right else "left")
    for row in rows:
        found.add_row(*row)
    return found


def printed(width: int, made: Table, **options: Any) -> list[str]:
    out = PlainConsole(width=width, record=True, file=io.StringIO())
    print_table(out, made, **options)
    return out.export_text().splitlines()


def test_columns_are_dropped_in_the_order_given_and_only_as_needed() -> None:
    made = table("name", "date", "GPU", rows=[["a" * 20, "2026-11-23", "NVIDIAH200"]])
    assert printed(60, made, drop=("date", "GPU"))[0].split("┃")[1].strip() == "date"
    assert "date" not in printed(40, made, drop=("date", "GPU"))[0]
    assert "GPU" in printed(40, made, drop=("date", "GPU"))[0]
    assert printed(22, made, drop=("date", "GPU"))[0].split() == ["name"]


def test_columns_left_out_are_named_below_the_table() -> None:
    made = table("name", "date", "GPU", rows=[["a" * 20, "2026-11-23", "NVIDIAH200"]])
    assert printed(60, made, drop=("date", "GPU"))[-1].split()[0] == "a" * 20
    assert printed(40, made, drop=("date", "GPU"))[-1] == "(date: only in a wider terminal)"
    assert "".join(printed(22, made, drop=("date", "GPU"))[-2:]) == "(date, GPU: only in a wider terminal)"


def test_folded_column_keeps_the_width_asked_for_before_others_are_left_out() -> None:
    """Both columns take 20 and 10 characters and 7 for lines; in 30, 13 are left for the name."""
    made = table("id", "date", rows=[["long_name_of_20_char", "2026-11-23"]])
    assert "date" in printed(30, made, drop=("date",), fold=("id",), readable=12)[0]
    assert "date" not in printed(30, made, drop=("date",), fold=("id",), readable=20)[0]


def test_share_goes_below_its_number_and_the_number_stays_whole() -> None:
    made = table("", "step", rows=[["+ dependencies", "+205.1 us  75.2%"]], right=("step",))
    lines = printed(28, made)
    assert any("+205.1 us" in line for line in lines)
    assert any(line.endswith(("75.2% ", "75.2%")) for line in lines)


def test_table_that_cannot_be_narrower_is_printed_wider_than_the_terminal() -> None:
    lines = printed(20, table("name", "time", rows=[["n" * 30, "12.345 ms"]], right=("time",)))
    assert any("n" * 30 in line and "12.345 ms" in line for line in lines)


@pytest.mark.parametrize(("given", "wide"), [("80", 80), ("", 120), ("0", 120), ("wide", 120), ("-5", 120)])
def test_piped_output_is_as_wide_as_columns_says(given: str, wide: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", given)
    assert console().width == wide


@pytest.mark.parametrize(
    ("times", "texts"),
    [
        ([5_060_000, 79], ["5.060 ms", "0.000 ms"]),
        ([284_712, 1_200], ["284.7 us", "1.2 us"]),
        ([12, 999], ["12 ns", "999 ns"]),
        ([2_000_000_000, -1_500_000_000], ["2.000 s", "-1.500 s"]),
        ([], []),
    ],
)
def test_times_of_a_table_have_one_unit_and_fixed_decimals(times: list[int], texts: list[str]) -> None:
    assert format_times_ns(times) == texts
    assert format_times_ns([1_000_000, -1], signed=True) == ["+1.000 ms", "-0.000 ms"]
