"""The front end `inductor`, on the CPU: Inductor's C++ kernels come in the same lines as those for a GPU.

Each step runs in several random legal orders, and has to end as the eager step did.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from gpusim.errors import CaptureError, OperatorError, TraceError, TrustError, UnknownNameError
from gpusim.formats.trace import KERNEL, Kernel, Op, Source, Trace
from gpusim.gpu.capture.in_memory import function_step, model_step, options_of
from gpusim.gpu.capture.rebuild import Rebuilt, bare_trace, check_against_calls
from gpusim.gpu.capture.record import Recorded, record
from gpusim.gpu.capture.user_step import Untouched, UserStep, record_step
from gpusim.gpu.inductor import kernels, seam, versions
from gpusim.gpu.inductor import read as read_module
from gpusim.gpu.inductor.kernels import functions_of
from gpusim.gpu.inductor.own_step import own_step
from gpusim.gpu.inductor.step import inductor_step
from gpusim.gpu.replay.compare import errors
from gpusim.gpu.replay.execute import InitialState, Runner
from gpusim.gpu.replay.rounding import rounding_noise
from gpusim.plan.sync import program_order_releases
from gpusim.trace.check import check_trace
from gpusim.trace.dependencies import dependencies
from gpusim.trace.store import read_trace, structure_hash, write_trace
from tests.support.networks import CPU, NETWORKS, fused_on_cpu, on_cpu

#: Orders per step, and the largest error of a result: fused kernels round differently from eager ones.
ORDERS, TOLERANCE = 4, 1e-3
#: Training steps that compile in seconds, and together have all hard cases.
TRAINED = ("in_place", "dropouts", "shared", "attention", "buffer_view", "changes_input", "views", "own_loss")


def random_order(preds: Sequence[Sequence[int]], seed: int) -> list[int]:
    """Return a legal random order of ops."""
    generator = random.Random(seed)
    waiting = {op: set(before) for op, before in enumerate(preds)}
    order = []
    while waiting:
        op = generator.choice([op for op, before in waiting.items() if not before])
        order.append(op)
        del waiting[op]
        for before in waiting.values():
            before.discard(op)
    return order


def check_orders(trace: Trace, recorded: Recorded) -> None:
    """Run a step in recorded order and in random ones; each must end as the recording."""
    preds = dependencies(trace)
    runner = Runner(trace, CPU, trust_code=True)
    state = InitialState.copy_of(recorded.initial)
    runner.bind(state.tensors)
    noise = rounding_noise(runner, state, program_order_releases(trace), 0)
    for seed in range(ORDERS):
        state.restore()
        torch.manual_seed(0)
        for op in random_order(preds, seed) if seed else range(len(trace.ops)):
            runner.run(op)
        results = {index: runner.tensors[index] for index in recorded.final}
        assert all(tensor is not None for tensor in results.values())
        apart = errors(trace, results, recorded.final, noise, TOLERANCE)
        assert max(apart.values(), default=0.0) <= TOLERANCE
        runner.drop_temporaries()


@pytest.mark.parametrize("name", [name for name in NETWORKS if name not in TRAINED])
def test_inference_ends_as_eager_does_in_any_legal_order(name: str) -> None:
    """The networks that are not trained below: a training step contains the forward pass of inference."""
    found = fused_on_cpu(name, "infer")
    check_orders(found.trace, found.recorded)
    check_trace(with_kernels(found.trace), name)


@pytest.mark.parametrize("name", TRAINED)
def test_training_ends_as_eager_does_in_any_legal_order(name: str) -> None:
    """Loss, gradients, updated parameters, momenta and buffers."""
    found = fused_on_cpu(name, "train")
    assert found.recorded.gradients
    check_orders(found.trace, found.recorded)
    plain = on_cpu(name, "train")
    calls = Rebuilt(plain.trace, plain.recorded, 0.0, 0.0)
    loss_error, gradient_error = check_against_calls(
        calls, found.trace, found.recorded, found.graph, found.options, CPU
    )
    assert max(loss_error, gradient_error) < TOLERANCE
    phases = [op.phase for op in found.trace.ops]
    assert {"backward", "optimizer"} <= set(phases)


class Branchy(nn.Module):
    """Convolution, batch norm and ReLU next to a plain convolution, concatenated, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.two = nn.Conv2d(3, 4, 3, padding=1)
        self.drop, self.head = nn.Dropout(0.25), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([self.one(x), self.two(x)], 1)
        return self.head(self.drop(joined.mean((2, 3))))


