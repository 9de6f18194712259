"""Recording of calls that CPUs do not have: stand-ins are registered as operators."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch

from gpusim.errors import CaptureError
from gpusim.gpu.capture.calls import State
from gpusim.gpu.capture.listen import Listener

CPU = torch.device("cpu")


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    """Operators with a result elsewhere: `meta` stands for the host, which on a GPU is another device."""
    made = torch.library.Library("gpusim_listen_test", "DEF")
    made.define("attention(Tensor x) -> (Tensor, Tensor)")
    made.define("to_host(Tensor x) -> Tensor")
    made.define("backward(Tensor x, Tensor seed) -> Tensor")
    made.impl("attention", lambda x: (x + 1, torch.empty((), device="meta")), "CPU")
    made.impl("to_host", lambda x: torch.empty(x.shape, device="meta"), "CPU")
    for device in ("CPU", "Meta"):
        made.impl("backward", lambda x, _: torch.ones(x.shape), device)
    yield made
    made._destroy()


def test_attention_whose_seed_is_on_the_host_is_recorded_and_its_backward_takes_the_seed(
    library: torch.library.Library,
) -> None:
    calls = torch.ops.gpusim_listen_test
    listener = Listener(CPU)

    def step() -> None:
        y, seed = calls.attention(torch.ones(2))
        calls.backward(y, seed)

    listener.listen(step)
    assert [str(call.function.name()) for call in listener.calls[-2:]] == [
        "gpusim_listen_test::attention",
        "gpusim_listen_test::backward",
    ]
    y, seed = listener.calls[-1].args
    assert (y.node, y.index, seed.node, seed.index) == (listener.calls[-2].name, 0, listener.calls[-2].name, 1)


def test_a_host_tensor_put_onto_its_memory_is_no_part_of_a_gpu_step() -> None:
    listener = Listener(torch.device("cuda"))
    given = torch.zeros(3)
    assert torch.equal(listener.listen(lambda: copy.deepcopy(given) + 1), torch.ones(3))
    assert listener.calls == []


def test_step_that_copies_to_the_host_is_refused(library: torch.library.Library) -> None:
    with pytest.raises(CaptureError, match="copies a tensor to the host"):
        Listener(CPU).listen(lambda: torch.ops.gpusim_listen_test.to_host(torch.ones(2)))


def read(make: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Return the number that a step reads from a tensor; data are `x`."""
    x = torch.arange(3.0)
    return bool(Listener(CPU, [State("x", "input", x)]).listen(lambda: (make(x).sum() > 0).item()))


def into_memory_of_a_row(x: torch.Tensor) -> torch.Tensor:
    made = torch.zeros(2, 3)
    row = made[0]
    made.copy_(x)
    return row


FIXED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "computed from a range": lambda _: torch.arange(8).expand(2, 8).diff(),
    "as large as data": lambda x: torch.ones_like(x),
    "changed in place": lambda x: x.new_zeros(2).add_(1)[:1],
    "copied from fixed": lambda _: torch.zeros(2, 2).copy_(torch.eye(2))[0] * torch.tensor(2.0),
}
VARYING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "data": lambda x: x,
    "computed from data": lambda x: torch.ones(3) * x,
    "overwritten": lambda x: torch.zeros(3).copy_(x),
    "view of what is overwritten": into_memory_of_a_row,
    "drawn in place": lambda _: torch.zeros(3).uniform_(),
    "drawn as large as fixed": lambda _: torch.rand_like(torch.ones(3)),
    "empty": lambda _: torch.empty_like(torch.ones(3)),
    "constant of the code, overwritten": lambda x: torch.tensor(1.0).mul_(x[1]),
}


@pytest.mark.parametrize("name", FIXED)
def test_what_follows_from_shapes_may_be_read(name: str) -> None:
    assert read(FIXED[name])


@pytest.mark.parametrize("name", VARYING)
def test_what_depends_on_data_or_chance_may_not(name: str) -> None:
    with pytest.raises(CaptureError, match="reads the elements"):
        read(VARYING[name])
