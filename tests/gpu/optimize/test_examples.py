"""The examples of the faster step, on a stand-in for the GPU: same losses, same answers."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

import gpusim
from gpusim.gpu.optimize.callable import OptimizedStep
from tests.support.optimizing import fast

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(autouse=True)
def _without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(vars(gpusim), "optimize", fast)


@pytest.mark.filterwarnings("ignore")
def test_training_has_the_loss_curve_of_eager_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = runpy.run_path(str(EXAMPLES / "train_faster.py"))
    assert isinstance(names["fast"], OptimizedStep)
    found = re.search(r"loss ([\d.]+) -> ([\d.]+), the curves at most ([\d.e+-]+) apart", capsys.readouterr().out)
    assert found is not None
    first, last, apart = map(float, found.groups())
    assert last < 0.8 * first
    assert apart < 1e-3
    assert "optimized" in (tmp_path / "train_faster.html").read_text()


@pytest.mark.filterwarnings("ignore")
def test_serving_answers_as_the_model_does(capsys: pytest.CaptureFixture[str]) -> None:
    names = runpy.run_path(str(EXAMPLES / "serve_faster.py"))
    assert isinstance(names["fast"], OptimizedStep)
    assert len(names["fast"]._variants) == len(names["SIZES"])
    assert "requests answered as the model does" in capsys.readouterr().out