def user_step(optimizer: str) -> tuple[UserStep, nn.Module]:
    """Make a training step of the user's own, with an optimizer of torch's."""
    torch.manual_seed(0)
    model = Branchy()
    made: Any = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    }[optimizer](model.parameters())
    inputs, targets = torch.randn(4, 3, 6, 6), torch.randint(0, 5, (4,))
    step = model_step(model, inputs, CPU, targets=targets, loss=nn.functional.cross_entropy, optimizer=made)
    return step, model


def fused_step(step: UserStep, mode: Any = "train") -> tuple[Trace, Recorded]:
    options = options_of(step, "test.step", mode, "fp32", False, 0, False, "inductor")
    with Untouched(step).around() as untouched:
        graph = record_step(step, untouched, options.seed)
        assert graph.own is not None
        assert graph.own.rng is not None
        torch.set_rng_state(graph.own.rng[0])
        plain = record(graph)
        calls = Rebuilt(bare_trace(dataclasses.replace(options, frontend="aten"), step, plain), plain, 0.0, 0.0)
        recorded = inductor_step(graph, plain, mode == "train")
        trace = bare_trace(options, step, recorded)
        check_against_calls(calls, trace, recorded, graph, options, CPU)
    return trace, recorded


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_forward_backward_and_optimizer_are_one_step(optimizer: str) -> None:
    """The step with the user's own optimizer is checked against the model's own outputs, gradients and states."""
    step, model = user_step(optimizer)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trace, recorded = fused_step(step)
    assert {op.phase for op in trace.ops} >= {"backward", "optimizer"}
    states = {trace.tensors[index].name for index in recorded.named}
    assert any(name.startswith(("momentum", "one.0.weight")) or "exp_avg" in name for name in states)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_step_that_writes_slices_of_a_state_waits_where_it_must() -> None:
    """A decoder's cache, whose rows are written separately and read as a whole."""
    cache, weight = torch.zeros(4, 8), torch.randn(8, 8)

    def step(x: torch.Tensor) -> torch.Tensor:
        cache[1] = x @ weight
        cache[2] = x * 2
        return (cache @ weight).sum(1)

    trace, recorded = fused_step(function_step(step, torch.randn(8), CPU), "infer")
    check_orders(trace, recorded)


def test_results_that_nobody_uses_have_no_tensor() -> None:
    """At inference attention on a GPU leaves some of them out, so that a call returns fewer than at compile time."""

    def step(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x * 2, x + 1).relu()

    trace, recorded = fused_step(function_step(step, torch.randn(2, 3, 5, 4), CPU), "infer")
    (attention,) = (op for op in trace.ops if "attention" in op.target)
    assert [index is None for index in attention.outputs] == [False, True]
    check_orders(trace, recorded)


def test_random_operators_draw_for_images_in_eagers_order() -> None:
    """Inductor makes images channels last, and these operators draw in the order of memory."""
    layer = nn.Conv2d(3, 4, 3).requires_grad_(False)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = layer(x)
        return (y * torch.rand_like(y)).sum(1)

    trace, recorded = fused_step(function_step(step, torch.randn(2, 3, 6, 6), CPU), "infer")
    check_orders(trace, recorded)


