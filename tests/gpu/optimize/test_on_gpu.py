"""The optimized step as CUDA graphs: on a GPU, the rules that other tests of this folder check on the CPU."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (torch's own habit)

from gpusim.formats.results import Baseline
from gpusim.gpu.capture.models import load_step
from gpusim.gpu.optimize import choose, dynamo, fronts
from gpusim.gpu.optimize.callable import OptimizedStep
from gpusim.gpu.optimize.captured import capture_bound
from gpusim.gpu.optimize.choose import Wanted
from gpusim.gpu.optimize.fused import fused
from gpusim.gpu.optimize.on_cuda import CudaExecutor
from gpusim.gpu.optimize.optimizers import LearningRates
from gpusim.gpu.optimize.peers import Exact, make
from gpusim.gpu.optimize.steps import Given
from gpusim.gpu.optimize.variant import Variant
from gpusim.gpu.replay.cudagraph import WORKSPACE_VARIABLE
from gpusim.plan.graph import OpGraph
from gpusim.policies.random_schedules import random_schedule
from gpusim.policies.registry import POLICIES
from tests.support.networks import Branches, image
from tests.support.optimizing import Twins, batches, close, eager_step, fast, net, same_states

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


@pytest.fixture(autouse=True)
def _always_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat every schedule as a gain, which a step this small would not have."""
    monkeypatch.setattr(CudaExecutor, "time_call_ns", lambda _, call: (call(), 0)[1])


def twins(name: str, dropout: float = 0.0) -> Twins:
    return Twins(OPTIMIZERS[name], dropout, "cuda", executor=CudaExecutor())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_many_steps_are_those_of_eager(name: str) -> None:
    both = twins(name, dropout=0.3)
    assert isinstance(both.fast, OptimizedStep)
    both.train(batches(8, device="cuda"))
    both.check()


def test_checkpoints_rates_and_eager_steps_in_between() -> None:
    both = twins("adam")
    data = batches(9, device="cuda")
    both.train(data[:3])
    model, optimizer = copy.deepcopy((both.model.state_dict(), both.optimizer.state_dict()))
    both.train(data[3:5])
    for each in (both.model, both.other):
        each.load_state_dict(model)
    for each in (both.optimizer, both.other_optimizer):
        each.load_state_dict(copy.deepcopy(optimizer))
        each.param_groups[0]["lr"] = 0.05
    both.train(data[5:7])
    close(eager_step(both.model, both.optimizer)(*data[7]), both.eager(*data[7]))
    both.train(data[8:])
    both.check()


def test_dropout_differs_and_results_stay_valid() -> None:
    model = nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5)).cuda()
    x = torch.ones(4, 6, device="cuda")
    step = fast(model, x, executor=CudaExecutor())
    torch.manual_seed(0)
    first = step(x)
    kept = first.clone()
    second = step(x)
    assert torch.equal(first, kept)
    assert not torch.equal(first == 0, second == 0)
    torch.manual_seed(0)
    with torch.no_grad():
        close(model(x), first)


def test_gradients_accumulate() -> None:
    model = net().cuda()
    other = copy.deepcopy(model)

    def accumulating(each: nn.Module) -> Callable[..., torch.Tensor]:
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(each(x), y)
            loss.backward()
            return loss.detach()

        return step

    mine, theirs = fast(accumulating(model), batches(1, device="cuda")[0], executor=CudaExecutor()), accumulating(other)
    for number, (x, y) in enumerate(batches(6, device="cuda")):
        close(mine(x, y), theirs(x, y))
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            close(one.grad, two.grad)
        if number == 2:
            for each in (model, other):
                each.zero_grad()


def test_the_second_start_searches_nothing() -> None:
    x = batches(1, device="cuda")[0][0]
    fast(net().cuda().eval(), x, executor=CudaExecutor())
    assert fast(net().cuda().eval(), x, executor=CudaExecutor()).gain.decided_by == "what was found before"


INDUCTOR = {"frontends": ("inductor",)}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_many_steps_of_inductors_kernels_are_those_of_eager(name: str) -> None:
    both = Twins(OPTIMIZERS[name], 0.0, "cuda", executor=CudaExecutor(), **INDUCTOR)
    assert both.fast.gain.frontend == "inductor"
    both.train(batches(8, device="cuda"))
    both.check()


