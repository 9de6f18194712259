"""Capture without a GPU, on the CPU: the recorded step equals the model's own step, and runs without its code.

On the CPU the operators used here are deterministic, so every comparison is exact.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusim.errors import CaptureError
from gpusim.formats.trace import MemoryFormat, Mode, TensorInit, Trace
from gpusim.gpu.capture.calls import split_convolution_backward
from gpusim.gpu.capture.joint_graph import LEARNING_RATE, MOMENTUM, OPTIMIZER_BUCKET, joint_graph
from gpusim.gpu.capture.models import AUXILIARY_WEIGHT, default_loss, load_step
from gpusim.gpu.capture.rebuild import check_against_model
from gpusim.gpu.capture.record import initial_values, live_calls, record
from gpusim.gpu.replay import operators
from gpusim.gpu.replay.execute import Runner, make_initial
from gpusim.plan.sync import kept_storages, plan_sync, program_order_releases
from gpusim.trace.check import check_trace
from gpusim.trace.dependencies import dependencies
from gpusim.trace.store import read_trace, write_trace
from gpusim.version import code_version
from tests.support.helpers import ancestors, schedules, with_kernels
from tests.support.networks import BATCH, CPU, NETWORKS, Branches, OnCpu, on_cpu, spec

MODES: tuple[Mode, ...] = ("infer", "train")

every_network = pytest.mark.parametrize("name", NETWORKS)
both_modes = pytest.mark.parametrize("mode", MODES)


def run_all(runner: Runner, order: Sequence[int] | None = None) -> None:
    for op in order if order is not None else range(len(runner.trace.ops)):
        runner.run(op)


def assert_same_results(found: OnCpu, runner: Runner) -> None:
    """Check that outputs, gradients and changed states equal the recording bit for bit."""
    for index, wanted in found.recorded.final.items():
        tensor = runner.tensors[index]
        assert tensor is not None, f"tensor {index} is gone"
        assert torch.equal(tensor, wanted), f"tensor {index} ({found.trace.tensors[index].name}) differs"


def ops_of(trace: Trace, target: str) -> list[int]:
    return [index for index, op in enumerate(trace.ops) if op.target.startswith(f"aten.{target}.")]


# --- The rebuilt step is the model's own ---


@every_network
@both_modes
@pytest.mark.parametrize("memory_format", ["contiguous", "channels_last"])
def test_rebuilt_step_gives_the_models_own_outputs_and_gradients(
    name: str, mode: Mode, memory_format: MemoryFormat
) -> None:
    found = on_cpu(name, mode, memory_format)
    errors = check_against_model(found.trace, found.step, found.graph, found.recorded, found.options, CPU)
    assert errors == (0.0, 0.0)
    assert bool(found.recorded.gradients) == (mode == "train")


@pytest.mark.parametrize("name", ["branches", "pooled", "attention"])
def test_step_in_bf16_has_bf16_parameters_and_gives_the_models_own_results(name: str) -> None:
    found = on_cpu(name, "train", "channels_last", "bf16")
    assert {t.dtype for t in found.trace.tensors if t.role == "parameter"} == {"bfloat16"}
    assert check_against_model(found.trace, found.step, found.graph, found.recorded, found.options, CPU) == (0.0, 0.0)


@every_network
@both_modes
def test_recorded_order_is_legal_and_the_trace_rebuilds_the_step_from_its_file(
    name: str, mode: Mode, tmp_path: Path
) -> None:
    found = on_cpu(name, mode)
    path = tmp_path / "t.json.gz"
    write_trace(with_kernels(found.trace), path)
    again = read_trace(path)  # checks references, sizes and order
    assert again == with_kernels(found.trace)
    runner = found.rerun(again)
    runner.run_in_order(program_order_releases(again))
    assert_same_results(found, runner)


@every_network
@both_modes
def test_step_runs_from_the_trace_alone_on_values_of_the_models_range(name: str, mode: Mode) -> None:
    trace = on_cpu(name, mode).trace
    runner = Runner(trace, CPU)
    runner.bind(make_initial(trace, CPU, seed=0).tensors)
    run_all(runner)
    results = [t for t, tensor in enumerate(trace.tensors) if tensor.role in ("output", "gradient")]
    assert results
    for index in results:
        tensor = runner.tensors[index]
        assert tensor is not None
        assert torch.isfinite(tensor).all()


@every_network
def test_recording_leaves_the_model_and_its_inputs_as_they_were(name: str) -> None:
    step = load_step(spec(name), mode="train", batch=BATCH, dtype="fp32", memory_format="contiguous", device=CPU)
    before = copy.deepcopy((step.module.state_dict(), step.inputs))
    record(joint_graph(step))
    for old, new in zip(
        *(torch.utils._pytree.tree_leaves(tree) for tree in (before, (step.module.state_dict(), step.inputs))),
        strict=True,
    ):
        assert torch.equal(old, new) if isinstance(old, torch.Tensor) else old == new


@pytest.mark.parametrize("name", ["branches", "in_place", "outputs", "shared"])
def test_optimizer_is_torchs_sgd_with_momentum(name: str) -> None:
    """Three runs of the trace are three steps of torch.optim.SGD; momenta of zero begin as its first step does."""
    found = on_cpu(name)
    module = copy.deepcopy(found.step.module)
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    assert found.step.loss is not None
    runner = found.rerun()
    for _ in range(3):
        run_all(runner)
        optimizer.zero_grad(set_to_none=True)
        found.step.loss(module(*found.step.inputs), found.step.target).backward()
        optimizer.step()
    wanted = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    states = [i for i, t in enumerate(found.trace.tensors) if t.role in ("parameter", "buffer")]
    assert states
    for index in states:
        tensor = runner.tensors[index]
        assert tensor is not None
        assert torch.equal(tensor, wanted[found.trace.tensors[index].name])


def test_optimizer_takes_the_last_layers_first_and_in_buckets() -> None:
    """Early gradients must not wait for late ones."""
    parameters, gradients, momenta = ([torch.randn(2) for _ in range(OPTIMIZER_BUCKET + 3)] for _ in range(3))
    calls: list[list[torch.Tensor]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpusim.gpu.capture.joint_graph.sgd_step", lambda p, g, m: calls.append(p))
        from gpusim.gpu.capture.joint_graph import _sgd

        _sgd(list(zip(parameters, gradients, momenta, strict=True)))
    assert [len(bucket) for bucket in calls] == [OPTIMIZER_BUCKET, 3]
    assert calls[0][0] is parameters[-1]


def test_trace_carries_the_code_that_captured_it() -> None:
    assert on_cpu("branches").trace.provenance.gpusim == code_version()


# --- Layers, phases, the split of convolution_backward ---


@every_network
def test_phases_come_in_order_and_all_three_are_there(name: str) -> None:
    trace = on_cpu(name).trace
    assert list(dict.fromkeys(op.phase for op in trace.ops)) == ["forward", "backward", "optimizer"]
    assert {op.phase for op in on_cpu(name, "infer").trace.ops} == {"forward"}


def test_every_op_carries_the_layer_it_comes_from() -> None:
    """Forward and backward ops of a convolution have its module path, in any branch."""
    trace = on_cpu("branches").trace
    paths = {path for path, module in Branches().named_modules() if isinstance(module, torch.nn.Conv2d)}
    assert len(paths) == 7
    for phase, target in (("forward", "convolution"), ("backward", "convolution_backward")):
        layers = {trace.ops[i].layer for i in ops_of(trace, target) if trace.ops[i].phase == phase}
        assert layers == paths
    assert {trace.ops[i].layer for i in ops_of(trace, "cat")} == {""}  # in the forward of the whole
    assert {trace.ops[i].layer for i in ops_of(trace, "_foreach_mul_")} == {""}


def test_layer_called_several_times_keeps_its_path_each_time() -> None:
    trace = on_cpu("shared").trace
    forward = [op.layer for op in trace.ops if op.phase == "forward" and op.target.startswith("aten.addmm.")]
    assert forward == ["body"] * 3
    assert {op.layer for op in trace.ops if op.phase == "backward"} >= {"body", "tied"}


def convolution_halves(trace: Trace) -> list[tuple[int, int]]:
    names = {op.name: index for index, op in enumerate(trace.ops)}
    return [(names[n.removesuffix("_wgrad")], i) for n, i in names.items() if n.endswith("_wgrad")]


@pytest.mark.parametrize("name", ["branches", "pooled", "grouped", "up_and_down", "frozen"])
@pytest.mark.parametrize("memory_format", ["contiguous", "channels_last"])
def test_convolution_backward_is_two_ops_that_do_not_need_each_other(name: str, memory_format: MemoryFormat) -> None:
    trace = on_cpu(name, "train", memory_format).trace
    before = ancestors(dependencies(trace))
    backward = ops_of(trace, "convolution_backward")
    assert backward
    for index in backward:
        data, weight, bias = trace.ops[index].args[10]
        assert data != (weight or bias), "one op computes the gradient of the input or that of the weight, not both"
    for data, weight in convolution_halves(trace):
        assert data not in before[weight]
        assert weight not in before[data]
        assert trace.ops[data].layer == trace.ops[weight].layer != ""
    if name == "branches":  # seven convolutions, the first of which needs no gradient of its input
        assert (len(backward), len(convolution_halves(trace))) == (13, 6)


def test_convolution_backward_for_one_gradient_stays_one_call() -> None:
    graph = on_cpu("frozen").graph
    (call,) = [c for c in graph.calls if str(c.function).startswith("aten.convolution_backward")]
    assert split_convolution_backward(call) == [call]
    assert not call.name.endswith("_wgrad")


# --- What is kept, what is dropped, what is written ---


def test_calls_whose_results_nobody_uses_are_dropped() -> None:
    found = on_cpu("outputs")
    assert [str(call.function) for call in found.graph.calls].count("aten.argmax.default") == 1
    assert not ops_of(found.trace, "argmax")  # in training the loss is the only output
    assert ops_of(on_cpu("outputs", "infer").trace, "argmax")


def test_writes_through_views_are_kept() -> None:
    """Slices changed in place have no other user; their base tensor has."""
    trace = on_cpu("views", "infer").trace
    assert len(ops_of(trace, "add_")) == 1
    assert len(ops_of(trace, "mul_")) == 1


@pytest.mark.parametrize("name", ["branches", "views"])
def test_gradient_that_is_copied_through_views_survives_in_channels_last(name: str) -> None:
    """Autograd copies gradients by new_zeros, as_strided and copy_: the copy's result has no user, but its memory
    has.
    """
    found = on_cpu(name, "train", "channels_last")
    copies = [call for call in found.graph.calls if str(call.function).startswith("aten.copy_.")]
    assert copies
    live = {call.name for call in live_calls(found.graph)}
    assert all(call.name in live for call in copies)
    runner = found.rerun()
    run_all(runner)
    assert_same_results(found, runner)


def test_copy_into_a_view_that_is_used_later_is_live() -> None:
    """new_zeros -> as_strided -> copy_, then use of the base: the pattern of autograd's own copies."""

    class Strided(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            base = x.new_zeros(16)
            base.as_strided((4, 2), (2, 1)).copy_(self.layer(x).reshape(4, 2))
            x.new_zeros(3).add_(1.0)  # unused
            return base.sum().reshape(1, 1) + x

    step = load_step(spec("outputs"), mode="infer", batch=2, dtype="fp32", memory_format="contiguous", device=CPU)
    step = type(step)("strided", Strided().requires_grad_(False), (torch.randn(2, 4),), None, None)
    targets = [str(call.function) for call in live_calls(joint_graph(step))]
    assert targets.count("aten.copy_.default") == 1
    assert targets.count("aten.new_zeros.default") == 1
    assert "aten.add_.Tensor" not in targets


def test_batch_norm_statistics_are_writes() -> None:
    """The schema of native_batch_norm does not say that it changes them."""
    trace = on_cpu("pooled").trace
    (op,) = (trace.ops[i] for i in ops_of(trace, "native_batch_norm"))
    names = {trace.tensors[t].name for t in op.writes}
    assert {"bn.running_mean", "bn.running_var"} <= names
    (quiet,) = (o for o in on_cpu("pooled", "infer").trace.ops if o.target.startswith("aten.native_batch_norm"))
    statistics = {"bn.running_mean", "bn.running_var"}
    assert not {on_cpu("pooled", "infer").trace.tensors[t].name for t in quiet.writes} & statistics


def test_undeclared_change_of_a_state_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "UNDECLARED_WRITES", {})
    step = load_step(spec("pooled"), mode="train", batch=2, dtype="fp32", memory_format="contiguous", device=CPU)
    with pytest.raises(CaptureError, match=r"changes 'bn\.running_mean' in place without declaring it"):
        record(joint_graph(step))


