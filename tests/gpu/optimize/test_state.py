"""State of an optimized step stays in the user's tensors: any change between steps has the same effect as in eager.

On the CPU, in the launch order of the chosen schedule; results lie in fixed memory, as those of a CUDA graph do.
"""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (torch's own habit)

from gpusim.gpu.optimize.callable import OptimizedStep
from tests.support.optimizing import (
    Net,
    Twins,
    batches,
    close,
    eager_step,
    fast,
    modes_of,
    net,
    same_states,
    sgd,
)


def halves(parameters: Any) -> tuple[list[Any], list[Any]]:
    every = list(parameters)
    return every[::2], every[1::2]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2),
    # torch's loop over lists, the default on a GPU, leaves gradients plus momentum in `.grad`.
    "nesterov-foreach": lambda p: torch.optim.SGD(
        [{"params": part, "momentum": m} for part, m in zip(halves(p), (0.9, 0.5), strict=True)],
        lr=0.1,
        nesterov=True,
        momentum=0.9,
        foreach=True,
    ),
    "dampened": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, amsgrad=True),
    "adam-single": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False),
    "adam-fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
}


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_many_steps_are_those_of_eager(name: str) -> None:
    twins = Twins(OPTIMIZERS[name], dropout=0.3)
    assert isinstance(twins.fast, OptimizedStep)
    twins.train(batches(12))
    twins.check()


def test_optimizing_changes_nothing_of_the_users() -> None:
    model = net(0.5)
    optimizer = adam(model.parameters())
    eager_step(model, optimizer)(*batches(1)[0])
    before, before_optimizer = repr(model.state_dict()), repr(optimizer.state_dict())
    objects = [id(t) for state in optimizer.state.values() for t in state.values()]
    gradients = [p.grad for p in model.parameters()]
    copies = [g.clone() for g in gradients if g is not None]
    random = torch.get_rng_state()
    fast(model, batches(1)[0], loss=F.cross_entropy, optimizer=optimizer)
    assert torch.equal(torch.get_rng_state(), random)
    assert repr(model.state_dict()) == before
    assert repr(optimizer.state_dict()) == before_optimizer
    assert [id(t) for state in optimizer.state.values() for t in state.values()] == objects
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert all(torch.equal(g, c) for g, c in zip(gradients, copies, strict=True) if g is not None)
    assert not vars(optimizer).get("_need_device_dtype_check_for_fused", False)


@pytest.mark.parametrize("make", [sgd, adam])
def test_a_checkpoint_loaded_in_the_middle(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    twins = Twins(make)
    data = batches(9)
    twins.train(data[:3])
    file = io.BytesIO()
    torch.save((twins.model.state_dict(), twins.optimizer.state_dict()), file)
    twins.train(data[3:6])
    file.seek(0)
    model, optimizer = torch.load(file)
    twins.model.load_state_dict(model)
    twins.optimizer.load_state_dict(optimizer)
    twins.other.load_state_dict(copy.deepcopy(model))
    twins.other_optimizer.load_state_dict(copy.deepcopy(optimizer))
    twins.train(data[6:])
    twins.check()


def test_a_checkpoint_goes_on_eagerly_elsewhere() -> None:
    twins = Twins(adam)
    data = batches(6)
    twins.train(data[:3])
    model = net(seed=5)
    optimizer = adam(model.parameters())
    model.load_state_dict(twins.model.state_dict())
    optimizer.load_state_dict(twins.optimizer.state_dict())
    step = eager_step(model, optimizer)
    for x, y in data[3:]:
        close(step(x, y), twins.eager(x, y))
    same_states(model.state_dict(), twins.other.state_dict())


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
def test_a_rate_in_a_tensor_may_be_changed_in_place_or_replaced(kind: Any) -> None:
    """Optimizers with fused kernels read it anew; the others hold it as a number, and are captured again."""
    twins = Twins(lambda parameters: kind(parameters, lr=torch.tensor(0.01)))
    twins.train(batches(2))
    for optimizer in (twins.optimizer, twins.other_optimizer):
        optimizer.param_groups[0]["lr"].fill_(0.1)
    twins.train(batches(2))
    for optimizer in (twins.optimizer, twins.other_optimizer):
        optimizer.param_groups[0]["lr"] = torch.tensor(0.05)
    twins.train(batches(2))
    twins.check()
    assert isinstance(twins.fast, OptimizedStep)


def test_the_rate_changes_every_step_without_a_new_capture() -> None:
    twins = Twins(adam)
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(each, max_lr=0.1, total_steps=20, cycle_momentum=False)
        for each in (twins.optimizer, twins.other_optimizer)
    ]
    captured = dict(twins.fast._variants)
    for x, y in batches(8):
        twins.train([(x, y)])
        for schedule in schedules:
            schedule.step()
    twins.check()
    assert twins.fast._variants == captured


def test_other_options_of_the_optimizer_are_captured_anew() -> None:
    twins = Twins(sgd)
    data = batches(8)
    twins.train(data[:4])
    for each in (twins.optimizer, twins.other_optimizer):
        each.param_groups[0]["weight_decay"] = 0.05
    twins.train(data[4:])
    twins.check()


