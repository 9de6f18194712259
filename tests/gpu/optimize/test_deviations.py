"""`benchmarks/deviations.py` on the CPU: with dropout off, each way to run a step is compared with FP64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import deviations as benchmark
from gpusim.gpu.capture.models import ModelStep, default_loss
from gpusim.gpu.optimize import measure
from gpusim.gpu.optimize.measure import Asked
from gpusim.gpu.optimize.peers import Contender, Exact, user_step
from tests.support.optimizing import fast, net


@pytest.mark.parametrize("dropout", [nn.Dropout(0.5), nn.Dropout1d(0.5)])
def test_a_step_with_dropout_is_compared_without_it(dropout: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(net(), dropout).train()
    step = ModelStep("net", model, (torch.randn(4, 6),), torch.tensor([0, 1, 2, 3]), default_loss)

    def itself(peer: str, of: ModelStep) -> Contender:
        return Contender(user_step(of, of.module, of.module), of.module)

    assert Exact(step).deviation(itself("eager", step)) is None
    monkeypatch.setattr(measure, "optimize", lambda target, inputs, warn, **options: fast(target, inputs))
    monkeypatch.setattr(benchmark, "make", itself)
    asked = Asked("net", "train", 4, "fp32", "contiguous", (), (), 3, 0.02, 0)
    row: dict[str, Any] = benchmark.deviations(step, asked, lambda _: None)
    assert (row["dropouts"], row["sensitive"]) == (2, True)
    assert set(row["deviations"]) == {"optimize", "eager", "torch_compile_own_graph"}
    assert all(0.0 < deviation < 1e-5 for deviation in row["deviations"].values())
