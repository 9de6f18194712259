"""Memory plans on a GPU: the user's own step within a limit, and the link to the host that plans are predicted with."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F  # noqa: N812  (torch's own habit)

from gpusim.gpu.calibrate.copies import CopyBench, link
from gpusim.gpu.optimize.callable import OptimizedStep
from gpusim.gpu.optimize.on_cuda import CudaExecutor
from tests.gpu.optimize.test_memory_limit import CLASSES, WIDTH, chain, sgd
from tests.support.optimizing import Batch, close, eager_step, fast, same_states

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
#: Enough for activations of 4 MiB, beside which weights and blocks count for nothing.
ROWS = 1 << 17


@pytest.fixture(autouse=True)
def _always_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the schedule without a limit as a gain."""
    monkeypatch.setattr(CudaExecutor, "time_call_ns", lambda _, call: (call(), 0)[1])


def batch(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    return x.cuda(), torch.randint(0, CLASSES, (ROWS,), generator=generator).cuda()


@pytest.mark.parametrize("share", [0.8, 0.65])
def test_training_within_a_limit_is_that_of_eager(share: float) -> None:
    """The measured peak keeps the limit, and losses, parameters and running means are eager's over several steps."""

    def within(limit_bytes: int | None) -> OptimizedStep:
        made = fast(
            model, batch(0), loss=F.cross_entropy, optimizer=optimizer, executor=CudaExecutor(), streams=1,
            memory_limit_bytes=limit_bytes, warn=pytest.fail,
        )  # fmt: skip
        assert isinstance(made, OptimizedStep)
        return made

    model = chain().cuda()
    optimizer = sgd(model.parameters())
    free = within(None).gain
    assert free is not None
    limit = round(share * free.peak_bytes)
    step = within(limit)
    assert step.gain is not None
    assert step.gain.policy == "memory plan, least_time"
    assert step.gain.peak_bytes <= limit
    twin = copy.deepcopy(model)
    eager = eager_step(twin, sgd(twin.parameters()))
    for seed in range(4):
        x, y = batch(seed)
        close(step(x, y), eager(x, y))
    same_states(model.state_dict(), twin.state_dict())


def test_measured_link_is_one_of_a_bus() -> None:
    """From PCIe 3.0 with few lanes to links between chips; both directions within a factor of three."""
    measured = link(CopyBench())
    assert measured is not None
    rates = (measured.h2d_bytes_per_ns, measured.d2h_bytes_per_ns)
    assert all(2.0 < rate < 900.0 for rate in rates)
    assert max(rates) < 3 * min(rates)