def test_buffer_that_is_a_view_shares_its_memory_in_the_trace() -> None:
    """A change seen through another buffer orders the ops that read it."""
    trace = on_cpu("buffer_view").trace
    tensors = {t.name: t for t in trace.tensors if t.role == "buffer"}
    assert tensors["whole"].storage == tensors["row"].storage
    assert tensors["row"].offset == 5
    initial = make_initial(trace, CPU, seed=0)
    whole, row = (next(i for i, t in enumerate(trace.tensors) if t.name == name) for name in ("whole", "row"))
    assert torch.equal(initial.tensors[whole][1], initial.tensors[row])
    initial.tensors[row].fill_(7.0)
    assert (initial.tensors[whole][1] == 7.0).all()
    initial.restore()
    assert torch.equal(initial.tensors[whole], initial.pristine[whole])


def test_states_that_the_step_does_not_use_are_not_in_the_trace() -> None:
    names = {t.name for t in on_cpu("shared").trace.tensors}
    assert not {"unused.weight", "unused.bias", "momentum.unused.weight"} & names


@every_network
@both_modes
def test_views_read_no_element_and_each_written_tensor_is_made_or_mentioned(name: str, mode: Mode) -> None:
    trace = on_cpu(name, mode).trace
    for op in trace.ops:
        assert op.writes or not op.reads
        made = {trace.tensors[t].storage for t in op.outputs if t is not None}
        assert {trace.tensors[t].storage for t in op.writes} <= made | {trace.tensors[t].storage for t in op.reads}


