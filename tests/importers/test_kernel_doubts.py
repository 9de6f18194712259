"""Doubts about imported kernels: slowed ones, ones without sizes, and estimated ones; the verdict allows for them."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

import gpusim
from gpusim.api.other_tools import export
from gpusim.cli import cli
from gpusim.formats.trace import Trace
from gpusim.importers import examine, import_files
from gpusim.importers.build import Imported
from gpusim.importers.to_trace import slowed_kernels
from gpusim.report.advice import headline
from gpusim.report.doctor_text import imported_lines
from gpusim.report.summary import summarize
from gpusim.search.explored import Explored
from gpusim.search.verdict import UNKNOWN_WAY
from gpusim.trace.kernel_doubts import MAX_CONCURRENT_FRAC, slowed_frac, unsized_frac
from gpusim.trace.store import write_trace
from tests.support.helpers import GPU, wide_trace

POLICY, STREAMS = "critical_path", 4


def wide() -> Trace:
    """Return a step of six branches that gain much from streams."""
    return wide_trace(depth=4)


def exported(
    folder: Path, kinds: tuple[str, ...], policy: str = POLICY, *, alone: bool = True, trace: Trace | None = None
) -> list[str]:
    """Write a timeline of the wide step; without `alone`, as a profiler that knows no times alone writes it."""
    paths = {kind: folder / f"{kind}.json" for kind in kinds}
    simulated = gpusim.simulate(gpusim.load(trace or wide()), policy, streams=STREAMS)
    export(simulated, paths)
    if not alone:
        paths["kineto"].write_text(paths["kineto"].read_text().replace("alone (us)", "other (us)"))
    return [str(path) for path in paths.values()]


def profile(folder: Path, policy: str = POLICY, *, alone: bool = True) -> Imported:
    return import_files(exported(folder, ("kineto", "execution_trace"), policy, alone=alone))


def explored(trace: Trace) -> Explored:
    return gpusim.explore(gpusim.load(trace, "h200"), streams=STREAMS, budget_s=60, evaluations=16)


def codes(imported: Imported) -> list[str]:
    return [finding.code for finding in imported.findings]


def test_import_itself_says_that_concurrent_kernels_took_longer_than_alone(tmp_path: Path) -> None:
    files = exported(tmp_path, ("kineto", "execution_trace"), alone=False)
    result = CliRunner().invoke(cli, ["import", *files, "-o", str(tmp_path / "t.json"), "--json"])
    assert [finding["code"] for finding in json.loads(result.stdout)["findings"]] == ["slowed-kernels"]
    examined = examine([str(tmp_path / "t.json")])
    assert "slowed-kernels" in [finding.code for finding in examined.findings]


def test_step_with_times_alone_or_on_one_stream_is_not_in_doubt(tmp_path: Path) -> None:
    for imported in (profile(tmp_path), profile(tmp_path, "sequential", alone=False)):
        assert "slowed-kernels" not in codes(imported)
        assert slowed_frac(imported.trace) == 0
        assert explored(imported.trace).verdict.worth_it


def test_verdict_on_slowed_kernels_is_unknown_and_says_why(tmp_path: Path) -> None:
    trace = profile(tmp_path, alone=False).trace
    found = explored(trace)
    verdict = found.verdict
    assert verdict.unknown
    assert not verdict.worth_it
    assert verdict.low < 1 < verdict.speedup
    assert f"up to {slowed_frac(trace):.0%} of the sequential time is in doubt: profile the step on one" in verdict.text
    assert verdict.rows[-1].advice == UNKNOWN_WAY
    assert headline(summarize(found), calibrated=True).startswith("Unknown. ")


def test_doubt_is_what_the_sum_of_the_times_has_beyond_the_busy_time(tmp_path: Path) -> None:
    trace = profile(tmp_path, alone=False).trace
    source = trace.provenance.imported_from
    assert source is not None
    summed_ns = sum(kernel.dur_ns for op in trace.ops for kernel in op.kernels)
    assert 0 < slowed_frac(trace) == pytest.approx(1 - source.busy_ns / summed_ns)
    few = msgspec.structs.replace(source, concurrent_ns=int(MAX_CONCURRENT_FRAC * source.busy_ns))
    provenance = msgspec.structs.replace(trace.provenance, imported_from=few)
    assert slowed_frac(msgspec.structs.replace(trace, provenance=provenance)) == 0


def test_verdict_on_kernels_without_launch_sizes_is_unknown_and_says_why(tmp_path: Path) -> None:
    imported = import_files(exported(tmp_path, ("chakra",), "sequential"), gpu=GPU)
    verdict = explored(imported.trace).verdict
    assert unsized_frac(imported.trace) == 1
    assert verdict.unknown
    assert verdict.low < 1 < verdict.speedup
    assert "The launch sizes of 100% of its kernel time are unknown" in verdict.text


@pytest.mark.parametrize("kinds", [("kineto", "execution_trace"), ("chakra",)])
def test_export_of_estimated_kernels_is_imported_as_an_estimate(kinds: tuple[str, ...], tmp_path: Path) -> None:
    provenance = msgspec.structs.replace(wide().provenance, estimated="tensor sizes")
    files = exported(tmp_path, kinds, trace=msgspec.structs.replace(wide(), provenance=provenance))
    imported = import_files(files, gpu=GPU)
    assert imported.trace.provenance.estimated == "tensor sizes"
    assert "estimated" in codes(imported)
    assert "The kernels are estimated" in explored(imported.trace).verdict.text
    write_trace(imported.trace, tmp_path / "t.json")
    assert "estimated" in [finding.code for finding in examine([str(tmp_path / "t.json")]).findings]
    assert "estimated" not in codes(import_files(exported(tmp_path, kinds), gpu=GPU))


@pytest.mark.parametrize("kinds", [("kineto",), ("chakra",)])
def test_step_of_gpusims_own_export_is_said_to_be_predicted_and_another_observed(
    kinds: tuple[str, ...], tmp_path: Path
) -> None:
    files = exported(tmp_path, kinds)
    ours = "\n".join(imported_lines(import_files(files)))
    assert "  as predicted  " in ours
    assert "as observed" not in ours
    path = Path(files[0])
    path.write_bytes(path.read_bytes().replace(b"simulated", b"profilers"))
    others = "\n".join(imported_lines(import_files(files)))
    assert "  as observed   " in others
    assert "gpusim" not in others


def test_doubts_are_only_of_imported_traces_and_stay_in_a_written_one(tmp_path: Path) -> None:
    assert (slowed_frac(wide()), unsized_frac(wide())) == (0, 0)
    trace = profile(tmp_path, alone=False).trace
    write_trace(trace, tmp_path / "t.json")
    assert slowed_frac(gpusim.load(tmp_path / "t.json").trace) == slowed_frac(trace) > 0


@pytest.mark.parametrize("kinds", [("kineto", "execution_trace"), ("chakra",)])
def test_doubt_outlives_an_export_and_its_import(kinds: tuple[str, ...], tmp_path: Path) -> None:
    """The export has the slowed times as if they were alone, on one stream."""
    trace = profile(tmp_path, alone=False).trace
    (tmp_path / "again").mkdir()
    again = import_files(exported(tmp_path / "again", kinds, "sequential", trace=trace), gpu=GPU).trace
    assert slowed_frac(again) == pytest.approx(slowed_frac(trace), abs=1e-6)
    assert explored(again).verdict.unknown
    (finding,) = slowed_kernels(again)
    assert finding.text.startswith(f"up to {slowed_frac(trace):.0%} of the kernels' time is in doubt, by the profile")


def test_doubt_of_a_file_without_times_is_said(tmp_path: Path) -> None:
    trace = profile(tmp_path, alone=False).trace
    source = trace.provenance.imported_from
    assert source is not None
    without = msgspec.structs.replace(source, busy_ns=0, concurrent_ns=0, slowed_frac=0.5)
    provenance = msgspec.structs.replace(trace.provenance, imported_from=without)
    (finding,) = slowed_kernels(msgspec.structs.replace(trace, provenance=provenance))
    assert "up to 50% of the kernels' time is in doubt" in finding.text


def test_a_copy_beside_kernels_slows_none(tmp_path: Path) -> None:
    trace = profile(tmp_path, alone=False).trace
    source = trace.provenance.imported_from
    assert source is not None
    summed_ns = sum(kernel.dur_ns for op in trace.ops for kernel in op.kernels)
    beside = msgspec.structs.replace(source, busy_ns=summed_ns, concurrent_ns=summed_ns // 2)
    provenance = msgspec.structs.replace(trace.provenance, imported_from=beside)
    assert slowed_frac(msgspec.structs.replace(trace, provenance=provenance)) == 0
