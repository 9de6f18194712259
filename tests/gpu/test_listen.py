"""Recording of calls that CPUs do not have: stand-ins are registered as operators."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gpusim.errors import CaptureError
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


def test_step_that_copies_to_the_host_is_refused(library: torch.library.Library) -> None:
    with pytest.raises(CaptureError, match="copies a tensor to the host"):
        Listener(CPU).listen(lambda: torch.ops.gpusim_listen_test.to_host(torch.ones(2)))