@pytest.mark.parametrize("make", [sgd, adam])
def test_eager_steps_between_fast_ones(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    twins = Twins(make)
    mine = eager_step(twins.model, twins.optimizer)
    for number, (x, y) in enumerate(batches(9)):
        step = mine if number % 3 == 2 else twins.fast
        close(step(x, y), twins.eager(x, y))
    twins.check()


def test_counts_of_adam_are_in_the_hosts_memory_and_right_after_each_step() -> None:
    model = net()
    optimizer = adam(model.parameters())
    step = fast(model, batches(1)[0], loss=F.cross_entropy, optimizer=optimizer)
    for number, (x, y) in enumerate(batches(5), start=1):
        step(x, y)
        assert {state["step"].item() for state in optimizer.state.values()} == {number}
        assert {state["step"].device.type for state in optimizer.state.values()} == {"cpu"}


def test_counts_of_parameters_frozen_later_stand_still() -> None:
    """Those have states from before, and no gradient."""
    twins = Twins(adam)
    twins.train(batches(2))
    for model in (twins.model, twins.other):
        model.left.requires_grad_(False)
        model.zero_grad()
    twins.train(batches(2, seed=4))
    for mine, theirs in zip(twins.optimizer.state.values(), twins.other_optimizer.state.values(), strict=True):
        same_states(mine, theirs)
    assert {twins.optimizer.state[p]["step"].item() for p in twins.model.left.parameters()} == {2}


def test_a_count_set_by_hand_is_used() -> None:
    twins = Twins(adam)
    twins.train(batches(3))
    for optimizer in (twins.optimizer, twins.other_optimizer):
        for state in optimizer.state.values():
            state["step"].fill_(100)
    twins.train(batches(3, seed=4))
    twins.check()


def test_modes_have_a_step_each() -> None:
    model = net(0.5)
    x = batches(1)[0][0]
    model.eval()
    step = fast(model, x)
    for mode in (False, True, False):
        model.train(mode)
        torch.manual_seed(3)
        found = step(x)
        torch.manual_seed(3)
        with torch.no_grad():
            close(found, copy.deepcopy(model)(x))


def test_dropout_differs_from_step_to_step_and_follows_the_seed() -> None:
    model = nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5))
    x = torch.ones(4, 6)
    step = fast(model, x)
    torch.manual_seed(0)
    first, second = step(x), step(x)
    assert not torch.equal(first == 0, second == 0)
    assert 0.3 < (first == 0).float().mean().item() < 0.7
    torch.manual_seed(0)
    assert torch.equal(step(x), first)


def test_batch_norm_moves_once_a_step() -> None:
    twins = Twins(sgd)
    start = int(twins.model.norm.num_batches_tracked)
    twins.train(batches(4))
    assert int(twins.model.norm.num_batches_tracked) == start + 4
    close(twins.model.norm.running_var, twins.other.norm.running_var)


def test_what_was_returned_stays_valid() -> None:
    model = net().eval()
    x, z = batches(2)[0][0], batches(2)[1][0]
    step = fast(model, x)
    first = step(x)
    kept = first.clone()
    step(z)
    assert torch.equal(first, kept)
    with torch.no_grad():
        close(first, model(x))


def test_several_models_and_steps_of_one_model_are_alive() -> None:
    one, two = Twins(sgd), Twins(adam)
    x = batches(1)[0][0]
    scoring = copy.deepcopy(one.model)
    one_eval = fast(one.model.eval(), x)
    one.model.train()
    for batch in batches(4):
        one.train([batch])
        two.train([batch])
        one.model.eval()
        scoring.load_state_dict(one.model.state_dict())
        scoring.eval()
        with torch.no_grad():
            close(one_eval(batch[0]), scoring(batch[0]))
        one.model.train()
    one.check()
    two.check()


def test_a_function_without_gradients_and_optimizer_is_inference() -> None:
    model = net().eval()
    assert modes_of(fast(lambda x: model(x), batches(1)[0][:1])) == {"infer"}


def test_a_step_function_with_its_own_loop() -> None:
    model = net()
    other = copy.deepcopy(model)
    optimizers = [adam(each.parameters()) for each in (model, other)]
    mine = fast(eager_step(model, optimizers[0]), batches(1)[0])
    assert isinstance(mine, OptimizedStep)
    theirs = eager_step(other, optimizers[1])
    for x, y in batches(6):
        close(mine(x, y), theirs(x, y))
    same_states(model.state_dict(), other.state_dict())


