"""Gradients of embedding bags as additions into zeros, in place of ATen's operator, which sorts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (torch's own habit)

from gpusim.gpu.capture.in_memory import function_step, options_of
from gpusim.gpu.capture.record import record
from gpusim.gpu.capture.user_step import Untouched, record_step
from gpusim.gpu.inductor.embedding_bags import gradient_of_table
from gpusim.gpu.inductor.own_step import own_step
from gpusim.gpu.inductor.step import inductor_step
from gpusim.gpu.optimize.callable import OptimizedStep
from gpusim.gpu.optimize.front import optimize
from tests.support.fused_steps import Trained, close, sgd
from tests.support.networks import CPU

ATEN = torch.ops.aten
BACKWARD = "aten._embedding_bag_backward.default"
SUM, MEAN, MAX = 0, 1, 2
ROWS, WIDTH, IDS = 20, 6, 30
#: The second bag is empty.
OFFSETS = (0, 4, 4, 11, 29)


def _arguments(mode: int, weights: torch.Tensor | None = None, padding_idx: int = -1) -> list[Any]:
    """Return the arguments of the gradient for bags of ids, some of which repeat, as a GPU's forward leaves them."""
    torch.manual_seed(0)
    table, ids, offsets = torch.randn(ROWS, WIDTH), torch.randint(0, ROWS, (IDS,)), torch.tensor(OFFSETS)
    result, _, bag_size, largest = ATEN._embedding_bag(
        table, ids, offsets, False, mode, False, weights, False, padding_idx
    )
    bag_of_id = torch.bucketize(torch.arange(IDS), offsets, right=True) - 1
    gradient = torch.randn_like(result)
    return [gradient, ids, offsets, bag_of_id, bag_size, largest, ROWS, False, mode, False, weights, padding_idx]


@pytest.mark.parametrize("padding_idx", [-1, 3])
@pytest.mark.parametrize(
    ("mode", "weights"), [(SUM, None), (SUM, torch.rand(IDS)), (MEAN, None)], ids=["sum", "weighted", "mean"]
)
def test_gradient_is_the_operators(mode: int, weights: torch.Tensor | None, padding_idx: int) -> None:
    arguments = _arguments(mode, weights, padding_idx)
    torch.testing.assert_close(gradient_of_table(*arguments), ATEN._embedding_bag_backward(*arguments))


def test_operator_stays_where_it_does_something_else() -> None:
    """Maxima, scaling by frequency, sparse gradients, sums of 16 bits, and ids whose bag is not known."""
    others = [(8, MAX), (7, True), (9, True), (0, _arguments(SUM)[0].bfloat16()), (3, torch.empty(0, dtype=torch.long))]
    for place, value in others:
        arguments = _arguments(SUM)
        arguments[place] = value
        assert gradient_of_table(*arguments) is NotImplemented, place


def test_operator_stays_where_the_user_wants_equal_results() -> None:
    """Additions of one id come in any order."""
    torch.use_deterministic_algorithms(True)
    try:
        assert gradient_of_table(*_arguments(SUM)) is NotImplemented
    finally:
        torch.use_deterministic_algorithms(False)


class Bags(nn.Module):
    """Two tables, the first with a row that is no entry of a bag."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.EmbeddingBag(12, 4, mode="sum", padding_idx=0)
        self.two = nn.EmbeddingBag(9, 4, mode="mean")
        self.head = nn.Linear(8, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[batch, ids] to [batch, classes]."""
        return self.head(torch.cat([self.one(ids), self.two(ids % 9)], dim=1).tanh())


def _data(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    return [(torch.randint(0, 12, (3, 4)), torch.randint(0, 5, (3,))) for _ in range(count)]


def test_a_step_with_two_tables_trains_as_eagerly() -> None:
    torch.manual_seed(0)
    data = _data(4)
    both = Trained(Bags(), sgd, *data[0], F.cross_entropy)
    both.train(data)
    (variant,) = both.fast._variants.values()
    assert variant is not None
    assert BACKWARD not in {op.target for op in variant.captured.trace.ops}


def test_a_captured_step_keeps_the_operator_as_torch_compile_does() -> None:
    """`capture --frontend inductor` records torch.compile's kernels, `gpusim.optimize` chooses its own."""
    model, (ids, y) = Bags(), _data(1)[0]

    def step(ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(ids), y)
        loss.backward()
        return loss.detach()

    user = function_step(step, (ids, y), CPU)
    options = options_of(user, "test.step", "train", "fp32", False, 0, False, "inductor")
    with Untouched(user).around() as untouched:
        graph = record_step(user, untouched, options.seed)
    recorded = record(graph)
    theirs, ours = inductor_step(graph, recorded, training=True), own_step(graph, recorded, training=True)
    assert [sum(op.target == BACKWARD for op in each.ops) for each in (recorded, theirs, ours)] == [2, 2, 0]


@pytest.mark.gpu
def test_tables_of_sums_train_on_a_gpu_as_eagerly() -> None:
    """On a GPU every forward says which bag an id is in. Ids repeat, within a bag and across bags."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(500, 64, mode="sum"), nn.Tanh(), nn.Linear(64, 5)).cuda()
    other = copy.deepcopy(model)
    optimizers = [sgd(each.parameters()) for each in (model, other)]
    data = [(torch.randint(0, 500, (96, 16)).cuda(), torch.randint(0, 5, (96,)).cuda()) for _ in range(3)]
    step = optimize(model, data[0], loss=F.cross_entropy, optimizer=optimizers[0], frontends=("inductor",))
    assert isinstance(step, OptimizedStep)
    (variant,) = step._variants.values()
    assert variant is not None
    assert BACKWARD not in {op.target for op in variant.captured.trace.ops}
    for x, y in data:
        loss = step(x, y)
        optimizers[1].zero_grad()
        wanted = F.cross_entropy(other(x), y)
        wanted.backward()
        optimizers[1].step()
        close(loss, wanted.detach())
        close(model[0].weight.grad, other[0].weight.grad)
        close(model.state_dict(), other.state_dict())
