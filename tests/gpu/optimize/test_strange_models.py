"""Habits of other people's models: notes of a first call, expanded buffers, tensors without a shape, objects of C++."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (torch's own habit)
from torch.utils.checkpoint import checkpoint

from gpusim.gpu.optimize.callable import OptimizedStep
from gpusim.gpu.reach.names import is_torchs, is_users
from tests.support.optimizing import Net, batches, captures, close, eager_step, fast, net, same_states, sgd

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:torch.*")
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class Prepares(Net):
    """Installs a hook at its first call and notes that it has, as `transformers` does."""

    is_ready = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_ready:
            self.is_ready = True
            self.head.register_forward_hook(lambda *given: given[-1] * 2)
        return super().forward(x)


class PreparesAndCounts(Prepares):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


class PreparesByData(Net):
    """Sets weights by the first batch, as activation norms do; and a note, which must not stay without these."""

    is_ready = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_ready:
            self.is_ready = True
            with torch.no_grad():
                self.left.bias.copy_(-self.left(x).mean(0))
        return super().forward(x)


class KeepsTable(Net):
    """Makes a buffer anew where the shape is another."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.table) != len(x):
            self.table = torch.arange(float(len(x)))
        return super().forward(x) * self.table[:, None]


def test_a_first_call_that_computes_something_else_is_refused_and_left_to_the_user() -> None:
    torch.manual_seed(0)
    model = PreparesByData().eval()
    before = copy.deepcopy(model.state_dict())
    with pytest.warns(UserWarning, match="computes something else than later ones: call it once before"):
        assert fast(model, X) is model
    assert not model.is_ready
    same_states(model.state_dict(), before)
    model(X)
    assert isinstance(fast(model, X), OptimizedStep)


class TriplesFirst(Net):
    """Computes something else at its first call, which shows in what a step returns only if it returns the loss."""

    is_first = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor, self.is_first = (3 if self.is_first else 1), False
        return super().forward(x) * factor


@pytest.mark.parametrize("lr", [0.1, 1e-4])
def test_a_first_update_that_is_another_is_refused_however_small(lr: float) -> None:
    """The update is compared, not the parameters, which it changes by little. Its gradients are gone."""
    torch.manual_seed(0)
    model = TriplesFirst()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    with pytest.warns(UserWarning, match="computes something else than later ones: call it once before"):
        assert fast(step, batches(1)[0]) is step


def test_a_buffer_that_the_first_call_replaces_stays() -> None:
    torch.manual_seed(0)
    model = KeepsTable().eval()
    step = fast(model, X)
    assert isinstance(step, OptimizedStep)
    assert len(model.table) == 4
    with torch.no_grad():
        for x in (X, X[:3], X):
            close(step(x), model(x))


@pytest.mark.filterwarnings("ignore:gpusim.optimize. the step changes the Python attribute 'calls'")
@pytest.mark.parametrize("kind", [Prepares, PreparesAndCounts])
def test_what_a_first_call_prepares_is_prepared_once(kind: type[Prepares]) -> None:
    """Where the step is refused, neither the note nor the hook is left."""
    torch.manual_seed(0)
    model = kind().eval()
    other = copy.deepcopy(model)
    step = fast(model, X)
    taken = kind is Prepares
    assert isinstance(step, OptimizedStep) == taken
    assert model.is_ready == bool(model.head._forward_hooks) == taken
    with torch.no_grad():
        close(step(X), other(X))
    assert len(model.head._forward_hooks) == 1


class MarksMissing(Net):
    """Has NaN in a buffer, and in a constant made at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("marks", torch.tensor([1.0, float("nan"), 1.0, 1.0, 1.0, 1.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        missing = self.marks.isnan() & torch.tensor([float("nan")]).isnan()
        return super().forward(torch.where(missing, 0.0, x))


def test_nan_that_stays_is_no_change() -> None:
    torch.manual_seed(0)
    model = MarksMissing()
    optimizer, (data, *others) = sgd(model.parameters()), batches(3)
    step = fast(model, data, loss=F.cross_entropy, optimizer=optimizer)
    assert isinstance(step, OptimizedStep)
    other = copy.deepcopy(model)
    eager = eager_step(other, sgd(other.parameters()))
    for batch in others:
        close(step(*batch), eager(*batch))


def test_results_of_nan_are_refused_by_their_name() -> None:
    with pytest.warns(UserWarning, match="outputs of the step are NaN on these inputs, so nothing can be compared"):
        fast(net().eval(), torch.full((4, 6), float("nan")))


class Masks(Net):
    """Returns scores of which some are masked."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).masked_fill(torch.eye(len(x), 5, dtype=torch.bool), -torch.inf)


def test_masked_scores_are_results_like_others() -> None:
    torch.manual_seed(0)
    model = Masks().eval()
    step = fast(model, X)
    assert isinstance(step, OptimizedStep)
    with torch.no_grad():
        close(step(X[[1, 0, 2, 3]]), model(X[[1, 0, 2, 3]]))


def test_an_expanded_buffer_is_put_back() -> None:
    model = net().eval()
    model.register_buffer("factors", torch.randn(6).expand(4, 6))
    model.register_forward_pre_hook(lambda module, given: (given[0] * module.factors,))
    before = model.factors.clone()
    step = fast(model, X)
    assert isinstance(step, OptimizedStep)
    assert torch.equal(model.factors, before)
    with torch.no_grad():
        close(step(X), model(X))


