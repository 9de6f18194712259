"""Choices of models: the neighbourhood, tau and regret by hand, and predictions of the full model as made again."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from gpusim.cli import cli
from gpusim.errors import OptionError
from gpusim.formats.results import ResultCase, read_results
from gpusim.io.files import write_document
from gpusim.validation.again import predict_again
from gpusim.validation.models import MODELS, choices, predicted_by_models
from tests.support.made_results import case
from tests.validation.test_golden import make_golden

#: Nine schedules: eight within 5 % of the fastest, 1.4 % apart or less, and one that is far slower.
MEASURED_NS = (1000, 1004, 1008, 1020, 1030, 1040, 1045, 1050, 1500)


def cases(predicted_ns: tuple[int, ...]) -> list[ResultCase]:
    return [case(ns, measured) for ns, measured in zip(predicted_ns, MEASURED_NS, strict=True)]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    schedules = make_golden(tmp_path)
    return schedules.with_name(schedules.name.replace(".schedules.json.gz", ".json"))


def test_a_perfect_order_has_a_tau_of_one_and_no_regret_and_the_slow_schedule_does_not_count() -> None:
    (found,) = choices({"blocks": cases(MEASURED_NS)})
    assert (found.model, found.schedules, found.tau, found.regret) == ("blocks", 8, 1.0, 0.0)


def test_regret_is_that_of_the_schedule_predicted_best_even_if_it_is_far_from_the_best() -> None:
    wrong = (*MEASURED_NS[:-1], 900)
    found = choices({"blocks": cases(MEASURED_NS), "gaps only": cases(wrong)})
    assert [(each.model, each.tau, each.regret) for each in found] == [("blocks", 1.0, 0.0), ("gaps only", 1.0, 0.5)]


def test_a_step_with_few_schedules_near_the_best_is_left_out() -> None:
    assert choices({"blocks": cases(MEASURED_NS)[1:]}) == []


def test_the_full_model_predicts_as_again_and_all_models_predict_the_same_cases(results: Path) -> None:
    _, now = predict_again(results)
    wanted = [each.predicted_ns for each in now.cases if each.streams > 1]
    by_models = predicted_by_models(results)
    assert [each.predicted_ns for each in by_models["blocks"]] == wanted
    assert list(by_models) == list(MODELS)
    assert {len(each) for each in by_models.values()} == {len(wanted)}
    for free, full in zip(by_models["gaps only"], by_models["blocks"], strict=True):
        assert free.predicted_ns <= full.predicted_ns
        assert msgspec.structs.replace(free, predicted_ns=0) == msgspec.structs.replace(full, predicted_ns=0)


def test_a_schedule_whose_outputs_differ_is_no_choice(results: Path) -> None:
    """It has no valid time, whatever any model predicts."""
    stored = read_results(results)
    first, *others = stored.cases
    differing = msgspec.structs.replace(first, outputs_equal=False)
    write_document(results, msgspec.structs.replace(stored, cases=(differing, *others)))
    assert first.streams > 1
    assert [len(each) for each in predicted_by_models(results).values()] == [len(others)] * len(MODELS)


def test_the_command_prints_a_list_and_needs_a_results_file(results: Path) -> None:
    command = ["validate", str(results), "--again", "--models", "--json"]
    ran = CliRunner().invoke(cli, command, catch_exceptions=False)
    assert isinstance(json.loads(ran.stdout), list)
    with pytest.raises(OptionError, match="--models goes with --again"):
        CliRunner().invoke(cli, ["validate", str(results), "--models"], catch_exceptions=False)