# --- Dependencies are complete: any legal order, any stream assignment ---


def last_first(trace: Trace) -> list[int]:
    """Return the legal order furthest from the recorded one: always the last ready op."""
    left = [set(before) for before in dependencies(trace)]
    order: list[int] = []
    while len(order) < len(left):
        op = max(i for i, before in enumerate(left) if before is not None and not before and i not in order)
        order.append(op)
        for before in left:
            before.discard(op)
    return order


@every_network
@both_modes
def test_ops_run_last_first_give_identical_results(name: str, mode: Mode) -> None:
    found = on_cpu(name, mode)
    runner = found.rerun()
    run_all(runner, last_first(found.trace))
    assert_same_results(found, runner)


@every_network
@pytest.mark.parametrize("memory_format", ["contiguous", "channels_last"])
@settings(max_examples=3)
@given(data=st.data())
def test_any_legal_schedule_gives_identical_results_and_never_misses_a_tensor(
    name: str, memory_format: MemoryFormat, data: st.DataObject
) -> None:
    """In launch order, with each storage freed as in the sync plan."""
    found = on_cpu(name, "train", memory_format)
    order, streams = data.draw(schedules(found.trace))
    releases = plan_sync(found.trace, dependencies(found.trace), order, streams).releases
    runner = found.rerun()
    for place, op in enumerate(order):
        runner.release(releases[place])
        runner.run(op)
    assert_same_results(found, runner)


