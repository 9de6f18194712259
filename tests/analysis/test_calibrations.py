"""`gpusim hardware --compare`: differing numbers of two calibrations, and their effect on predictions."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from gpusim.analysis.hardware_comparison import MEASURED, Difference, compare
from gpusim.cli import cli
from gpusim.errors import HardwareError
from gpusim.formats.hardware import HardwareModel, load_hardware
from gpusim.io.files import write_document
from gpusim.report.hardware_comparison import compared_document, compared_markdown
from tests.support.helpers import wide_trace

H200 = load_hardware("h200")


def changed(section: str, **fields: float) -> HardwareModel:
    return msgspec.structs.replace(H200, **{section: msgspec.structs.replace(getattr(H200, section), **fields)})


def by_name(differences: list[Difference]) -> dict[str, Difference]:
    return {found.parameter: found for found in differences}


def test_model_agrees_with_itself_in_every_measured_number() -> None:
    found = compare(H200, H200)
    assert all(each.agrees() and each.relative == 0.0 and each.effect is None for each in found)
    wanted = {f"{section}.{field}" for section in MEASURED for field in getattr(H200, section).__struct_fields__}
    assert {each.parameter for each in found} == wanted


@pytest.mark.parametrize(("factor", "agrees"), [(1.04, True), (0.951, True), (1.06, False), (0.94, False)])
def test_numbers_agree_within_5_percent_of_the_larger(factor: float, agrees: bool) -> None:
    other = changed("graph", front_end_ns=H200.graph.front_end_ns * factor)
    found = by_name(compare(H200, other))["graph.front_end_ns"]
    assert found.agrees() is agrees
    assert found.relative == pytest.approx(factor - 1)


def test_nothing_against_something_does_not_agree() -> None:
    found = by_name(compare(changed("graph", join_ns=0.0), H200))["graph.join_ns"]
    assert not found.agrees()
    assert compared_document("a", "b", [found])["parameters"][0]["relative"] is None


def test_effect_is_what_the_other_number_does_to_predictions() -> None:
    """A join that costs a microsecond more shows in a step with joins; copies do not show, for there are none."""
    other = changed("graph", join_ns=H200.graph.join_ns + 1000)
    other = msgspec.structs.replace(other, copies=msgspec.structs.replace(other.copies, latency_ns=9e9))
    found = by_name(compare(H200, other, [wide_trace()]))
    effect = found["graph.join_ns"].effect
    assert effect is not None
    assert effect > 0.05
    assert found["copies.latency_ns"].effect == 0.0


def test_models_of_two_gpus_are_not_compared() -> None:
    with pytest.raises(HardwareError, match="is of 'NVIDIA A100"):
        compare(H200, load_hardware("a100-80gb"))


def test_command_names_what_does_not_agree(tmp_path: Path) -> None:
    path = tmp_path / "again.json"
    write_document(path, changed("stream", launch_ns=9_999.0))
    text = CliRunner().invoke(cli, ["hardware", "--compare", "h200", str(path)], catch_exceptions=False).output
    assert "not: stream.launch_ns" in " ".join(text.split())
    done = CliRunner().invoke(cli, ["hardware", "--compare", "h200", str(path), "--json"], catch_exceptions=False)
    document = json.loads(done.stdout)
    assert document["agree"] == len(document["parameters"]) - 1
    assert "| `stream.launch_ns` |" in compared_markdown(document)
