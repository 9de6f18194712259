"""`torch.compile(model, backend="gpusim")`: forward and backward as two captured steps, on the CPU."""

from __future__ import annotations

import copy
import threading
import tomllib
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (torch's own habit)
from torch.utils.checkpoint import checkpoint

from gpusim.errors import OptionError, ReplayError
from gpusim.gpu.inductor import versions
from gpusim.gpu.optimize import choose, dynamo
from gpusim.gpu.optimize.alone import alone
from gpusim.gpu.optimize.choose import Wanted
from gpusim.gpu.optimize.executors import CpuExecutor
from gpusim.gpu.optimize.variant import Variant
from tests.support.optimizing import Net, batches, close, eager_step, net, same_states

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:torch.*")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the parts that ran from captured steps, in order."""
    seen: list[str] = []
    run = Variant.run

    def counted(self: Variant, tensors: Sequence[torch.Tensor]) -> Any:
        seen.append(self.captured.options.spec.rpartition(" ")[2])
        return run(self, tensors)

    monkeypatch.setattr(Variant, "run", counted)
    return seen


def backend(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    return dynamo.compiled(module, inputs, Wanted(3, 0.02, None), CpuExecutor())


def by_inductor(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    return dynamo.compiled(module, inputs, Wanted(3, 0.02, None, frontends=("inductor",)), CpuExecutor())


def twins(dropout: float = 0.3) -> tuple[Net, Any, Net]:
    model = net(dropout)
    return model, torch.compile(model, backend=backend), copy.deepcopy(model)


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.SGD])
def test_training_is_that_of_eager_from_captured_graphs(
    make: Callable[..., torch.optim.Optimizer], runs: list[str]
) -> None:
    model, fast, other = twins()
    mine, theirs = (eager_step(m, make(p.parameters(), lr=0.05)) for m, p in ((fast, model), (other, other)))
    data = batches(6)
    for number, (x, y) in enumerate(data):
        if number == 1:
            runs.clear()  # without those of trials and checks
        torch.manual_seed(number)
        loss = mine(x, y)
        torch.manual_seed(number)
        close(loss, theirs(x, y))
    same_states(model.state_dict(), other.state_dict())
    assert runs == ["forward", "backward"] * (len(data) - 1)


@pytest.mark.parametrize("made_by", [backend, by_inductor])
def test_inference_and_what_it_returned_stays(runs: list[str], made_by: Callable[..., Any]) -> None:
    model = net().eval()
    fast = torch.compile(model, backend=made_by)
    with torch.no_grad():
        first = fast(batches(2)[0][0])
        kept = first.clone()
        runs.clear()
        for x, _ in batches(3, seed=5):
            close(fast(x), model(x))
        assert torch.equal(first, kept)
    assert runs == ["inference"] * 3


def test_each_graph_says_its_gain_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    _, fast, _ = twins(dropout=0.0)
    for x, y in batches(2):
        F.cross_entropy(fast(x), y).backward()
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("gpusim, ")]
    assert [line.partition(":")[0] for line in lines] == ["gpusim, forward", "gpusim, backward"]
    assert all("a step" in line and "kernels of ATen" in line for line in lines)


def test_a_graph_says_why_it_is_without_inductors_kernels(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "SUPPORTED", ("1.0",))
    monkeypatch.setattr(choose, "KERNELS_FROM_S", 0.0)
    wanted = Wanted(3, 0.02, None, frontends=("aten", "inductor"))
    fast = torch.compile(
        net().eval(), backend=lambda module, inputs: dynamo.compiled(module, inputs, wanted, CpuExecutor())
    )
    with torch.no_grad():
        fast(batches(1)[0][0])
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("gpusim, inference")]
    assert "without Inductor's kernels: the front end 'inductor' knows torch 1.0" in line


def test_two_forwards_before_a_backward(runs: list[str]) -> None:
    """The second forward must not overwrite tensors that the first has saved; it runs uncaptured."""
    model, fast, other = twins(dropout=0.0)
    data = batches(4)
    F.cross_entropy(fast(data[0][0]), data[0][1]).backward()
    F.cross_entropy(other(data[0][0]), data[0][1]).backward()
    runs.clear()
    for each in (fast, other):
        losses = [F.cross_entropy(each(x), y) for x, y in data[1:3]]
        for loss in reversed(losses):
            loss.backward()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        close(one.grad, two.grad)
    same_states(model.state_dict(), other.state_dict())
    assert runs == ["forward", "backward"]


def test_a_graph_kept_for_a_second_backward() -> None:
    model, fast, other = twins(dropout=0.0)
    for x, y in batches(3):
        for each in (fast, other):
            loss = F.cross_entropy(each(x), y)
            loss.backward(retain_graph=True)
            loss.backward()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        close(one.grad, two.grad)


def test_gradients_accumulate_in_memory_of_their_own() -> None:
    model, fast, other = twins(dropout=0.0)
    for x, y in batches(5):
        for each in (fast, other):
            F.cross_entropy(each(x), y).backward()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        close(one.grad, two.grad)