@every_network
def test_program_order_releases_nothing_twice_and_nothing_that_is_kept(name: str) -> None:
    trace = on_cpu(name).trace
    released = [storage for storages in program_order_releases(trace) for storage in storages]
    assert released
    assert len(released) == len(set(released))
    assert not set(released) & kept_storages(trace)


def test_random_ops_depend_on_each_other_in_order() -> None:
    """Two dropouts on independent branches draw from one generator."""
    trace = on_cpu("dropouts").trace
    drawing = [index for index, op in enumerate(trace.ops) if op.random]
    assert len(drawing) == 3
    preds = dependencies(trace)
    assert all(first in preds[second] for first, second in itertools.pairwise(drawing))


def test_dependencies_do_not_serialise_branches() -> None:
    """Ordering everything would be complete, too; the branches must stay independent."""
    trace = on_cpu("branches").trace
    before = ancestors(dependencies(trace))
    first = {op.layer.split(".")[0]: i for i, op in reversed(list(enumerate(trace.ops))) if op.phase == "forward"}
    for left in ("one", "three", "five", "pool"):
        for right in ("one", "three", "five", "pool"):
            assert left == right or first[left] not in before[first[right]]


# --- Losses and initial values ---


def test_default_loss_weights_auxiliary_outputs() -> None:
    torch.manual_seed(0)
    first, second, target = torch.randn(3, 4), torch.randn(3, 4), torch.tensor([0, 3, 1])
    entropy = torch.nn.functional.cross_entropy
    wanted = entropy(first, target) + AUXILIARY_WEIGHT * entropy(second, target)
    assert torch.equal(default_loss({"a": first, "b": [second, torch.arange(3)]}, target), wanted)