@pytest.mark.parametrize(
    ("make", "given", "expected"),
    [
        (lambda: nn.LazyLinear(3), X, r"'weight' has no shape yet: call the lazy module once"),
        (net, [X, X[:2]], "an argument is a nested tensor, which has no shape"),
    ],
)
def test_tensors_without_a_shape(make: Callable[[], nn.Module], given: Any, expected: str) -> None:
    model = make()
    x = torch.nested.nested_tensor(given) if isinstance(given, list) else given
    with pytest.warns(UserWarning, match=expected):
        assert fast(model, x) is model


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_an_object_of_cpp_among_arguments() -> None:
    weight = torch.quantize_per_tensor(torch.ones(3, 6), 0.1, 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(weight, None)

    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.quantized.linear_dynamic(x, packed)

    with pytest.warns(UserWarning, match=r"quantized.linear_dynamic.default takes an object of C\+\+"):
        assert fast(step, X) is step


def test_a_class_whose_module_is_no_text_is_the_users() -> None:
    """Cython's have a descriptor there."""
    assert is_users(vars(type)["__doc__"])
    assert not is_torchs(None)
    assert not is_users("torch.nn")


def test_parameters_thawed_have_no_momentum_yet() -> None:
    """Others have: SGD's fused kernel takes all or none."""
    model, other = net(), net()
    for each in (model, other):
        each.left.requires_grad_(False)
    step = fast(model, batches(1)[0], loss=F.cross_entropy, optimizer=sgd(model.parameters()))
    eager = eager_step(other, sgd(other.parameters()))
    made = captures(step)
    for number, (x, y) in enumerate(batches(5)):
        if number == 2:
            for each in (model, other):
                each.left.requires_grad_(True)
        close(step(x, y), eager(x, y))
    same_states(model.state_dict(), other.state_dict())
    assert made == [1]


@pytest.mark.parametrize(("dropout", "reentrant"), [(0.5, False), (0.5, True), (0.0, False)])
def test_what_a_checkpoint_draws_again_is_refused(dropout: float, reentrant: bool) -> None:
    """Eager goes back to the random numbers of the first run, and a captured step goes on."""
    model = net(dropout)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        loss = F.cross_entropy(checkpoint(model, x + model.left.bias.mean(), use_reentrant=reentrant), y)
        loss.backward()
        return loss.detach()

    if dropout:
        with pytest.warns(UserWarning, match=r"under torch.utils.checkpoint draws random numbers \(dropout\)"):
            assert fast(step, batches(1)[0]) is step
    else:
        assert isinstance(fast(step, batches(1)[0]), OptimizedStep)


class FlatWeights(nn.Module):
    """Sees its weights as one tensor on their memory, as cuDNN's recurrent layers do."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.randn(42, generator=torch.Generator().manual_seed(1))
        self.one, self.two = nn.Parameter(flat[:18].view(3, 6)), nn.Parameter(flat[18:].view(4, 6))
        self.head = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            part = torch.empty(0).set_(self.one.untyped_storage(), 6, (3, 5), (6, 1))  # type: ignore[call-overload]
            whole = torch.empty(0).set_(self.two.untyped_storage())  # type: ignore[call-overload]
        scale: torch.Tensor = part.mean() + whole[-1]
        products = torch.cat([x @ self.one.T, x @ self.two.T], 1)
        scores: torch.Tensor = self.head(products * scale)
        return scores


@pytest.mark.parametrize("frontend", ["aten", "inductor"])
def test_a_tensor_put_onto_the_memory_of_weights_sees_their_changes(frontend: str) -> None:
    models = FlatWeights(), FlatWeights()
    models[1].load_state_dict(models[0].state_dict())
    steps = [eager_step(model, sgd(model.parameters())) for model in models]
    optimized = fast(steps[0], (X, torch.tensor([0, 1, 2, 0])), frontends=(frontend,))
    assert isinstance(optimized, OptimizedStep)
    for number in range(3):
        batch = X * (1 + number), torch.tensor([number % 3, 1, 2, 0])
        close(optimized(*batch), steps[1](*batch))
    same_states(*(model.state_dict() for model in models))


def put(storage: torch.UntypedStorage, *place: Any) -> torch.Tensor:
    return torch.empty(0).set_(storage, *place)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (
            lambda x: x + put(torch.UntypedStorage(24)),
            r"puts a tensor onto memory \(set_\) of which it knows no tensor",
        ),
        # Places count from the begin of the storage, and an argument may lie anywhere in its own.
        (lambda x: (x + 1).sum() + put(x.untyped_storage(), 0, (6,)), r"onto the memory of an argument or a state"),
    ],
)
def test_a_tensor_put_onto_other_memory_is_refused(step: Callable[..., Any], why: str) -> None:
    with pytest.warns(UserWarning, match=why):
        assert fast(step, X) is step


def test_elements_of_a_tensor_put_onto_weights_are_no_constants() -> None:
    weight = torch.randn(6, generator=torch.Generator().manual_seed(2))

    def step(x: torch.Tensor) -> torch.Tensor:
        total = weight.sum()
        return x * torch.zeros(0).set_(weight.untyped_storage(), 0, (6,))[1].item() + total  # type: ignore[call-overload,no-any-return]

    with pytest.warns(UserWarning, match=r"reads the elements of a tensor \(item\(\)"):
        assert fast(step, X) is step


def test_a_tensor_put_onto_memory_of_the_step_or_of_a_closure() -> None:
    weight = torch.randn(6, 4, generator=torch.Generator().manual_seed(2))

    def step(x: torch.Tensor) -> torch.Tensor:
        own = x @ weight
        return put(own.untyped_storage(), 0, (2, 8)).tanh() @ put(weight.untyped_storage(), 4, (8, 2), (1, 8))

    optimized = fast(step, X)
    assert isinstance(optimized, OptimizedStep)
    for factor in (1, 2):
        weight.mul_(factor)
        close(optimized(X * factor), step(X * factor))
