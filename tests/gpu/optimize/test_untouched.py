"""What a step's trial runs change is put back, wherever it lies, also where the step comes back as it was."""

from __future__ import annotations

import random
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.optimizing import FEATURES, Net, batches, close, fast, net

X = batches(1)[0][0]

Held = tuple[Callable[[], Any], Callable[[Any], object], Callable[[Any], Any]]


def draw(generator: torch.Generator) -> torch.Tensor:
    return torch.rand(1, generator=generator)


def bits_of(generator: np.random.Generator) -> str:
    return str(generator.bit_generator.state)


#: Object that a step holds -> its maker, what a run changes about it, and how that is seen.
HELD: dict[str, Held] = {
    "tensor": (lambda: torch.zeros(3), lambda held: held.add_(1), torch.Tensor.tolist),
    "array": (lambda: np.zeros(3), lambda held: np.add(held, 1, out=held), np.ndarray.tolist),
    "set": (set, lambda held: held.add(len(held)), sorted),
    "deque": (lambda: deque([1, 2, 3]), deque.rotate, list),
    "long list": (lambda: [0] * 2000, lambda held: held.append(1), len),
    "long dict": (lambda: dict.fromkeys(range(2000)), lambda held: held.setdefault(len(held)), len),
    "generator of torch": (torch.Generator, draw, lambda held: held.get_state().tolist()),
    "generator of Python": (lambda: random.Random(1), random.Random.random, random.Random.getstate),
    "generator of NumPy": (np.random.default_rng, np.random.Generator.random, bits_of),
}


class Holds(Net):
    """Holds an object that each run changes, and reads elements, which is refused only once it is recorded."""

    def __init__(self, held: Any, change: Callable[[Any], object]) -> None:
        super().__init__()
        self.held, self.change = held, change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change(self.held)
        return super().forward(x) if x.sum() < 1e9 else x


@pytest.mark.parametrize("kind", HELD)
@pytest.mark.parametrize("in_module", [True, False])
def test_what_a_refused_step_has_changed_is_put_back(kind: str, in_module: bool) -> None:
    make, change, seen = HELD[kind]
    held = make()
    model = Holds(held, change)

    def step(x: torch.Tensor) -> torch.Tensor:
        change(held)
        return x * 2 if x.sum() < 1e9 else x

    before = seen(held)
    target = model if in_module else step
    with pytest.warns(UserWarning, match="runs as it is"):
        assert fast(target, X) is target
    assert seen(held) == before


def test_a_tensor_that_changes_and_is_no_buffer_is_named() -> None:
    kept = torch.zeros(FEATURES)
    with pytest.warns(UserWarning, match=rf"a tensor of shape \[{FEATURES}\] that is no buffer"):
        fast(lambda x: x + kept.add_(1), X)
    assert not kept.any()


@pytest.mark.parametrize("key", ["x", "y"])
def test_a_step_that_changes_lists_and_dicts_it_is_given_comes_back(key: str) -> None:
    """A captured step would leave them as they are."""

    def step(batch: dict[str, Any]) -> torch.Tensor:
        (x, *_) = batch["x"]
        batch["x"].append(x) if key == "x" else batch.pop("y")
        return x * 2

    batch = {"x": [X], "y": X}
    with pytest.warns(UserWarning, match=rf"arguments\[0\]\.{key}"):
        assert fast(step, (batch,)) is step
    assert len(batch) == 2
    assert len(batch["x"]) == 1


class Reshapes(Net):
    def __init__(self, change: Callable[[Any, torch.Tensor], object]) -> None:
        super().__init__()
        self.change = change
        self.register_buffer("extra", torch.ones(3, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.change(self, x)
            return x * self.left.weight.sum() * self.extra.sum()


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda _, x: x.unsqueeze_(0), id="argument"),
        pytest.param(lambda model, _: model.left.weight.t_(), id="parameter"),
        pytest.param(lambda model, _: model.extra.resize_(model.extra.numel() + 1).fill_(1.0), id="buffer"),
    ],
)
def test_a_step_that_reshapes_what_it_is_given_comes_back(change: Callable[[Any, torch.Tensor], object]) -> None:
    """No trace has that: operators have results of their own shape."""
    model = Reshapes(change)
    tensors = [X, *model.parameters(), *model.buffers()]
    before = [(each.shape, each.stride(), each.tolist()) for each in tensors]
    with pytest.warns(UserWarning, match="changes the shape or strides"):
        assert fast(model, X) is model
    assert [(each.shape, each.stride(), each.tolist()) for each in tensors] == before


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch will move quantization elsewhere
        return torch.quantize_per_tensor(torch.ones(FEATURES), 0.1, 0, torch.qint8)


def of_inference_mode() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(FEATURES)


@pytest.mark.parametrize(
    ("make", "use"),
    [
        pytest.param(lambda: torch.eye(4).to_sparse(), torch.mm, id="sparse"),
        pytest.param(nested, lambda kept, x: x * kept.numel(), id="nested"),
        pytest.param(quantized, lambda kept, x: x * kept.dequantize(), id="quantized"),
        pytest.param(of_inference_mode, lambda kept, x: x * kept, id="inference"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*prototype.*", "ignore:.*uantiz.*")
def test_tensors_without_plain_memory_are_no_obstacle(
    make: Callable[[], torch.Tensor], use: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    """Whether such a step is captured or comes back, it computes the same."""
    kept, model = make(), net().eval()

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return use(kept, model(x) @ torch.ones(5, FEATURES))

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "gpusim.optimize")
        found = fast(step, X)
    close(found(X), step(X))