def test_default_loss_without_class_scores_is_the_mean_square() -> None:
    output = torch.tensor([[[1.0, 3.0]]])
    assert default_loss((output, torch.arange(2)), None).item() == 5.0
    with pytest.raises(CaptureError, match="no floating-point tensor"):
        default_loss(torch.arange(3), None)


def test_own_loss_is_used_and_needs_no_target() -> None:
    found = on_cpu("own_loss")
    assert found.step.target is None
    (output,) = found.recorded.outputs
    wanted = found.step.module(*found.step.inputs).pow(2).sum()
    assert torch.equal(found.recorded.final[output], wanted)


def state_of(tensor: torch.Tensor, role: str = "input") -> TensorInit:
    from gpusim.gpu.capture.calls import State

    return initial_values(tensor, State("s", role, tensor))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tensor", "role", "wanted"),
    [
        (torch.zeros(3), "optimizer_state", TensorInit(kind="constant", a=0.0)),
        (torch.empty(0), "input", TensorInit(kind="constant")),
        (torch.tensor([2, 9, 4]), "input", TensorInit(kind="values", values=(2.0, 9.0, 4.0))),
        (torch.tensor([2, 9, 4]), "target", TensorInit(kind="integers", a=2.0, b=9.0)),
        (torch.tensor([0.5, -2.0]), "constant", TensorInit(kind="values", values=(0.5, -2.0))),
        (torch.tensor([0.5, 2.0]), "buffer", TensorInit(kind="uniform", a=0.5, b=2.0)),
        (torch.tensor([-1.0, 1.0]), "parameter", TensorInit(kind="normal", a=0.0, b=math.sqrt(2.0))),
        (torch.arange(5000), "input", TensorInit(kind="integers", a=0.0, b=4999.0)),
    ],
)
def test_initial_values_are_exact_where_small_and_integral(tensor: torch.Tensor, role: str, wanted: TensorInit) -> None:
    found = state_of(tensor, role)
    assert (found.kind, found.a, found.values) == (wanted.kind, wanted.a, wanted.values)
    assert found.b == pytest.approx(wanted.b)


def test_infinite_constant_survives_the_file(tmp_path: Path) -> None:
    """A causal mask has minus infinity, which plain JSON lacks."""
    found = on_cpu("attention")
    path = tmp_path / "t.json"
    write_trace(with_kernels(found.trace), path)
    check_trace(read_trace(path), "again")


@every_network
def test_initial_state_has_the_shapes_of_the_trace_and_is_the_same_for_the_same_seed(name: str) -> None:
    trace = on_cpu(name).trace
    first, second = (make_initial(trace, CPU, seed=3).tensors for _ in range(2))
    assert {i for i, t in enumerate(trace.tensors) if t.init is not None} == set(first)
    for index, tensor in first.items():
        wanted = trace.tensors[index]
        assert (tuple(tensor.shape), tuple(tensor.stride())) == (wanted.shape, wanted.stride)
        assert str(tensor.dtype) == f"torch.{wanted.dtype}"
        assert torch.equal(tensor, second[index])
