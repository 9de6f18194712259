"""Results, gradients and state of steps on Inductor's kernels equal eager's, step after step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (torch's own habit)

from gpusim.gpu.optimize import choose
from gpusim.gpu.optimize.callable import OptimizedStep
from tests.support.fused_steps import (
    Block,
    Convolutions,
    Trained,
    adam,
    by_inductor,
    close,
    images,
    sgd,
)
from tests.support.networks import Branches, image
from tests.support.optimizing import Twins, batches, fast, net


def test_branches_of_convolutions_at_inference() -> None:
    torch.manual_seed(0)
    model = Branches().eval()
    step = by_inductor(model, image(2))
    first = step(image(2))
    kept = first.clone()
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn_like(image(2))
            close(step(x), model(x))
        model.load_state_dict({name: tensor * 1.1 for name, tensor in model.state_dict().items()})
        close(step(x), model(x))
    assert torch.equal(first, kept)


def test_branches_of_convolutions_in_training() -> None:
    """Batch norm's statistics change once per step, and equal gradients have memory of their own."""
    torch.manual_seed(0)
    both = Trained(Convolutions(), sgd, *images(1)[0], F.cross_entropy)
    both.train(images(4))
    model = both.models[0]
    assert int(model.one[1].num_batches_tracked) == 4
    close(model.left.bias.grad, model.right.bias.grad)
    memory = [parameter.grad.data_ptr() for parameter in model.parameters()]
    assert len(set(memory)) == len(memory)


def test_views_of_what_was_there_before_the_step_come_back() -> None:
    """Inductor makes no op for them."""
    model = nn.Linear(6, 3)

    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.exp(), x[1:], model.weight.t(), model.bias[1:]

    made, x = by_inductor(step, torch.randn(4, 6)), torch.randn(4, 6)
    for found, wanted in zip(made(x), step(x), strict=True):
        close(found, wanted.detach())