@pytest.mark.parametrize("dtype", ["fp32", "tf32"])
def test_wrong_kernel_is_refused(dtype: Any) -> None:
    """Something else overwrites the result of a kernel of the backward pass."""
    plain, found = on_cpu("in_place", "train"), fused_on_cpu("in_place", "train")
    options = dataclasses.replace(found.options, dtype=dtype)
    place = next(p for p, op in enumerate(found.trace.ops) if op.phase == "backward" and op.target == KERNEL)
    written = found.trace.ops[place].writes[-1]
    wrong = Op(name="wrong", target="aten.fill_.Scalar", args=({"tensor": written}, 7), outputs=(None,),
               reads=(), writes=(written,))  # fmt: skip
    ops = (*found.trace.ops[: place + 1], wrong, *found.trace.ops[place + 1 :])
    trace = altered(found.trace, ops=ops, model=altered(found.trace.model, dtype=dtype))
    calls = Rebuilt(altered(plain.trace, model=altered(plain.trace.model, dtype=dtype)), plain.recorded, 0.0, 0.0)
    with pytest.raises(CaptureError, match=r"Inductor's kernels leave .* away from the recorded step"):
        check_against_calls(calls, trace, found.recorded, found.graph, options, CPU)


# --- Caches ---


def test_compiling_a_second_time_is_answered_by_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's graph cache would skip the lines: both captures must have all ops, and the same code."""
    from torch._inductor import config

    found = on_cpu("own_loss", "train")
    with config.patch(fx_graph_cache=True):
        steps = [inductor_step(found.graph, found.recorded, True) for _ in range(2)]
    assert [op.target for op in steps[0].ops] == [op.target for op in steps[1].ops]
    assert {source.sha256 for source in steps[0].sources} == {source.sha256 for source in steps[1].sources}


def test_wrapper_and_settings_of_inductor_are_as_before_after_a_capture() -> None:
    from torch._inductor import config
    from torch._inductor.codegen import common, triton

    found = on_cpu("own_loss", "infer")
    common.init_backend_registration()
    before = common.device_codegens["cpu"], config.fx_graph_cache, config.allow_buffer_reuse, triton.async_compile
    inductor_step(found.graph, found.recorded, False)
    after = common.device_codegens["cpu"], config.fx_graph_cache, config.allow_buffer_reuse, triton.async_compile
    assert after == before


# --- Kernels compiled while the step is lowered ---


def test_the_text_that_is_compiled_early_is_the_text_of_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch finds a kernel again by its whole text; torch itself must not compile one under another name."""
    from torch._inductor.codegen import triton

    started: list[str] = []
    ready: list[bool] = []

    def start(text: str) -> None:
        started.append(text)
        ready.append(triton.async_compile.use_process_pool())

    class Ready:
        def use_process_pool(self) -> bool:
            return True

    monkeypatch.setattr(triton, "async_compile", Ready())
    monkeypatch.setattr(seam, "start_kernel", start)
    found = on_cpu("own_loss", "train")
    step = own_step(found.graph, found.recorded, True, "given_layout")
    assert sorted(set(started)) == sorted(source.text for source in step.sources)
    assert ready
    assert not any(ready)


@pytest.mark.parametrize(
    ("ready", "name", "started"), [(True, "triton", 1), (True, "cpp_pybinding", 0), (False, "triton", 0)]
)
def test_only_processes_that_are_ready_compile_early(
    ready: bool, name: str, started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where none is ready torch would compile in this one, and the step would wait for it."""
    from torch._inductor import async_compile

    calls: list[tuple[str, ...]] = []

    class Compiler:
        def use_process_pool(self) -> bool:
            return ready

        def triton(self, *given: str) -> None:
            calls.append(given)

        cpp_pybinding = triton

    monkeypatch.setattr(async_compile, "AsyncCompile", Compiler)
    kernels.start_kernel(f"async_compile.{name}('relu', '''text''')")
    assert calls == [("relu", "text")] * started


# --- Lines that do not match ---