def test_dropout_of_inductors_kernels_differs_from_step_to_step() -> None:
    model = nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5), nn.ReLU()).cuda()
    x = torch.ones(4, 6, device="cuda")
    step = fast(model, x, executor=CudaExecutor(), **INDUCTOR)
    assert step.gain.frontend == "inductor"
    torch.manual_seed(0)
    first, second = step(x), step(x)
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(step(x), first)


@pytest.mark.parametrize("frontend", ["aten", "inductor"])
def test_a_later_torch_compile_takes_nothing_away(frontend: Any) -> None:
    """When torch.compile records its graphs, torch frees cuBLAS's workspaces; their memory may be reused."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4096, 256), nn.GELU(), nn.Linear(256, 4096)) for _ in range(4)))
    model = model.cuda().eval()
    x = torch.randn(8, 4096, device="cuda")
    step = fast(model, x, executor=CudaExecutor(), frontends=(frontend,))
    assert step.gain.frontend == frontend
    wanted = step(x)
    compiled = torch.compile(model, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(3):
            close(compiled(x).clone(), wanted)
    others = [torch.full((1 << 20,), float(number), device="cuda") for number in range(256)]
    for _ in range(3):
        assert torch.equal(step(x), wanted)
    for number, tensor in enumerate(others):
        assert bool((tensor == number).all())
    torch._dynamo.reset()
    assert torch.equal(step(x), wanted)


class Tables(nn.Module):
    """Embedding tables, each with states that fill memory blocks of their own, which torch may return to the driver."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(20_000, 32, mode="sum") for _ in range(8))
        self.top = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat([table(each) for table, each in zip(self.tables, ids.unbind(), strict=True)], 1))