@pytest.mark.parametrize("training", [False, True])
def test_results_of_padded_products_keep_their_strides(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU Inductor pads products whose sides are no multiples of four numbers; the result is a slice, which is
    copied for the user. Here Inductor is made to pad on the CPU, and every product.
    """
    from torch._inductor.fx_passes import pad_mm

    padded: list[object] = []

    def always(match: object, *_: object, **__: object) -> bool:
        padded.append(match)
        return True

    monkeypatch.setattr(pad_mm, "can_pad", always)
    monkeypatch.setattr(pad_mm, "should_pad", always)
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 7))
    x, y = torch.randn(5, 6), torch.randint(0, 7, (5,))
    if training:
        Trained(model, sgd, x, y, F.cross_entropy).train([(x, y), (-x, y)])
    else:
        step = by_inductor(model.eval(), x)
        with torch.no_grad():
            close(step(x), model(x))
            assert step(x).stride() == model(x).stride()
    assert padded


def test_layers_with_adam_a_checkpoint_and_another_rate() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 5))
    both = Trained(model, adam, *batches(1)[0], F.cross_entropy)
    data = batches(8)
    both.train(data[:3])
    before = copy.deepcopy((model.state_dict(), both.optimizers[0].state_dict()))
    both.train(data[3:5])
    for each, optimizer in zip(both.models, both.optimizers, strict=True):
        each.load_state_dict(before[0])
        optimizer.load_state_dict(copy.deepcopy(before[1]))
        optimizer.param_groups[0]["lr"] = 0.002
    both.train(data[5:])
    assert {state["step"].item() for state in both.optimizers[0].state.values()} == {6}


def test_a_block_of_a_transformer_in_training() -> None:
    torch.manual_seed(0)
    data = [(torch.randint(0, 11, (2, 7)), torch.randint(0, 3, (2,))) for _ in range(4)]
    Trained(Block(), sgd, *data[0], F.cross_entropy).train(data)


def test_attention_that_drops_out_is_right_whoever_runs_it() -> None:
    """Inductor gives dropped-out tensors other strides, so random numbers fall on other elements: it is left out."""
    torch.manual_seed(0)
    model = Block(0.2)
    other = copy.deepcopy(model)
    data = [torch.randint(0, 11, (2, 7)) for _ in range(3)]
    step = fast(model, data[0], budget_s=choose.KERNELS_FROM_S)
    assert step.gain.frontend == "inductor" or "away from eager's" in step.gain.without
    for number, tokens in enumerate(data):
        torch.manual_seed(number)
        found = step(tokens)
        torch.manual_seed(number)
        with torch.no_grad():
            close(found, other(tokens))


def test_dropout_differs_from_step_to_step_and_follows_the_seed() -> None:
    model = nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5), nn.ReLU())
    x = torch.ones(4, 6)
    step = by_inductor(model, x)
    torch.manual_seed(0)
    first, second = step(x), step(x)
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(step(x), first)
    torch.manual_seed(0)
    with torch.no_grad():
        close(model(x), first)


def test_an_optimizer_without_fused_updates_is_compiled_with_the_rest() -> None:
    # From zero, Adagrad's first update is the sign of a gradient, also of one that is rounding alone.
    twins = Twins(
        lambda p: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.1), dropout=0.3, frontends=("inductor",)
    )
    assert isinstance(twins.fast, OptimizedStep)
    twins.train(batches(4))
    close(twins.model.state_dict(), twins.other.state_dict())
    close(twins.optimizer.state_dict()["state"], twins.other_optimizer.state_dict()["state"])


def test_clipping_before_and_an_average_behind_the_update() -> None:
    """Operations of a step function after an update run as recorded, on the results of Inductor's kernels."""

    def made(model: nn.Module, average: nn.Module) -> Any:
        optimizer = sgd(model.parameters())

        def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            with torch.no_grad():
                for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(parameter, 0.1)
                return loss.detach(), norm + next(average.parameters()).sum()

        return step

    model = net()
    other = copy.deepcopy(model)
    averages = [copy.deepcopy(model).requires_grad_(False) for _ in range(2)]
    mine = by_inductor(made(model, averages[0]), batches(1)[0])
    theirs = made(other, averages[1])
    for x, y in batches(4):
        close(mine(x, y), theirs(x, y))
        close(*(each.state_dict() for each in averages))
    close(model.state_dict(), other.state_dict())


def test_gradients_accumulate() -> None:
    model = net()
    other = copy.deepcopy(model)

    def accumulating(each: nn.Module) -> Any:
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(each(x), y)
            loss.backward()
            return loss.detach()

        return step

    for each in (model, other):
        for parameter in each.parameters():
            parameter.grad = torch.ones_like(parameter)
    mine, theirs = by_inductor(accumulating(model), batches(1)[0]), accumulating(other)
    for number, (x, y) in enumerate(batches(5)):
        close(mine(x, y), theirs(x, y))
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            close(one.grad, two.grad)
        if number == 2:
            for each in (model, other):
                each.zero_grad()


@pytest.fixture(scope="module")
def attend() -> Iterator[Callable[..., Any]]:
    """An operator like cuDNN's attention: in inference it leaves out a result that it has without memory."""
    library = torch.library.Library("gpusim_fused_test", "DEF")
    library.define("attend(Tensor x, bool save) -> (Tensor out, Tensor sums, Tensor never, SymInt size, Tensor seed)")

    def attend(x: torch.Tensor, save: bool) -> Any:
        return x.softmax(-1), x.logsumexp(-1) if save else None, None, x.shape[-1], x.sum()

    library.impl("attend", attend, "CPU")
    torch.library.register_fake(
        "gpusim_fused_test::attend",
        lambda x, save: (x + 0, x.new_empty(x.shape[:-1]), None, x.shape[-1], x.new_empty(())),
        lib=library,
    )
    yield torch.ops.gpusim_fused_test.attend
    library._destroy()


@pytest.mark.parametrize("save", [False, True])
def test_results_that_an_operator_leaves_out_may_be_absent_where_nobody_uses_them(
    attend: Callable[..., Any], save: bool
) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        out, sums, _, _, seed = attend(x * 2, save)
        return (out + seed + (sums.unsqueeze(-1) if save else 0)).relu()

    x, y = torch.randn(3, 4), torch.randn(3, 4)
    made = by_inductor(step, x)
    for each in (x, y):
        close(made(each), step(each))


def test_an_absent_result_holds_its_place(attend: Callable[..., Any]) -> None:
    """The places of later results do not depend on it."""
    made = by_inductor(lambda x: attend(x, False)[4] + x, torch.randn(3, 4))
    (variant,) = made._variants.values()
    (op,) = [op for op in variant.captured.trace.ops if "attend" in op.target]
    assert len(op.outputs) == 5
    assert [op.outputs[place] for place in (2, 3)] == [None, None]
    assert op.outputs[4] is not None
