"""Weights that let the outputs of a fresh model show what was computed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpusim.gpu.capture.models import ModelStep
from gpusim.gpu.optimize.peers import Contender, Exact, user_step
from gpusim.gpu.optimize.sensitive import make_sensitive
from tests.support.optimizing import net


class Mute(nn.Module):
    """A last layer of zeros, as torchvision's vision transformers have."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 4)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).relu())


@pytest.mark.parametrize("scale", [0.0, 1e-5])
def test_a_fresh_model_whose_outputs_ignore_its_input_gets_weights_that_show_errors(scale: float) -> None:
    torch.manual_seed(0)
    model = Mute().eval()
    if scale:
        nn.init.normal_(model.head.weight, std=scale)
    step = ModelStep("mute", model, (torch.randn(4, 6),), None, None)
    wrong = user_step(step, model, lambda x: model(x * 2.0))
    before = Exact(step).deviation(Contender(wrong, model))
    assert before is not None
    assert before < 1e-3
    assert make_sensitive(step, "fp32", 0)
    after = Exact(step).deviation(Contender(wrong, model))
    assert after is not None
    assert after > 0.1


def test_weights_of_a_model_whose_outputs_depend_on_its_input_stay() -> None:
    step = ModelStep("net", net().eval(), (torch.randn(4, 6),), None, None)
    before = {name: value.clone() for name, value in step.module.state_dict().items()}
    assert make_sensitive(step, "fp32", 0)
    assert all(torch.equal(value, before[name]) for name, value in step.module.state_dict().items())


def test_other_tokens_show_that_outputs_depend_on_the_input() -> None:
    """Tokens are exchanged; integers that ascend, as offsets of bags do, stay."""
    torch.manual_seed(0)
    table = nn.EmbeddingBag(9, 4, mode="sum")
    before = table.weight.detach().clone()
    offsets = torch.tensor([0, 2, 3])
    step = ModelStep("table", table, (torch.tensor([3, 1, 4, 1, 5]), offsets), None, None)
    assert make_sensitive(step, "fp32", 0)
    assert torch.equal(table.weight, before)
    assert offsets.tolist() == [0, 2, 3]


def test_weights_of_zeros_are_not_drawn_alike() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)).eval()
    for layer in model:
        nn.init.zeros_(layer.weight)
    assert make_sensitive(ModelStep("zeros", model, (torch.randn(4, 6),), None, None), "fp32", 0)
    assert not torch.equal(model[0].weight, model[1].weight)


def test_a_model_that_ignores_its_input_is_said_to_and_keeps_its_weights() -> None:
    class Deaf(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)
            nn.init.normal_(self.layer.weight, std=1e-6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x * 0.0)

    model = Deaf()
    before = model.layer.weight.detach().clone()
    assert not make_sensitive(ModelStep("deaf", model, (torch.randn(4, 6),), None, None), "fp32", 0)
    assert torch.equal(model.layer.weight, before)
