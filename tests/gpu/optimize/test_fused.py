"""Inductor's kernels in an optimized step, forced: results, gradients and state equal eager's, step after step.

On the CPU, where Inductor writes the same lines for its C++ kernels.
"""

from __future__ import annotations

import copy
import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (torch's own habit)

from gpusim.errors import CaptureError
from gpusim.formats.trace import Source, Trace
from gpusim.gpu.capture.calls import Call
from gpusim.gpu.inductor import kernels, own_step, versions
from gpusim.gpu.inductor.seam import OWN
from gpusim.gpu.optimize import cache, captured, choose
from gpusim.gpu.optimize import fused as fusing
from gpusim.gpu.optimize.callable import OptimizedStep
from gpusim.gpu.optimize.captured import Captured
from gpusim.gpu.optimize.choose import Wanted
from gpusim.gpu.optimize.executors import CpuExecutor
from tests.support.networks import Branches, image
from tests.support.optimizing import Twins, batches, eager_step, fast, net

Make = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]
#: Fused kernels sum in another order; an optimizer that divides by small numbers amplifies that.
TOLERANCE = 5e-4


@pytest.fixture(autouse=True)
def _short_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget that allows Inductor's kernels, and very short searches."""
    original = choose.explore
    monkeypatch.setattr(choose, "explore", lambda graph, **given: original(graph, **{**given, "budget_s": 0.02}))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-2)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def close(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=TOLERANCE, atol=TOLERANCE)


def by_inductor(target: Any, inputs: Any, **options: Any) -> Any:
    """Return the optimized step with Inductor's kernels."""
    step = fast(target, inputs, **{"frontends": ("inductor",), **options})
    assert isinstance(step, OptimizedStep)
    assert step.gain is not None
    assert step.gain.frontend == "inductor"
    assert "kernels of Inductor" in step.gain.text
    return step


