"""Recipes with ablations: a case optimized in full and with one freedom less each time, stored and resumed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from click.testing import CliRunner

from gpusim.cli import cli
from gpusim.errors import CaptureError, MeasurementError, RecipeError
from gpusim.formats.results import Ablation, read_all_results, read_results
from gpusim.gpu.optimize import ablations
from gpusim.gpu.optimize import measure as measuring
from gpusim.gpu.optimize.ablations import ablate
from gpusim.gpu.optimize.measure import Asked, Measured
from gpusim.validation import optimized as running
from gpusim.validation.optimized import optimize_cases
from gpusim.validation.recipe import read_recipe
from tests.repo.test_readme import script
from tests.support.optimizing import fast
from tests.validation.test_optimized import asking, itself, measured, on_cpu, recipe_file, timing

ROOT = Path(__file__).parents[2]
ABLATIONS = """
name = "less"
ablations = ["aten", "one_stream"]
[[case]]
spec = "torchvision:googlenet"
mode = "infer"
batch = 1
"""


@pytest.mark.parametrize(
    ("old", "new", "place", "problem"),
    [
        ("[[case]]", 'against = ["eager"]\n[[case]]', "$.ablations", "one of both"),
        ('"one_stream"', '"aten"', "$.ablations", "twice"),
        ('"one_stream"', '"no_luck"', "$.ablations[1]", "no_luck"),
        (ABLATIONS.partition("[[case]]\n")[2], 'trace = "googlenet-train-b8"', "$.case[0]", "'ablations' optimizes"),
    ],
)
def test_ablations_that_make_no_sense_are_refused(old: str, new: str, place: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=problem) as caught:
        read_recipe(recipe_file(tmp_path, ABLATIONS.replace(old, new)))
    assert caught.value.place == place


def test_a_recipe_of_ablations_has_no_stages_and_takes_a_time_limit(tmp_path: Path) -> None:
    path = recipe_file(tmp_path, ABLATIONS)
    found = CliRunner().invoke(
        cli, ["validate", str(path), "-o", str(tmp_path), "--stage", "predict", "--seconds", "9"]
    )
    assert found.exit_code != 0
    assert "a recipe that optimizes has no stages" in str(found.exception) + found.output
    path = recipe_file(tmp_path, ABLATIONS.replace('ablations = ["aten", "one_stream"]', ""))
    found = CliRunner().invoke(
        cli, ["validate", str(path), "-o", str(tmp_path), "--stage", "predict", "--seconds", "9"]
    )
    assert "only a recipe with 'against' or 'ablations'" in str(found.exception) + found.output


def test_the_committed_recipe_of_ablations_takes_every_freedom_from_six_steps_of_the_other_recipe() -> None:
    recipe, other = (read_recipe(ROOT / "validate" / f"{name}.toml") for name in ("kernels", "compile"))
    assert recipe.ablations == get_args(Ablation)
    assert (recipe.streams, recipe.budget_s, recipe.seed) == (other.streams, other.budget_s, other.seed)
    assert len(recipe.case) == 6
    assert set(recipe.case) <= {msgspec.structs.replace(case, against=()) for case in other.case}


def lacking(ablation: Ablation | None, **changes: Any) -> Measured:
    """Measurements of the step in full, 400 us, or of an ablation, 500 us, as `ablate` keeps them."""
    full = timing(400_000)
    peers = {"eager": timing(4_000_000)} if ablation is None else {"eager": timing(4_000_000), "optimize": full}
    optimized = full if ablation is None else timing(500_000)
    without = replace(measured(), ablation=ablation, optimized=optimized, peers=peers, peer_bytes={}, deviations={})
    return replace(without, **changes)


def keeps(*ablations: Ablation | None, asked: list[Asked] | None = None, **changes: Any) -> Any:
    """Stand-in for a process that keeps these."""

    def run(work: Any, each: Asked, keep: Any) -> None:
        assert work is ablate
        if asked is not None:
            asked.append(each)
        for ablation in ablations:
            keep(lacking(ablation, **changes))

    return run


def test_each_ablation_has_a_row_with_the_step_in_full_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, lines = read_recipe(recipe_file(tmp_path, ABLATIONS)), list[str]()
    asked: list[Asked] = []
    monkeypatch.setattr(running, "alone", keeps(None, "aten", "one_stream", None, "aten", "one_stream", asked=asked))
    results = optimize_cases(recipe, recipe.case, tmp_path / "out", "c", lines.append)
    assert [(each.ablations, each.peers, each.further) for each in asked] == [(("aten", "one_stream"), (), ())]
    assert [(row.policy, row.ablation) for row in results.cases] == [
        ("optimize", None),
        ("optimize", "aten"),
        ("optimize", "one_stream"),
    ]
    full, aten, _ = results.cases
    assert (full.measured_ns, full.baselines, full.eager_ns) == (400_000, {"eager": 4_000_000}, 4_000_000)
    assert (aten.measured_ns, aten.over("optimize"), aten.eager_ns) == (500_000, 0.8, 4_000_000)
    assert "googlenet-infer-b1: aten, 500 us a call on 4 streams, kernels of inductor, 0.80x over optimize" in lines
    (written,) = (tmp_path / "out").glob("less_h200_*.json")
    assert read_results(written) == results
    assert "| optimize: one_stream |" in written.with_suffix(".md").read_text(encoding="utf-8")
    monkeypatch.setattr(running, "alone", lambda *_: pytest.fail("measured again"))
    assert optimize_cases(recipe, recipe.case, tmp_path / "out", "c", lines.append) == results
    assert "measured before: googlenet-infer-b1" in lines


def test_an_ended_run_goes_on_with_the_ablations_that_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, lines = read_recipe(recipe_file(tmp_path, ABLATIONS)), list[str]()
    monkeypatch.setattr(running, "alone", keeps(None, "aten"))
    before = optimize_cases(recipe, recipe.case, tmp_path / "out", "c", lines.append).cases
    asked: list[Asked] = []
    later = keeps(None, "one_stream", asked=asked, optimized=timing(600_000), optimize_s=1.0)
    monkeypatch.setattr(running, "alone", later)
    rows = {row.ablation: row for row in optimize_cases(recipe, recipe.case, tmp_path / "out", "c", lines.append).cases}
    assert asked[0].ablations == ("one_stream",)
    assert "adding one_stream to googlenet-infer-b1" in lines
    assert (rows[None], rows["aten"]) == before
    assert (rows["one_stream"].measured_ns, len(rows)) == (600_000, 3)


def test_ablations_of_another_machine_or_other_code_are_not_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, lines = read_recipe(recipe_file(tmp_path, ABLATIONS)), list[str]()
    monkeypatch.setattr(running, "alone", keeps(None, "aten"))
    before = optimize_cases(recipe, recipe.case, tmp_path / "out", "c", lines.append).cases
    slow = msgspec.structs.replace(measured().gpu, sm_clock_mhz=1200)
    monkeypatch.setattr(running, "alone", keeps(None, "one_stream", gpu=slow))
    assert optimize_cases(recipe, recipe.case, tmp_path / "out", "c", lines.append).cases == before
    assert any("no ablations are added to googlenet-infer-b1: SM clock in MHz was 1980, is 1200" in x for x in lines)
    monkeypatch.setattr(running, "code_version", lambda: "9+other")
    monkeypatch.setattr(running, "alone", keeps(None))
    (row,) = optimize_cases(recipe, recipe.case, tmp_path / "out", "c", lines.append).cases
    assert (row.ablation, row.commit) == (None, "9+other")


def test_the_step_is_optimized_in_full_first_and_each_ablation_is_kept_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that comes back unoptimized is left out; all get the same time, and are timed in turns at the end."""
    given: list[tuple[str | None, float | None]] = []

    def optimize(target: Any, inputs: Any, warn: Any, ablation: Any, limit_s: Any, **options: Any) -> Any:
        given.append((ablation, limit_s))
        if ablation == "inductor":
            warn("a line that matches no node")
            return target
        return fast(target, inputs)

    on_cpu(monkeypatch, itself)
    monkeypatch.setattr(measuring, "optimize", optimize)
    monkeypatch.setattr(ablations, "make", itself)
    monkeypatch.setattr(ablations, "gpu_facts", lambda _: measured().gpu)
    turns: list[list[str]] = []
    timed = measuring.times_in_turns
    monkeypatch.setattr(
        ablations, "times_in_turns", lambda calls, *rest: (turns.append([*calls]), timed(calls, *rest))[1]
    )
    kept: list[Measured] = []
    ablate(replace(asking(()), ablations=("aten", "inductor", "no_variants")), kept.append)
    assert given == [(name, ablations.LIMIT_S) for name in (None, "aten", "inductor", "no_variants")]
    every = [None, "aten", "no_variants"]
    assert [each.ablation for each in kept] == [*every, *every]
    pair = ["eager", "optimize"]
    assert turns == [pair, [*pair, "aten"], [*pair, "no_variants"], [*pair, "aten", "no_variants"]]
    assert [set(each.peers) for each in kept] == [{"eager"}, {*pair}, {*pair}] * 2
    assert "left out inductor: net is not optimized: a line that matches no node" in capsys.readouterr().err