def changed_lines(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Let `change` alter the lines before they are read."""
    original = read_module.read_lines
    from gpusim.gpu.inductor import step

    def altered(lines: seam.Lines, *rest: Any) -> Any:
        change(lines.lines)
        return original(lines, *rest)

    monkeypatch.setattr(step, "read_lines", altered)


def kind(line: seam.Line) -> str:
    return type(line.line).__name__


def add_statement(lines: list[seam.Line]) -> None:
    lines.append(seam.Line("buf0.mul_(2)", lines[-1].node))


def add_unknown(lines: list[seam.Line]) -> None:
    lines.append(seam.Line(object(), lines[-1].node))


def drop_kernel(lines: list[seam.Line]) -> None:
    del lines[next(place for place, line in enumerate(lines) if kind(line) == "KernelCallLine")]


def move_kernel(lines: list[seam.Line]) -> None:
    place = next(place for place, line in enumerate(lines) if kind(line) == "KernelCallLine")
    other = next(line.node for line in lines if kind(line).startswith("Extern"))
    lines[place] = seam.Line(lines[place].line, other)


def rename_argument(lines: list[seam.Line]) -> None:
    line = next(line.line for line in lines if kind(line) == "KernelCallLine")
    line.call_args = [f"{line.call_args[0]} + 1", *line.call_args[1:]]


def swap_arguments(lines: list[seam.Line]) -> None:
    """Swap a kernel's input and output."""
    line = next(line.line for line in lines if kind(line) == "KernelCallLine")
    line.call_args = [*line.call_args[-1:], *line.call_args[1:-1], *line.call_args[:1]]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (add_statement, r"writes the statement 'buf0\.mul_\(2\)'"),
        (add_unknown, "writes a line of kind object"),
        (drop_kernel, "writes no line that writes buf"),
        (rename_argument, r"writes argument '.* \+ 1' of kernel"),
        (swap_arguments, "and whose node does not"),
    ],
)
def test_line_that_matches_no_node_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, change: Any, problem: str
) -> None:
    changed_lines(monkeypatch, change)
    found = on_cpu("in_place", "infer")
    with pytest.raises(CaptureError, match=problem) as refused:
        inductor_step(found.graph, found.recorded, False)
    assert "use the front end 'aten'" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_use_on_the_wrong_side_of_a_change_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """After loop fusion, Inductor's C++ back end forgets that a loop reads what a call changes."""

    def draw_last(lines: list[seam.Line]) -> None:
        place = next(p for p, line in enumerate(lines) if isinstance(line.line, str) and "bernoulli_" in line.line)
        lines.append(lines.pop(place))

    changed_lines(monkeypatch, draw_last)
    found = on_cpu("dropouts", "train")
    with pytest.raises(CaptureError, match=r"a use of buf\d+ on the wrong side of its change"):
        inductor_step(found.graph, found.recorded, True)


# --- Traces with code ---


def with_kernels(trace: Trace) -> Trace:
    """Return the trace as if it had been profiled."""
    kernel = Kernel(name="k", dur_ns=1000, grid=(8, 1, 1), block=(128, 1, 1))
    ops = tuple(msgspec.structs.replace(op, kernels=(kernel,) if op.writes else ()) for op in trace.ops)
    return msgspec.structs.replace(trace, ops=ops)


def test_sources_travel_with_the_trace_under_their_hash(tmp_path: Path) -> None:
    found = fused_on_cpu("in_place", "infer")
    trace = with_kernels(found.trace)
    write_trace(trace, tmp_path / "t.json.gz")
    again = read_trace(tmp_path / "t.json.gz")
    assert again == trace
    assert {op.source for op in again.ops if op.target == KERNEL} == {source.sha256 for source in again.sources}
    check_orders(again, found.recorded)


def test_structure_depends_on_the_code() -> None:
    trace = fused_on_cpu("in_place", "infer").trace
    other = msgspec.structs.replace(trace.sources[0], sha256="0" * 64)
    ops = tuple(
        msgspec.structs.replace(op, source=other.sha256) if op.source == trace.sources[0].sha256 else op
        for op in trace.ops
    )
    changed = msgspec.structs.replace(trace, ops=ops, sources=(other, *trace.sources[1:]))
    assert structure_hash(changed) != structure_hash(trace)


def altered(trace: Trace, **fields: Any) -> Trace:
    return msgspec.structs.replace(trace, **fields)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda t: altered(t, sources=t.sources[1:]), "there is no code"),
        (lambda t: altered(t, sources=(*t.sources, t.sources[0])), "is there twice"),
        (
            lambda t: altered(t, sources=(Source(sha256=t.sources[0].sha256, text="1"), *t.sources[1:])),
            "does not have this hash",
        ),
        (lambda t: altered(t, model=altered(t.model, frontend="aten")), "only a trace of the front end 'inductor'"),
        (lambda t: altered(t, ops=tuple(altered(op, source="") for op in t.ops)), "needs code"),
        (
            lambda t: altered(t, ops=tuple(altered(op, source=t.sources[0].sha256) for op in t.ops)),
            "only 'inductor.kernel' has code",
        ),
    ],
)
def test_code_that_does_not_fit_is_refused(change: Any, problem: str) -> None:
    trace = with_kernels(fused_on_cpu("in_place", "infer").trace)
    with pytest.raises(TraceError, match=problem):
        check_trace(change(trace), "t.json")