class Trained:
    """A model trained with Inductor's kernels, and its eager twin."""

    def __init__(self, model: nn.Module, make: Make, x: torch.Tensor, y: torch.Tensor, loss: Any) -> None:
        self.models = model, copy.deepcopy(model)
        self.optimizers = [make(each.parameters()) for each in self.models]
        self.loss = loss
        self.fast = by_inductor(model, (x, y), loss=loss, optimizer=self.optimizers[0])

    def eager(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.optimizers[1].zero_grad()
        loss: torch.Tensor = self.loss(self.models[1](x), y)
        loss.backward()
        self.optimizers[1].step()
        return loss.detach()

    def train(self, data: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Run steps of both from the same random state; loss, gradients and all state must agree after each."""
        for number, (x, y) in enumerate(data):
            torch.manual_seed(number)
            loss = self.fast(x, y)
            torch.manual_seed(number)
            close(loss, self.eager(x, y))
            for one, other in zip(*(each.parameters() for each in self.models), strict=True):
                close(one.grad, other.grad)
            close(*(each.state_dict() for each in self.models))
            close(*(each.state_dict()["state"] for each in self.optimizers))


def images(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(3)
    return [(torch.randn(4, 3, 12, 12), torch.randint(0, 4, (4,))) for _ in range(count)]


class Convolutions(nn.Module):
    """Concatenated branches of convolutions with batch norm; a bias in each of two that have equal gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(3, 6, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU())
        self.two = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU())
        self.left, self.right = nn.Conv2d(12, 4, 1), nn.Conv2d(12, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([self.one(x), self.two(x)], 1)
        return (self.left(joined) + self.right(joined)).mean((2, 3))


class Block(nn.Module):
    """A block of a transformer, with dropout, over embedded tokens."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embed(tokens)).mean(1))


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
    twins = Twins(lambda p: torch.optim.Adagrad(p, lr=0.01), dropout=0.3, frontends=("inductor",))
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


# --- Which kernels run ---


def test_both_are_tried_and_the_faster_is_reported() -> None:
    model = net().eval()
    x = batches(1)[0][0]
    lines: list[str] = []
    step = fast(model, x, budget_s=choose.KERNELS_FROM_S, say=lines.append)
    assert [line.partition(": ")[0] for line in lines if "predicted" in line] == [
        "ATen's kernels",
        "Inductor's kernels (default)",
    ]
    assert step.gain.frontend == "inductor"  # fewer kernels, by nominal times
    assert step.gain.without == ""
    plain = fast(model, x, frontends=("aten",))
    assert step.gain.optimized_ns < plain.gain.optimized_ns
    assert plain.gain.frontend == "aten"
    assert "kernels of ATen" in plain.gain.text
    with torch.no_grad():
        close(step(x), model(x))


@pytest.mark.parametrize(
    ("wanted", "tried"),
    [
        (Wanted(2, None, None), True),
        (Wanted(2, choose.KERNELS_FROM_S / 2, None), False),
        (Wanted(2, choose.KERNELS_FROM_S / 2, None, frontends=("inductor",)), True),
        (Wanted(2, None, None, frontends=("aten",)), False),
    ],
)
def test_short_searches_compile_nothing(wanted: Wanted, tried: bool) -> None:
    assert wanted.inductor == tried


def test_searches_of_both_share_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets: list[float] = []
    original = choose.explore

    def explore(graph: Any, **options: Any) -> Any:
        budgets.append(options["budget_s"])
        return original(graph, **{**options, "budget_s": 0.02})

    monkeypatch.setattr(choose, "explore", explore)
    fast(nn.Linear(6, 3), batches(1)[0][0], budget_s=8.0)
    assert budgets == [4.0, 4.0]


# --- Where Inductor's kernels are left out ---


class TwoTypes(nn.Module):
    """Two buffers in one memory, under different data types."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("floats", torch.ones(6))
        self.register_buffer("bits", self.floats.view(torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.floats).relu() + (self.bits % 7)


def left_out(model: nn.Module, x: torch.Tensor) -> str:
    """Return why a step has no kernels of Inductor's; ATen's run it, with a notice."""
    lines: list[str] = []
    step = fast(model, x, budget_s=choose.KERNELS_FROM_S, say=lines.append)
    assert step.gain.frontend == "aten"
    (line,) = [line for line in lines if line.startswith("left out Inductor's kernels (")]
    assert line.endswith(step.gain.without)
    assert step.gain.text.endswith(f"; without Inductor's kernels: {step.gain.without}")
    assert "\n" not in step.gain.text
    with torch.no_grad():
        close(step(x), model(x))
    return str(step.gain.without)


def test_what_the_seam_refuses_runs_as_aten_calls() -> None:
    model, x = TwoTypes(), batches(1)[0][0]
    assert "share memory under different data types" in left_out(model, x)
    with pytest.warns(UserWarning, match=r"share memory under different data types.*runs as it is"):
        assert fast(model, x, frontends=("inductor",)) is model


def test_another_torch_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "series", lambda: "2.12")
    assert "knows torch 2.11 and 2.13" in left_out(net().eval(), batches(1)[0][0])


def test_kernels_that_compute_something_else_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    original = captured.functions_of

    def functions_of(trace: Any, compiling: Any) -> Any:
        return [
            (lambda *args: None) if op.source else function
            for op, function in zip(trace.ops, original(trace, compiling), strict=True)
        ]

    monkeypatch.setattr(captured, "functions_of", functions_of)
    assert "away from eager's" in left_out(net().eval(), batches(1)[0][0])


def test_torchs_own_errors_leave_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("no such kernel\nand a long story")

    from gpusim.gpu.inductor import own_step

    monkeypatch.setattr(own_step, "compiled_calls", broken)
    assert "no such kernel" in left_out(net().eval(), batches(1)[0][0])


class Unmeasured(CpuExecutor):
    """Executor that cannot tell which kernels belong to Inductor's ops."""

    def measured(self, captured: Captured, eager_ns: int, say: Callable[[str], None]) -> Trace:
        if captured.frontend == "inductor":
            raise CaptureError("the profiler saw no kernel of this step")
        return super().measured(captured, eager_ns, say)


def test_kernels_that_cannot_be_measured_are_left_out() -> None:
    step = fast(net().eval(), batches(1)[0][0], budget_s=choose.KERNELS_FROM_S, executor=Unmeasured())
    assert (step.gain.frontend, step.gain.without) == ("aten", "the profiler saw no kernel of this step")


def test_compiling_changes_nothing_of_the_users() -> None:
    model = net(0.5)
    optimizer = adam(model.parameters())
    before, state, random = repr(model.state_dict()), repr(optimizer.state_dict()), torch.get_rng_state()
    by_inductor(model, batches(1)[0], loss=F.cross_entropy, optimizer=optimizer)
    assert (repr(model.state_dict()), repr(optimizer.state_dict())) == (before, state)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in model.parameters())


# --- The cache ---


def entry(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    (path,) = (tmp_path / "cache").glob("*.json")
    return path, json.loads(path.read_bytes())


def test_the_cache_has_the_choice_and_no_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = batches(1)[0][0]
    first = by_inductor(net().eval(), x)
    path, document = entry(tmp_path)
    assert document["frontend"] == "inductor"
    assert "async_compile" not in path.read_text()
    monkeypatch.setattr(choose, "explore", lambda *_, **__: pytest.fail("searched again"))
    model = net(seed=4).eval()  # other weights, the same step
    second = by_inductor(model, x)
    assert second.gain.decided_by == "what was found before"
    assert (second.gain.streams, second.gain.policy) == (first.gain.streams, first.gain.policy)
    with torch.no_grad():
        close(second(x), model(x))


def of_training() -> tuple[Any, nn.Module]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return by_inductor(model, batches(1)[0], loss=F.cross_entropy, optimizer=optimizer), model


def test_the_second_start_does_not_ask_inductor_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training step, its kernels from torch's cache on disk: it goes on as eager does."""
    of_training()
    monkeypatch.setattr("gpusim.gpu.optimize.fused.own_step", lambda *_, **__: pytest.fail("compiled again"))
    step, model = of_training()
    assert step.gain.decided_by == "what was found before"
    other = copy.deepcopy(model)
    eager = eager_step(other, torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9))
    for x, y in batches(4):
        close(step(x, y), eager(x, y))
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        close(mine, theirs)


def test_a_folder_of_torchs_that_cannot_be_written_is_said_and_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: str) -> str:
        raise OSError("No space left on device")

    monkeypatch.setattr("gpusim.gpu.optimize.kept_step.store_text", full)
    lines: list[str] = []
    assert isinstance(by_inductor(net().eval(), batches(1)[0][0], say=lines.append), OptimizedStep)
    assert "not kept in the cache: No space left on device" in lines
    assert not list((tmp_path / "cache").glob("*.json"))