def training_step(model: nn.Module, called: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a step that alone holds its optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(ids: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(called(ids), wanted)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def empty_and_take() -> list[torch.Tensor]:
    """Free all that nobody holds, and take it again: who still writes there is found out."""
    gc.collect()
    torch.cuda.empty_cache()
    return [torch.full((1 << 20,), 7, dtype=torch.int32, device="cuda") for _ in range(64)]


@pytest.mark.parametrize("frontend", ["aten", "inductor"])
def test_a_training_step_outlives_torch_compile_of_another_copy(frontend: Any) -> None:
    """torch frees workspaces and returns memory to the driver when it records graphs, and unloads code at a reset."""
    torch.manual_seed(0)
    model = Tables().cuda()
    eagerly, compiled = copy.deepcopy(model), copy.deepcopy(model)
    data = [(torch.randint(0, 20_000, (8, 48, 4), device="cuda"), torch.randn(48, 1, device="cuda")) for _ in range(9)]
    mine = fast(training_step(model, model), data[0], executor=CudaExecutor(), frontends=(frontend,))
    assert mine.gain.frontend == frontend
    theirs = training_step(eagerly, eagerly)

    def same(batches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for batch in batches:
            torch.testing.assert_close(mine(*batch), theirs(*batch), rtol=1e-3, atol=1e-5)
        for one, other in zip(model.parameters(), eagerly.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-5)

    taken = empty_and_take()
    same(data[:3])
    beside = training_step(compiled, torch.compile(compiled, mode="reduce-overhead"))
    for batch in data:
        torch.compiler.cudagraph_mark_step_begin()
        beside(*batch)
    taken += empty_and_take()
    same(data[3:6])
    del beside, compiled
    torch._dynamo.reset()
    taken += empty_and_take()
    same(data[6:])
    assert all(bool((each == 7).all()) for each in taken)


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU])
def test_cudnns_recurrent_layers_see_changes_of_their_weights(kind: type[torch.nn.RNNBase]) -> None:
    torch.manual_seed(0)
    layer = kind(16, 16, num_layers=2, bidirectional=True, batch_first=True).cuda().eval()
    x = torch.randn(4, 10, 16, device="cuda")
    with torch.no_grad():
        step = fast(lambda x: layer(x)[0], x, executor=CudaExecutor(), frontends=("aten",))
        assert isinstance(step, OptimizedStep)
        for scale in (1.0, 0.5):
            for weight in layer.parameters():
                weight.mul_(scale)
            y = torch.randn_like(x)
            close(step(y), layer(y)[0])


def test_peers_outlive_each_other() -> None:
    """A hand-made graph whose optimizer was gone wrote to unmapped memory once torch.compile had recorded its own."""
    spec = f"{Path(__file__).parents[3] / 'validate/networks/recommendation.py'}:recommendation_small"
    step = load_step(
        spec, mode="train", batch=48, dtype="fp32", memory_format="contiguous", device=torch.device("cuda")
    )
    exact = Exact(step)
    peers: tuple[Baseline, ...] = ("eager", "torch_compile_own_graph", "torch_compile_reduce_overhead")
    contenders, taken = {}, []
    for peer in peers:
        contenders[peer] = make(peer, step)
        taken += empty_and_take()
        for name, contender in contenders.items():
            deviation = exact.deviation(contender)
            assert deviation is not None
            assert deviation < 1e-3, name
    assert all(bool((each == 7).all()) for each in taken)


def test_random_schedules_of_inductors_kernels_in_a_poisoned_arena_compute_the_same() -> None:
    executor = CudaExecutor(poison=True)
    torch.manual_seed(0)
    model = Branches().cuda().eval()
    data = [image(8).cuda() for _ in range(3)]
    given = Given(model, None, None)
    step = given.step((data[0].clone(),), {}, executor.device)
    inputs = [tensor for _, tensor in step.named.values()]
    captured = fused(step, capture_bound(step, LearningRates([], executor.device), given.options(step, 0), inputs))
    trace = executor.measured(captured, 0, lambda _: None)
    graph = OpGraph.build(trace, executor.hardware()[0])
    for number in range(20):
        ready = executor.prepare(captured, trace, random_schedule(graph, number, 0))
        variant = Variant(captured, LearningRates([], executor.device), ready)
        with torch.no_grad():
            for x in data:
                close(variant.run([x]), model(x))


def test_the_backend_trains_as_eager_does(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    run = Variant.run

    def counted(self: Variant, tensors: Sequence[torch.Tensor]) -> Any:
        seen.append(self.captured.options.spec.rpartition(" ")[2])
        return run(self, tensors)

    monkeypatch.setattr(Variant, "run", counted)

    def backend(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return dynamo.compiled(module, inputs, Wanted(3, 0.02, None), CudaExecutor())

    model = net(0.3).cuda()
    other = copy.deepcopy(model)
    steps = [
        eager_step(m, torch.optim.SGD(p.parameters(), lr=0.05))
        for m, p in ((torch.compile(model, backend=backend), model), (other, other))
    ]
    for number, (x, y) in enumerate(batches(5, device="cuda")):
        if number == 1:
            seen.clear()
        losses = []
        for step in steps:
            torch.manual_seed(number)
            losses.append(step(x, y))
        close(*losses)
    same_states(model.state_dict(), other.state_dict())
    assert seen == ["forward", "backward"] * 4


def test_random_schedules_in_a_poisoned_arena_compute_the_same() -> None:
    """Freed bytes become NaN on the stream of their next user, while other streams run on."""
    executor = CudaExecutor(poison=True)
    torch.manual_seed(0)
    model = Branches().cuda().eval()
    data = [image(8).cuda() for _ in range(3)]
    given = Given(model, None, None)
    step = given.step((data[0].clone(),), {}, executor.device)
    inputs = [tensor for _, tensor in step.named.values()]
    captured = capture_bound(step, LearningRates([], executor.device), given.options(step, 0), inputs)
    trace = executor.measured(captured, 0, lambda _: None)
    graph = OpGraph.build(trace, executor.hardware()[0])
    for number in range(20):
        ready = executor.prepare(captured, trace, random_schedule(graph, number, 0))
        variant = Variant(captured, LearningRates([], executor.device), ready)
        with torch.no_grad():
            for x in data:
                close(variant.run([x]), model(x))


def test_graphs_keep_their_workspaces_whoever_clears_those_of_the_process() -> None:
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4))).cuda()
    step = fast(model, torch.randn(64, 512, device="cuda"), executor=CudaExecutor())
    other = torch.compile(copy.deepcopy(model), mode="reduce-overhead")  # clears the workspaces when it records
    x = torch.randn(64, 512, device="cuda")
    with torch.no_grad():
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            other(x)
        torch.cuda.empty_cache()
        taken = [torch.full((1 << 20,), 7, dtype=torch.int32, device="cuda") for _ in range(64)]
        for _ in range(10):
            torch.testing.assert_close(step(x), model(x), rtol=1e-3, atol=1e-3)
        torch.cuda.synchronize()
        assert all(bool((each == 7).all()) for each in taken)