def test_runner_runs_no_code_that_is_not_trusted() -> None:
    trace = fused_on_cpu("in_place", "infer").trace
    with pytest.raises(TrustError, match="front end 'inductor' runs the code in it"):
        Runner(trace, CPU)


def test_code_that_does_not_compile_and_operators_that_are_not_there_are_refused() -> None:
    trace = fused_on_cpu("in_place", "infer").trace
    wrong = msgspec.structs.replace(trace.sources[0], text="async_compile.nothing()")
    with pytest.raises(OperatorError, match="a kernel of the trace does not compile"):
        functions_of(msgspec.structs.replace(trace, sources=(wrong, *trace.sources[1:])))
    ops = tuple(altered(op, target="aten.convolution.other") if not op.source else op for op in trace.ops)
    with pytest.raises(OperatorError, match=r"has no operator 'aten\.convolution\.other'"):
        functions_of(msgspec.structs.replace(trace, ops=ops))


# --- Styles ---


def test_parts_of_a_concatenation_are_written_apart_where_the_style_says_so() -> None:
    """One kernel writes all four, or each a part; on the CPU, Inductor puts these into one function again."""
    from torch._inductor import config

    found = on_cpu("branches", "infer")
    with config.patch(force_pointwise_cat=True):  # as on a GPU
        joined = inductor_step(found.graph, found.recorded, False)
        apart = inductor_step(found.graph, found.recorded, False, "apart")
    parts = []
    for step in (joined, apart):
        trace = bare_trace(dataclasses.replace(found.options, frontend="inductor"), found.step, step)
        check_orders(trace, step)
        storages = {tensor.storage for tensor in trace.tensors if tensor.shape == (2, 18, 12, 12)}
        written = {tensor for op in trace.ops for tensor in op.writes}
        parts.append(sum(trace.tensors[tensor].storage in storages for tensor in written))
    assert parts == [1, 4]


def test_equal_kernels_of_two_styles_have_one_function_in_two_texts() -> None:
    """The number of a kernel depends on those before it; only kernels of ours lose it, in each place of their text."""

    def text(name: str, style: str = "") -> str:
        return f"async_compile.triton('{name}', '''\ndef {name}(x):\n    pass\n{style}''', device_str='cuda')"

    for name, style in (("relu_3_gpusim", "# _gpusim\n"), ("relu_14_gpusim_apart", "# _gpusim_apart\n")):
        assert seam.named_alike(f"triton_{name}", text(f"triton_{name}")) == text("triton_relu_gpusim", style)
    for name in ("triton_relu_3", "triton_gpusim", "triton_relu_gpusim"):
        assert seam.named_alike(name, text(name)) == text(name)


def test_unknown_style_is_refused() -> None:
    found = on_cpu("own_loss", "infer")
    with pytest.raises(UnknownNameError, match="unknown style 'none'"):
        inductor_step(found.graph, found.recorded, False, "none")


def test_rules_of_types_are_made_once_and_again_where_there_are_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import utils
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler as Handler

    made: list[int] = []
    original = Handler.__init__
    monkeypatch.setattr(Handler, "__init__", lambda self: made.append(1) or original(self))
    counting = Handler.__init__
    rules = dict(utils.op_dtype_propagation_rules)
    monkeypatch.setattr(utils, "op_dtype_propagation_rules", rules)
    with versions.dtype_rules_made_once():
        before = len(made)
        assert Handler() is Handler()
        assert len(made) == before
        rules["another"] = rules["sqrt"]
        assert hasattr(Handler(), "another")
        assert len(made) == before + 1
    assert Handler.__init__ is counting