def test_clipping_inside_a_step_function() -> None:
    model = net()
    other = copy.deepcopy(model)

    def clipped(each: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., torch.Tensor]:
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(each(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1)
            optimizer.step()
            return loss.detach()

        return step

    mine = fast(clipped(model, sgd(model.parameters())), batches(1)[0])
    theirs = clipped(other, sgd(other.parameters()))
    for x, y in batches(5):
        close(mine(x, y), theirs(x, y))
    same_states(model.state_dict(), other.state_dict())


def test_parameters_moved_elsewhere_are_found() -> None:
    model = net().eval()
    x = batches(1)[0][0]
    step = fast(model, x)
    model.load_state_dict(net(seed=8).state_dict(), assign=True)
    with torch.no_grad():
        close(step(x), model(x))
    model.head.weight.data = torch.randn_like(model.head.weight)
    with torch.no_grad():
        close(step(x), model(x))
    model.head = nn.Linear(8, 3)
    with torch.no_grad():
        close(step(x), model(x))


@pytest.mark.parametrize("how", ["load", "data", "in place"])
def test_weights_changed_in_place_are_used(how: str) -> None:
    model = net().eval()
    x = batches(1)[0][0]
    step = fast(model, x)
    if how == "load":
        model.load_state_dict(net(seed=8).state_dict())
    elif how == "data":
        model.head.weight.data.mul_(3)
    else:
        with torch.no_grad():
            model.norm.running_var.add_(2)
    with torch.no_grad():
        close(step(x), model(x))


def test_a_tensor_of_the_functions_closure_is_the_users() -> None:
    factor = torch.tensor([2.0, 3.0, 4.0])

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return (x * factor).relu() + (x + factor).sigmoid()

    x = torch.randn(4, 3)
    step = fast(scaled, x)
    factor.mul_(5)
    close(step(x), scaled(x))


def test_parameters_frozen_and_thawed_later_are_captured_anew() -> None:
    """Fine-tuning trains a part of the weights, then all."""
    twins = Twins(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    data = batches(6)
    twins.train(data[:2])
    for wanted in (False, True):
        twins.optimizer.zero_grad()
        for model in (twins.model, twins.other):
            model.left.requires_grad_(wanted)
        before = twins.model.left.weight.clone()
        twins.train(data[2:4] if wanted else data[4:])
        assert torch.equal(twins.model.left.weight, before) != wanted
        same_states(twins.model.state_dict(), twins.other.state_dict())


@pytest.mark.parametrize("change", ["freeze", "data"])
def test_parameters_of_no_module_are_watched_as_others_are(change: str) -> None:
    def made() -> tuple[list[nn.Parameter], Callable[..., torch.Tensor]]:
        parameters = [nn.Parameter(torch.ones(6, 5)), nn.Parameter(torch.ones(5))]
        optimizer = sgd(parameters)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(x @ parameters[0] + parameters[1], y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return parameters, step

    (mine, step), (theirs, eager) = made(), made()
    step = fast(step, batches(1)[0])
    assert isinstance(step, OptimizedStep)
    for number, (x, y) in enumerate(batches(4)):
        if number == 2:
            for weight, _ in (mine, theirs):
                if change == "freeze":
                    weight.requires_grad_(False)
                else:
                    weight.data = weight.detach() * 2
        close(step(x, y), eager(x, y))
        for one, two in zip(mine, theirs, strict=True):
            close(one, two)


def test_frozen_parameters_stay() -> None:
    model = net()
    model.left.requires_grad_(False)
    before = model.left.weight.clone()
    step = fast(
        model, batches(1)[0], loss=F.cross_entropy, optimizer=sgd(p for p in model.parameters() if p.requires_grad)
    )
    for x, y in batches(3):
        step(x, y)
    assert torch.equal(model.left.weight, before)
    assert model.left.weight.grad is None


class Structured(Net):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, Any]:
        hidden = self.left(x) * scale
        return {"logits": hidden, "parts": (hidden.relu(), 3), "x": x, "name": "a"}


def test_structures_numbers_and_inputs_come_back_as_they_do() -> None:
    torch.manual_seed(0)
    model = Structured().eval()
    x, z = torch.randn(2, 6), torch.randn(2, 6)
    step = fast(model, x)
    found = step(z)
    with torch.no_grad():
        wanted = model(z)
    assert found.keys() == wanted.keys()
    assert found["name"] == "a"
    assert found["parts"][1] == 3
    close(found["logits"], wanted["logits"])
    close(found["x"], z)
    with torch.no_grad():
        close(step(z, scale=2.0)["logits"], model(z, scale=2.0)["logits"])


def test_versions_of_changed_parameters_move() -> None:
    model = net()
    step = fast(model, batches(1)[0], loss=F.cross_entropy, optimizer=sgd(model.parameters()))
    x, y = batches(1)[0]
    step(x, y)
    loss = F.cross_entropy(model(x), y)  # saves weights for backward
    step(x, y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_no_copy_of_the_parameters_is_kept() -> None:
    """Trials are undone by a copy of all state, which would double a model's memory for good."""
    width = 251
    model = nn.Sequential(nn.Linear(width, width, bias=False), nn.Linear(width, 1, bias=False)).eval()
    step = fast(model, torch.randn(2, width))
    assert isinstance(step, OptimizedStep)
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter)]
    weights = {each.data_ptr() for each in tensors if each.shape == (width, width)}
    assert weights == {model[0].weight.data_ptr()}