def test_a_checkpoint_computes_the_forward_again(runs: list[str]) -> None:
    model, fast, other = twins(dropout=0.0)
    for number, (x, y) in enumerate(batches(3)):
        if number == 1:
            runs.clear()
        for each in (fast, other):
            F.cross_entropy(checkpoint(each, x, use_reentrant=False), y).backward()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        close(one.grad, two.grad)
    assert runs == ["forward", "forward", "backward"] * 2


def test_a_hook_that_copies_saved_tensors_has_each_of_them_if_it_is_there_from_the_start() -> None:
    """Later it would copy the token for all of them, without what it holds."""
    model, fast, other = twins(dropout=0.0)
    x, y = batches(1)[0]
    F.cross_entropy(fast(x), y).backward()
    hook = torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda copied: copied)
    with hook:
        loss = F.cross_entropy(fast(x), y)
    with pytest.raises(ReplayError, match="compile the model inside of it"):
        loss.backward()
    torch._dynamo.reset()
    model.zero_grad()
    with hook:
        with pytest.warns(UserWarning, match="hooks take each saved tensor"):
            mine = fast(x)
        losses = [F.cross_entropy(result, y) for result in (mine, other(x))]
    losses[1].backward()
    with pytest.warns(UserWarning, match="hooks take each saved tensor"):
        losses[0].backward()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        close(one.grad, two.grad)


def test_a_result_that_changes_before_its_backward_is_an_error_as_in_eager() -> None:
    """A forward that is not captured saves the very tensor that it returns."""
    fast = torch.compile(torch.sigmoid, backend=backend)
    x = torch.randn(4, 6, requires_grad=True)
    held = fast(x)
    result = fast(x)
    result.detach().mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()
    held.sum().backward()
    close(x.grad, held * (1 - held))


def test_a_weight_of_inference_mode_is_refused_as_in_eager() -> None:
    with torch.inference_mode():
        model = net().requires_grad_(False).eval()
    fast = torch.compile(model, backend=backend)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        fast(torch.randn(4, 6, requires_grad=True))


def test_compiled_autograd_runs_the_backward_in_a_graph_of_its_own() -> None:
    fast = torch.compile(lambda x, scale: x.sigmoid() * scale, backend=backend)
    x, scale = torch.randn(4, 6, requires_grad=True), torch.randn(4, 6)
    for _ in range(2):
        x.grad = None
        result = fast(x, scale)
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            result.sum().backward()
        close(x.grad, x.sigmoid() * (1 - x.sigmoid()) * scale)


def test_a_backward_is_captured_after_its_forward(runs: list[str]) -> None:
    """Not before: a forward that ran while another thread optimized a step is captured later."""
    _, fast, _ = twins()
    data = batches(3)
    with alone(wait=True):
        loss = F.cross_entropy(fast(data[0][0]), data[0][1])
    loss.backward()
    assert runs == []
    for x, y in data[1:]:
        runs.clear()
        F.cross_entropy(fast(x), y).backward()
    assert runs == ["forward", "backward"]


def test_a_weight_that_changes_before_its_backward_is_an_error_as_in_eager() -> None:
    model, fast, _ = twins()
    for x, y in batches(2):
        loss = F.cross_entropy(fast(x), y)
        with torch.no_grad():
            model.head.weight.mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_one_warning_where_the_captured_graph_stays_unused(runs: list[str]) -> None:
    _, fast, other = twins(dropout=0.0)
    data = batches(dynamo.WARNED_AFTER + 2)
    held = [F.cross_entropy(fast(x), y) for x, y in data[:1]]
    runs.clear()
    with pytest.warns(UserWarning, match="earlier calls still need its memory") as warned:
        held += [F.cross_entropy(fast(x), y) for x, y in data[1:]]
    assert len(warned) == 1
    assert runs == []
    for loss, (x, y) in zip(held, data, strict=True):
        close(loss, F.cross_entropy(other(x), y))


def test_other_shapes_compile_anew() -> None:
    model = net().eval()
    fast = torch.compile(model, backend=backend, dynamic=False)
    with torch.no_grad():
        for size in (4, 2, 4, 3):
            x = torch.randn(size, 6)
            close(fast(x), model(x))


def test_symbolic_shapes_run_as_they_are_with_a_warning() -> None:
    model = net().eval()
    fast = torch.compile(model, backend=backend, dynamic=True)
    x = torch.randn(5, 6)
    with torch.no_grad(), pytest.warns(UserWarning, match="shapes are symbolic"):
        close(fast(x), model(x))


def test_a_graph_break_leaves_two_captured_parts() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net().eval()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x).relu()
            torch._dynamo.graph_break()
            return y.sigmoid() + y.tanh()

    model = Broken()
    fast = torch.compile(model, backend=backend)
    x = torch.randn(4, 6)
    with torch.no_grad():
        for _ in range(3):
            close(fast(x), model(x))