def test_workspaces_of_several_streams_are_small_unless_the_user_sets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(8))

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            return [head(x) for head in self.heads]

    executor = CudaExecutor()
    given = Given(Heads().cuda().eval(), None, None)
    step = given.step((torch.randn(64, 512, device="cuda"),), {}, executor.device)
    inputs = [tensor for _, tensor in step.named.values()]
    captured = capture_bound(step, LearningRates([], executor.device), given.options(step, 0), inputs)
    trace = executor.measured(captured, 0, lambda _: None)
    graph = OpGraph.build(trace, executor.hardware()[0])
    schedule = POLICIES["critical_path"](graph, 8)
    assert schedule.stream_count > 4
    small = executor.prepare(captured, trace, schedule).peak_bytes
    monkeypatch.setenv(WORKSPACE_VARIABLE, ":4096:8")
    large = executor.prepare(captured, trace, schedule).peak_bytes
    assert large - small == schedule.stream_count * 28 * 2**20


def test_other_kernels_are_measured_in_this_process_and_a_call_is_taken_apart() -> None:
    """Algorithms of convolutions, autotuned ones too, of both front ends; the user's tensors are as before."""
    torch.manual_seed(0)
    model = Branches().cuda().eval()
    before = copy.deepcopy(model.state_dict())
    lines: list[str] = []
    x = image(2).cuda()
    step = fast(model, x, executor=CudaExecutor(), budget_s=choose.KERNELS_FROM_S, say=lines.append)
    assert {"profiling other algorithms", "letting cuDNN time its algorithms"} <= {*lines}
    assert not [line for line in lines if line.startswith("left out")]
    assert step.gain.around_ns > 0
    assert step.gain.host_ns > 0
    assert step.gain.predicted_call_ns >= step.gain.predicted_ns + step.gain.around_ns
    same_states(model.state_dict(), before)
    with torch.no_grad():
        torch.testing.assert_close(step(x), model(x), rtol=1e-2, atol=1e-2)


def test_combo_kernels_compute_what_eager_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight independent small kernels, which are not fused as their sizes differ, become fewer launches."""
    monkeypatch.setattr(fronts, "first_style", lambda *_: "combo")
    weights = [torch.randn(1000 + 8 * n, device="cuda") for n in range(8)]

    def step(x: torch.Tensor) -> list[torch.Tensor]:
        with torch.no_grad():
            return [(x * weight).tanh() for weight in weights]

    x = torch.randn(1, device="cuda")
    captured = fast(step, x, executor=CudaExecutor(), **INDUCTOR)
    assert captured.gain.frontend == "inductor"
    (variant,) = captured._variants.values()
    assert len(variant.captured.trace.ops) < len(weights)
    for one, other in zip(captured(x), step(x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_calls_on_other_streams_wait_for_the_one_before() -> None:
    """All calls copy their inputs to the same memory."""
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))).cuda().eval()
    xs = [torch.randn(512, 512, device="cuda") for _ in range(8)]
    step = fast(model, xs[0], executor=CudaExecutor())
    with torch.no_grad():
        wanted = [model(x) for x in xs]
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in xs], []
    for stream, x in zip(streams, xs, strict=True):
        with torch.cuda.stream(stream):
            found.append(step(x))
    torch.cuda.synchronize()
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)


def test_hooks_and_old_gradients_on_a_gpu() -> None:
    both = twins("sgd")
    both.train(batches(2, device="cuda"))
    handles = [m.left.register_forward_hook(lambda *given: given[2] * 2) for m in (both.model, both.other)]
    both.train(batches(2, device="cuda"))
    for handle in handles:
        handle.remove()
    for model in (both.model, both.other):
        model.left.requires_grad_(False)
    both.train(batches(3, device="cuda"))
    same_states(both.model.state_dict(), both.other.state_dict())