@pytest.mark.parametrize("kind", ["no text", "another text", "a key that leaves the folder", "a tensor too many"])
def test_kernels_that_torch_has_no_more_are_compiled_again(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = batches(1)[0][0]
    by_inductor(net().eval(), x)
    path, document = entry(tmp_path)
    sources = document["step"]["sources"]
    if kind == "no text":
        monkeypatch.setattr("gpusim.gpu.optimize.kept_step.stored_text", lambda _: None)
    elif kind == "another text":
        monkeypatch.setattr("gpusim.gpu.optimize.kept_step.stored_text", lambda _: "import os")
    elif kind == "a key that leaves the folder":
        document["step"]["sources"] = dict.fromkeys(sources, "../" * 9 + "etc/passwd")
    else:
        document["step"]["ops"][0]["reads"] = [10_000]
    path.write_text(json.dumps(document))
    lines: list[str] = []
    model = net(seed=4).eval()
    step = by_inductor(model, x, say=lines.append)
    assert any(line.startswith("compiled again: ") for line in lines)
    assert step.gain.decided_by == "what was found before"
    with torch.no_grad():
        close(step(x), model(x))


def test_an_entry_for_other_kernels_is_passed_over(tmp_path: Path) -> None:
    x = batches(1)[0][0]
    by_inductor(net().eval(), x)
    path, document = entry(tmp_path)
    path.write_text(json.dumps({**document, "kernels": "0" * 32}))
    lines: list[str] = []
    step = by_inductor(net().eval(), x, say=lines.append)
    assert any("is for other kernels than torch makes now" in line for line in lines)
    assert step.gain.decided_by != "what was found before"
    assert cache.folder() == tmp_path / "cache"


# --- Other users of torch.compile in the process ---


def test_a_later_torch_compile_takes_nothing_away() -> None:
    model = net().eval()
    x = batches(1)[0][0]
    step = by_inductor(model, x)
    with torch.no_grad():
        wanted = model(x)
        close(torch.compile(model)(x), wanted)
    torch._dynamo.reset()
    gc.collect()
    close(step(x), wanted)


def test_kernels_have_names_that_no_torch_compile_has() -> None:
    """torch returns one object per text, and a kernel's name is part of Triton's."""
    step = by_inductor(net().eval(), batches(1)[0][0])
    (variant,) = step._variants.values()
    names = [op.name for op in variant.captured.trace.ops if op.source]
    assert names
    assert all(name.endswith(OWN) for name in names)


def test_code_of_a_recorded_graph_is_held_as_it_was() -> None:
    """torch replaces a kernel's loaded code when it is tuned again, and unloads code without references."""

    class Kernel:
        def __init__(self) -> None:
            self.launchers, self.compile_results = [object()], [object()]

        def run(self, *_: Any, stream: int) -> None: ...

    kernel = Kernel()
    function = kernels._launcher(kernel)
    code = [*kernel.launchers, *kernel.compile_results]
    ((held, launchers, results),) = kernels.loaded_code([function, torch.ops.aten.relu.default, function])
    kernel.launchers, kernel.compile_results = [], []
    assert held is kernel
    assert [*launchers, *results] == code


def test_code_of_a_compiled_functions_graph_is_held_whoever_drops_the_kernel() -> None:
    """A second torch.compile of a model ended the first one's CUDA graph in an illegal access."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    kernel = object.__new__(CachingAutotuner)
    kernel.launchers = [object()]
    code = kernel.launchers[0]
    held = kernels.all_loaded_code()
    kernel.launchers = []
    assert [launchers for each, launchers, _ in held if each is kernel] == [[code]]


def test_memory_that_begins_at_an_odd_place_is_refused() -> None:
    from types import SimpleNamespace

    def state(begin: int, offset: int = 0) -> Any:
        storage = SimpleNamespace(data_ptr=lambda: begin)
        tensor = SimpleNamespace(
            untyped_storage=lambda: storage, data_ptr=lambda: begin + offset, device=torch.device("cuda")
        )
        return SimpleNamespace(live={0: tensor}, trace=SimpleNamespace(tensors=[SimpleNamespace(name="weight")]))

    fusing._check_aligned(state(64))
    for odd in (state(68), state(64, offset=4)):
        with pytest.raises(CaptureError, match="the memory of 'weight' does not begin at a multiple of 16 bytes"):
            fusing._check_aligned(odd)


def test_only_updates_in_place_are_kept_from_inductor() -> None:
    """`_fused_rms_norm` has their prefix, but is a layer."""

    def call(function: Any) -> Call:
        return Call(function.overloadpacket.__name__, function, (), {}, "forward", "")

    aten = torch.ops.aten
    calls = [call(each) for each in (aten._fused_rms_norm.default, aten.mm.default, aten._fused_adam_.default)]
    assert own_step.split(calls) == (calls[:2], calls[2:])


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


def test_kernels_do_not_wait_for_torchs_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """They need seconds to get ready, and a second start finds all kernels in Triton's cache."""
    from torch._inductor.async_compile import AsyncCompile

    made: list[str] = []
    monkeypatch.setattr(AsyncCompile, "wait_pool_ready", lambda *_: pytest.fail("waited"))
    monkeypatch.setattr(AsyncCompile, "triton", lambda _, name, text, **given: made.append(name) or max)
    text = "async_compile.triton('triton_gpusim', '''\n''', device_str='cuda')"
    found = kernels.Compiling([Source(sha256="1", text=text)]).kernels()
    assert (list(found), made) == (["1"], ["triton_gpusim"])