def test_a_step_that_is_not_optimized_in_full_is_a_failed_case(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu(monkeypatch, itself)
    monkeypatch.setattr(measuring, "optimize", lambda target, inputs, warn, **options: target)
    monkeypatch.setattr(ablations, "make", itself)
    with pytest.raises(CaptureError, match="net is not optimized"):
        ablate(replace(asking(()), ablations=("aten",)), lambda _: pytest.fail("kept"))


def test_the_table_has_each_ablations_time_over_that_of_the_step_in_full_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = script("make_ablation_table").lines
    with pytest.raises(MeasurementError, match="no results"):
        lines(tmp_path)
    recipe = read_recipe(recipe_file(tmp_path, ABLATIONS.replace('"less"', '"kernels"')))
    monkeypatch.setattr(running, "alone", keeps(None, "one_stream"))
    optimize_cases(recipe, recipe.case, tmp_path / "out", "c", lambda _: None)
    assert lines(tmp_path / "out")[::2] == [
        "|step|us in full|aten|inductor|one_stream|no_variants|no_regions|",
        "|`googlenet-infer-b1`|400|||1.25x|||",
    ]


def test_committed_rows_with_an_ablation_are_of_its_recipe_and_have_the_step_in_full_beside_them() -> None:
    rows = [
        (each.recipe, row) for each in read_all_results(ROOT / "validate" / "results").values() for row in each.cases
    ]
    assert rows
    for recipe, row in rows:
        assert (row.ablation is None) or (recipe == "kernels" and "optimize" in row.baselines)