def test_weights_loaded_later_are_used() -> None:
    model = net().eval()
    fast = torch.compile(model, backend=backend)
    x = torch.randn(4, 6)
    with torch.no_grad():
        close(fast(x), model(x))
        model.load_state_dict(net(seed=9).state_dict())
        close(fast(x), model(x))
        model.head.weight.data = torch.randn_like(model.head.weight)
        close(fast(x), model(x))


def test_without_a_gpu_the_model_runs_with_one_warning() -> None:
    model = net().eval()
    fast = torch.compile(model, backend=dynamo.gpusim, options={"streams": 4})
    x = torch.randn(4, 6)
    with torch.no_grad():
        with pytest.warns(UserWarning, match="sees no GPU"):
            close(fast(x), model(x))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            close(fast(x), model(x))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"stream": 4}, "stream"),
        ({"streams": 0}, "streams"),
        ({"budget_s": -1}, "budget_s"),
        ({"memory_limit": "x"}, "memory"),
        (3, "options=3"),
    ],
)
def test_options_that_are_none_are_refused(options: Any, named: str) -> None:
    with pytest.raises(OptionError, match=named):
        dynamo.gpusim(torch.fx.symbolic_trace(nn.ReLU()), [], options=options)
    with pytest.raises(OptionError, match="mode"):
        dynamo.gpusim(torch.fx.symbolic_trace(nn.ReLU()), [], mode="max-autotune")


def test_the_entry_point_names_the_backend() -> None:
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    named = tomllib.loads(text)["project"]["entry-points"]["torch_dynamo_backends"]
    module, _, function = named["gpusim"].partition(":")
    assert getattr(import_module(module), function) is dynamo.gpusim


def test_in_inference_mode_from_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph has one memory for its inputs: a second call begins when the first has its results."""
    model = net().eval()
    fast = torch.compile(model, backend=backend)
    inputs = [x for x, _ in batches(40, seed=3)]
    wrong: list[int] = []
    run = Variant.run

    def slow(self: Variant, tensors: Sequence[torch.Tensor]) -> Any:
        inside.append(1)
        wrong.extend([-1] * (len(inside) - 1))
        results = run(self, tensors)
        inside.pop()
        return results

    inside: list[int] = []

    def work(first: int) -> None:
        with torch.inference_mode():
            for place in range(first, len(inputs), 4):
                if not torch.allclose(fast(inputs[place]), model(inputs[place]), atol=1e-5):
                    wrong.append(place)

    with torch.inference_mode():
        close(fast(inputs[0]), model(inputs[0]))
    monkeypatch.setattr(Variant, "run", slow)
    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_graphs_that_cannot_be_captured_say_why() -> None:
    """One that only views, and one that draws again under a checkpoint."""

    def views(x: torch.Tensor) -> torch.Tensor:
        return x.view(-1)

    def draws(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda y: F.dropout(y, 0.5).sin(), x, use_reentrant=False)

    x = torch.randn(4, 6)
    with pytest.warns(UserWarning, match="computes nothing: its operators only view tensors; the inference"):
        assert torch.equal(torch.compile(views, backend=backend)(x), x.view(-1))
    with pytest.warns(UserWarning, match="calls 'run_and_save_rng_state', an operator that takes functions"):
        torch.compile(draws, backend=backend)(x.requires_grad_())


class Precomputed(torch.autograd.Function):
    """Computes its gradient in the forward, and returns it as a view of what is saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        scores = torch.softmax(x @ weight, -1)
        ctx.save_for_backward((x.t() @ scores).view(-1))
        loss: torch.Tensor = -scores.log().mean()
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, ctx.saved_tensors[0].view(6, 6)


@pytest.mark.filterwarnings("ignore:gpusim")
def test_a_gradient_that_the_forward_has_saved_outlives_the_next_forward() -> None:
    def loss(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = Precomputed.apply(x, weight)  # type: ignore[no-untyped-call]
        return result

    compiled = torch.compile(loss, backend=backend)
    mine, theirs = nn.Parameter(torch.eye(6)), nn.Parameter(torch.eye(6))
    for number in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
        compiled(x, mine).backward()
        loss(x, theirs).backward()
        close(mine.grad, theirs.grad)


def test_a_view_of_an_inputs_memory_runs_as_it_is() -> None:
    def windows(signal: torch.Tensor) -> torch.Tensor:
        return signal.as_strided((2, 3), (2 * signal.stride(0), signal.stride(0))) * 1.0

    compiled = torch.compile(windows, backend=backend)
    signals = [torch.arange(first, first + 40.0)[::2][:10] for first in (0.0, 1.0)]
    with pytest.warns(UserWarning, match="reads the memory of an input"):
        found = list(map(compiled, signals))
    for one, signal in zip(found, signals, strict=True):
        close(one, windows(signal))
