"""Steps that cannot be optimized run unchanged, with one warning line, and the user's objects stay as they were."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (torch's own habit)

import gpusim
from gpusim.errors import OptionError
from gpusim.formats.hardware import HardwareModel
from gpusim.gpu.optimize import callable as callables
from gpusim.gpu.optimize.callable import OptimizedStep
from gpusim.gpu.optimize.captured import Captured
from gpusim.gpu.optimize.executors import CpuExecutor
from tests.support.optimizing import Net, batches, close, eager_step, fast, hidden, net, same_states, tick, warned

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class Reads(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x


class ShapesFromData(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x > 0].sum()


class Counts(Net):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


class Replaces(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return super().forward(x - self.mean)


class Drifts(Net):
    """Another factor each time, unknown to torch's random state."""

    ticks = hidden(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * float(tick(self.ticks))


class Varies(Net):
    """Another operator each time."""

    ticks = hidden(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y.relu() if tick(self.ticks) % 2 else y.sigmoid()


class Fails(Net):
    """Notes its call in a list of its own, and fails at one of them."""

    def __init__(self, at: int, error: type[BaseException]) -> None:
        super().__init__()
        self.ticks, self.at, self.error = hidden(0), at, error
        self.notes: dict[str, bool] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.notes["first"] = True
        if tick(self.ticks) == self.at:
            raise self.error("once")
        return super().forward(x)


class Box:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Boxes(Net):
    def forward(self, x: torch.Tensor) -> Any:
        return Box(super().forward(x))


class Appends(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x)
        return super().forward(x)


class Remembers(Net):
    last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = super().forward(x)
        return self.last


CALLS = 0
ACTIVATIONS: list[torch.Tensor] = []
LATEST = {"activation": torch.zeros(())}


class CountsElsewhere(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global CALLS
        CALLS += 1
        return super().forward(x)


class AppendsElsewhere(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ACTIVATIONS.append(x)
        return super().forward(x)


class RemembersElsewhere(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        LATEST["activation"] = x + 1
        return super().forward(x)


class Tables(Net):
    """Makes a table at its first call and keeps it, as many position encodings do."""

    table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(6.0) / 6
        return super().forward(x + self.table)


class Raises(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("this model does not work")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Reads, "reads the elements of a tensor"),
        (ShapesFromData, "depends on data"),
        (Counts, "changes the Python attribute 'calls' of Counts"),
        (Replaces, "replaces the buffer 'mean' of Replaces"),
        (Drifts, "changes from step to step"),
        (Varies, "is not the same each time"),
        (Boxes, "returns a Box"),
        (Raises, "this model does not work"),
    ],
)
def test_a_model_that_cannot_be_captured_comes_back_with_one_warning(kind: type[nn.Module], expected: str) -> None:
    torch.manual_seed(0)
    model = kind()
    before = copy.deepcopy(model.state_dict())
    attributes = {key: value for key, value in vars(model).items() if not key.startswith("_")}
    random = torch.get_rng_state()
    found, text = warned(lambda: fast(model, X))
    assert found is model
    assert expected in text
    same_states(model.state_dict(), before)
    assert {key: value for key, value in vars(model).items() if not key.startswith("_")} == attributes
    assert torch.equal(torch.get_rng_state(), random)


def test_a_mask_that_an_encoder_looks_at_is_named_with_a_way_out() -> None:
    """Whether it is padded at the end decides which kernels run."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    x, mask = torch.randn(2, 5, 8), torch.zeros(2, 5, dtype=torch.bool)

    def step(encoder: nn.Module) -> Callable[..., torch.Tensor]:
        def infer(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                return encoder(x, src_key_padding_mask=mask)

        return infer

    infer = step(nn.TransformerEncoder(layer, 2).eval())
    with warnings.catch_warnings(action="ignore"):
        infer(x, mask)  # torch warns once that nested tensors may change
    found, text = warned(lambda: fast(infer, (x, mask)))
    assert found is infer
    assert "enable_nested_tensor=False" in text
    infer = step(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval())
    captured = fast(infer, (x, mask))
    assert isinstance(captured, OptimizedStep)
    mask = mask.clone()
    mask[0, 3:] = True
    close(captured(x, mask), infer(x, mask))


OPTIONS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "rate": lambda group: group["lr"],
    "option": lambda group: group["fused"],
    "numbers": lambda group: [value for value in group.values() if isinstance(value, float)],
}


@pytest.mark.parametrize("kind", OPTIONS)
def test_options_that_a_capture_changes_are_not_returned(kind: str) -> None:
    """While a step is recorded its rate is a tensor, and its optimizer fused."""
    model = nn.Linear(6, 5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach(), OPTIONS[kind]({key: optimizer.param_groups[0][key] for key in ("lr", "fused")})

    found, text = warned(lambda: fast(step, X))
    assert found is step
    assert "captured, the step returns" in text


@pytest.mark.parametrize(("kind", "attribute"), [(Appends, "seen"), (Remembers, "last")])
def test_what_a_module_keeps_of_each_call_is_named_and_put_back(kind: type[nn.Module], attribute: str) -> None:
    model = kind().eval()
    before = copy.copy(getattr(model, attribute))
    step, text = warned(lambda: fast(model, X))
    assert step is model
    assert f"the step changes '{kind.__name__}.{attribute}'" in text
    assert getattr(model, attribute) == before


@pytest.mark.parametrize(
    ("kind", "name"),
    [(CountsElsewhere, "CALLS"), (AppendsElsewhere, "ACTIVATIONS"), (RemembersElsewhere, "LATEST.activation")],
)
def test_what_a_module_changes_elsewhere_is_named_and_put_back(kind: type[nn.Module], name: str) -> None:
    model = kind().eval()
    before = copy.copy(LATEST)
    step, text = warned(lambda: fast(model, X))
    assert step is model
    assert f"the step changes '{name}'" in text
    assert CALLS == len(ACTIVATIONS) == 0
    assert before == LATEST


def test_what_a_module_makes_at_its_first_call_only_is_no_obstacle() -> None:
    model = Tables().eval()
    step = fast(model, X)
    assert isinstance(step, OptimizedStep)
    with torch.no_grad():
        close(step(X), model(X))


def test_a_training_step_that_cannot_be_captured_still_trains() -> None:
    torch.manual_seed(0)
    model = Counts()
    other = copy.deepcopy(model)
    step, text = warned(
        lambda: fast(model, batches(1)[0], loss=F.cross_entropy, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    )
    assert "attribute 'calls'" in text
    theirs = eager_step(other, torch.optim.SGD(other.parameters(), lr=0.1))
    for x, y in batches(3):
        close(step(x, y), theirs(x, y))
    assert model.calls == other.calls == 3


@pytest.mark.parametrize("at", [1, 2, 3, 6, 8])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_step_that_fails_at_any_of_its_runs_stays_as_it_was(at: int, error: type[BaseException]) -> None:
    """Runs are: twice for the eager time, three times for the recording, then for the comparison."""
    model = Fails(at, error)
    before = copy.deepcopy(model.state_dict())
    data, optimizer = batches(1)[0], torch.optim.Adam(model.parameters())

    def run() -> Any:
        return fast(model, data, loss=F.cross_entropy, optimizer=optimizer)

    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            run()
    else:
        assert "fails" in warned(run)[1]
    same_states(model.state_dict(), before)
    assert not optimizer.state
    assert not model.notes or at > 2  # afterwards it is a note of the first run, which eager makes too


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_comes_back_with_one_warning() -> None:
    x = torch.randn(2, 6)
    scripted = torch.jit.trace(nn.Sequential(nn.Linear(6, 6), nn.ReLU()).eval(), x)
    with pytest.warns(UserWarning, match="TorchScript"):
        assert fast(scripted, x) is scripted


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.LBFGS])
def test_an_optimizer_that_cannot_be_captured_still_trains(kind: Callable[..., torch.optim.Optimizer]) -> None:
    model, other = net(), net()
    mine, theirs = kind(model.parameters()), kind(other.parameters())
    step, text = warned(lambda: fast(model, batches(1)[0], loss=F.cross_entropy, optimizer=mine))
    assert f"optimizer {kind.__name__} cannot be captured" in text
    for x, y in batches(2):

        def loss(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            theirs.zero_grad()
            value = F.cross_entropy(other(x), y)
            value.backward()
            return value

        close(step(x, y), theirs.step(loss))
    same_states(model.state_dict(), other.state_dict())


def test_a_scheduler_inside_the_step_is_named() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    inner = eager_step(model, optimizer)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = inner(x, y)
        schedule.step()
        return loss

    found, text = warned(lambda: fast(step, batches(1)[0]))
    assert found is step
    assert "changes 'lr' of SGD" in text
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert schedule.last_epoch == 0


def test_without_a_gpu_the_users_own_comes_back() -> None:
    model = net()
    found, text = warned(lambda: gpusim.optimize(model, X))
    assert found is model
    assert "sees no GPU" in text
    step, _ = warned(lambda: gpusim.optimize(model, batches(1)[0], loss=F.cross_entropy))
    x, y = batches(1)[0]
    assert step(x, y).dim() == 0


class Failing(CpuExecutor):
    """A device with too little memory for the step, or with an error of its own."""

    def __init__(self, error: RuntimeError) -> None:
        self.error = error

    def measured(self, captured: Captured, eager_ns: int, say: Callable[[str], None]) -> Any:
        raise self.error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.\nmore"), "CUDA out of memory"),
        (torch.cuda.OutOfMemoryError(), "OutOfMemoryError"),
        (torch.AcceleratorError("CUDA error: an illegal memory access\nmore"), "illegal memory access"),
    ],
)
def test_an_error_of_the_device_leaves_the_model_usable(error: RuntimeError, words: str) -> None:
    model = net()
    before = copy.deepcopy(model.state_dict())
    found, text = warned(lambda: fast(model, X, executor=Failing(error)))
    assert found is model
    assert words in text
    same_states(model.state_dict(), before)


class FailingLater(Failing):
    def measured(self, captured: Captured, eager_ns: int, say: Callable[[str], None]) -> Any:
        if captured.options.batch == len(X):
            return CpuExecutor.measured(self, captured, eager_ns, say)
        raise self.error


def test_an_error_without_a_text_at_another_shape_is_named_by_its_type() -> None:
    model = net().eval()
    step = fast(model, X, executor=FailingLater(torch.cuda.OutOfMemoryError()))
    with torch.no_grad():
        found, text = warned(lambda: step(X[:2]))
        close(found, model(X[:2]))
    assert "OutOfMemoryError" in text


class Calibrated(CpuExecutor):
    def hardware(self) -> tuple[HardwareModel, bool]:
        return super().hardware()[0], True


def test_the_line_says_whether_the_gpu_is_calibrated() -> None:
    """Without a model of this GPU the trial decides."""
    assert fast(net().eval(), X).gain.text.endswith("; decided by trial alone (this GPU is not calibrated)")
    assert fast(net().eval(), X[:3], executor=Calibrated()).gain.text.endswith("; decided by search and trial")


def test_other_shapes_are_optimized_and_too_many_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callables, "MOST_VARIANTS", 3)
    model = net().eval()
    step = fast(model, X)
    with torch.no_grad():
        for size in (4, 2, 3):
            x = torch.randn(size, 6)
            close(step(x), model(x))
        assert len(step._variants) == 3
        x = torch.randn(7, 6)
        found, text = warned(lambda: step(x))
        close(found, model(x))
        assert "more than 3 shapes" in text
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for size in (8, 7, 2):
                x = torch.randn(size, 6)
                close(step(x), model(x))
    assert len(step._variants) == 3


def test_a_shape_that_cannot_be_captured_warns_once_and_runs() -> None:
    class Odd(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if len(x) == 4 or x.sum() < 1e9 else x

    torch.manual_seed(0)
    model = Odd().eval()
    step = fast(model, X)
    assert isinstance(step, OptimizedStep)
    x = torch.randn(5, 6)
    with torch.no_grad():
        found, _ = warned(lambda: step(x))
        close(found, model(x))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            close(step(x), model(x))


def test_a_wrong_call_fails_as_the_model_does() -> None:
    model = net().eval()
    step = fast(model, X)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        step(torch.randn(4, 7))


def test_inputs_whose_gradient_is_wanted_run_eagerly() -> None:
    model = net().eval()
    step = fast(model, X)
    x = X.clone().requires_grad_()
    step(x).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"streams": 0}, "streams"),
        ({"streams": "many"}, "streams"),
        ({"budget_s": -1.0}, "budget_s"),
        ({"budget_s": float("nan")}, "budget_s"),
        ({"memory_limit": "lots"}, "memory_limit"),
        ({"memory_limit": 0}, "memory_limit"),
        ({"memory_limit": 1.5}, "memory_limit"),  # meant as GiB?
        ({"memory_limit": b"8"}, "memory_limit"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(OptionError, match=named):
        gpusim.optimize(net(), X, **arguments)


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(OptionError, match="step function"):
        gpusim.optimize(3, X)


def test_loss_that_is_no_function_is_named_also_without_a_gpu() -> None:
    with pytest.raises(OptionError, match="loss"):
        gpusim.optimize(net(), (X, X), loss=3)  # type: ignore[arg-type]


def test_a_memory_limit_is_kept_or_the_step_runs_as_it_is() -> None:
    model = net().eval()
    free = fast(model, X).gain.peak_bytes
    least = fast(model, X, streams=1).gain.peak_bytes
    kept = fast(model, X, memory_limit_bytes=least)
    assert isinstance(kept, OptimizedStep)
    assert kept.gain.peak_bytes <= least <= free
    found, text = warned(lambda: fast(model, X, memory_limit_bytes=100))
    assert found is model
    assert "memory limit 100 B: the least that any schedule takes is " in text
    assert "; no plan keeps 100 B; the smallest budget that works for a plan found here is 7 KiB: " in text


def test_optimized_step_and_its_gain_are_short_in_a_terminal_and_tables_in_a_notebook() -> None:
    model = net().eval()
    step = fast(model, X)
    assert repr(step).startswith("<OptimizedStep Net: ")
    assert repr(step.gain).startswith("<Gain ")
    for value in (step, step.gain):
        assert "x over eager" in repr(value)
        assert len(repr(value)) < 200
        assert value._repr_html_().count("<table>") == 1
    step.gain = None
    assert repr(step) == "<OptimizedStep Net: unoptimized>"
    assert "unoptimized" in step._repr_html_()
