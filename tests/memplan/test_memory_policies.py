"""Each memory policy on steps small enough to work out by hand."""

from __future__ import annotations

import itertools
import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpusim
from gpusim.errors import OptionError, PlanError, UnknownNameError
from gpusim.formats.trace import Trace
from gpusim.memplan.evaluate import MemoryEvaluator, Outcome
from gpusim.memplan.layers import Layers, kind_of
from gpusim.memplan.plan import MemoryPlan
from gpusim.memplan.policies.base import Setting
from gpusim.memplan.policies.capuchin import capuchin
from gpusim.memplan.policies.checkpoint import cuts
from gpusim.memplan.policies.registry import MEMORY_POLICIES, memory_policy_by_name
from gpusim.memplan.policies.torch_budget import BUCKETS, knapsack
from gpusim.memplan.storages import Storages
from gpusim.trace.store import load_trace
from tests.support.helpers import Step, kernel, make_trace
from tests.support.memory_steps import SIZE, WITHOUT_VARIANTS, chain_step, graph_of, op_of, storage_of, with_bytes

CONV = "aten.convolution.default"
#: Time of a copy of 4 MiB at 50 bytes per ns.
COPY_NS = SIZE // 50


def setting_of(trace: Trace, budget: int | None = None, **hardware: float) -> Setting:
    return Setting.of(graph_of(trace, **hardware), budget)


def plan_of(trace: Trace, policy: str, budget: int | None = None) -> MemoryPlan:
    return MEMORY_POLICIES[policy](setting_of(trace, budget))


def outcome_of(trace: Trace, policy: str, budget: int | None = None) -> Outcome:
    return MemoryEvaluator(graph_of(trace)).evaluate(plan_of(trace, policy, budget))


def moves(trace: Trace, plan: MemoryPlan) -> dict[str, tuple[str, str, str]]:
    """Return tensor name -> the ops after which it leaves, before which it is freed, before which it returns."""
    names = {t.storage: t.name for t in trace.tensors}
    return {
        names[o.storage]: (trace.ops[o.after].name, trace.ops[o.free].name, trace.ops[o.back].name)
        for o in plan.offloads
    }


def again(trace: Trace, plan: MemoryPlan) -> dict[str, list[str]]:
    """Return op -> what is recomputed before it."""
    return {trace.ops[redo.before].name: [trace.ops[op].name for op in redo.ops] for redo in plan.redos}


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        ("aten.convolution.default", "conv"),
        ("aten.convolution_backward.default", "conv"),
        ("aten.addmm.default", "fc"),
        ("aten.relu_.default", "activation"),
        ("aten.threshold_backward.default", "activation"),
        ("aten.cudnn_batch_norm.default", "norm"),
        ("aten.native_layer_norm_backward.default", "norm"),
        ("aten.max_pool2d_with_indices.default", "pool"),
        ("aten.native_dropout.default", "dropout"),
        ("aten.cat.default", "join"),
        ("aten.add_.Tensor", "join"),
        ("aten._log_softmax.default", "loss"),
        ("aten._scaled_dot_product_efficient_attention.default", "attention"),
        ("aten._softmax.default", "activation"),
        ("aten.embedding.default", "other"),
    ],
)
def test_operators_are_told_apart_by_name(target: str, kind: str) -> None:
    assert kind_of(target) == kind


def test_backward_ops_belong_to_the_layer_whose_tensors_they_read() -> None:
    trace = chain_step(4, target=CONV)
    layers = Layers.of(Storages.of(trace))
    for i in range(4):
        assert layers.number_of[op_of(trace, f"b{i}")] == layers.number_of[op_of(trace, f"f{i}")]
    assert [layers.layers[n].op for n in layers.backward_order] == [op_of(trace, f"f{i}") for i in (3, 2, 1, 0)]


def test_every_backward_op_of_a_real_step_belongs_to_a_layer_of_its_kind() -> None:
    trace = load_trace("resnet50-train-b8")
    layers = Layers.of(Storages.of(trace))
    for layer in layers.layers:
        for op in layer.backward:
            kind = kind_of(trace.ops[op].target)
            if kind in ("conv", "norm", "activation"):
                assert kind == layer.kind, trace.ops[op].name


def test_keep_all_does_nothing() -> None:
    assert plan_of(chain_step(), "keep_all") == MemoryPlan()


def test_caffe_keeps_every_activation_and_gradient_to_the_end() -> None:
    # x, a0 .. a3, g3 .. g0 and w: all of them at once.
    trace = chain_step(4, target=CONV)
    assert outcome_of(trace, "caffe").peak_bytes == (1 + 4 + 4 + 1) * SIZE
    assert outcome_of(trace, "keep_all").peak_bytes == 6 * SIZE


def test_vdnn_moves_inputs_beside_their_layer_and_back_one_layer_ahead() -> None:
    trace = chain_step(4, target=CONV)
    plan = plan_of(trace, "vdnn_all")
    # a0 leaves during f1, which reads it, is freed after f1, and is back during the layer before its own.
    assert moves(trace, plan) == {
        "a0": ("f0", "f2", "b2"),
        "a1": ("f1", "f3", "b3"),
        "a2": ("f2", "loss", "b3"),
    }
    assert op_of(trace, "f1") in plan.barriers


def test_vdnn_layer_takes_as_long_as_the_longer_of_computation_and_copy() -> None:
    # Copies of 83.9 us are shorter than layers of 100 us: all hidden except the first one back, which the backward pass
    # begins with.
    trace = chain_step(4, target=CONV)
    outcome = outcome_of(trace, "vdnn_all")
    assert outcome.step_ns == 4 * 100_000 + 1_000 + COPY_NS + 4 * 200_000
    assert outcome.exposed_copy_ns == COPY_NS
    # Layers of 50 us are shorter: each waits for its copy.
    trace = chain_step(4, dur_ns=50_000, target=CONV)
    outcome = outcome_of(trace, "vdnn_all")
    assert outcome.step_ns == 50_000 + 3 * COPY_NS + 1_000 + COPY_NS + 4 * 100_000


def test_vdnn_conv_moves_inputs_of_convolutions_alone_and_all_leaves_out_activations() -> None:
    steps = [
        Step("conv", "x w", "c", kernels=(kernel(1000),), target=CONV),
        Step("relu", "c", "r", kernels=(kernel(1000),), target="aten.relu.default"),
        Step("pool", "r", "p", kernels=(kernel(1000),), target="aten.avg_pool2d.default"),
        Step("conv2", "p w", "d", kernels=(kernel(1000),), target=CONV),
        Step("loss", "d", "l", kernels=(kernel(1000),), target="aten.nll_loss_forward.default"),
        Step("dconv2", "l p w", "gp", kernels=(kernel(1000),), target="aten.convolution_backward.x", phase="backward"),
        Step("dpool", "gp r", "gr", kernels=(kernel(1000),), target="aten.avg_pool2d_backward.x", phase="backward"),
        Step("drelu", "gr r c", "gc", kernels=(kernel(1000),), target="aten.threshold_backward.x", phase="backward"),
        Step("dconv", "gc x w", "gw", kernels=(kernel(1000),), target="aten.convolution_backward.x", phase="backward"),
    ]
    trace = make_trace(steps, outputs="gw", elements=SIZE // 4)
    # conv2 is the last layer that is neither activation nor loss: its input p stays.
    assert set(moves(trace, plan_of(trace, "vdnn_conv"))) == set()
    assert set(moves(trace, plan_of(trace, "vdnn_all"))) == {"r"}


def test_vdnn_dyn_takes_the_first_configuration_that_fits() -> None:
    trace = chain_step(6, target=CONV)
    keep_all, moved = (outcome_of(trace, policy).peak_bytes for policy in ("keep_all", "vdnn_all"))
    assert moved < keep_all
    assert plan_of(trace, "vdnn_dyn", keep_all) == MemoryPlan()
    assert plan_of(trace, "vdnn_dyn", keep_all - 1) == plan_of(trace, "vdnn_conv")
    with pytest.raises(PlanError, match="moving all inputs takes"):
        plan_of(trace, "vdnn_dyn", moved - 1)


def test_layrub_comes_back_one_layer_ahead_and_waits_for_what_works_in_place() -> None:
    trace = chain_step(4, target=CONV)
    found = moves(trace, plan_of(trace, "layrub_inter"))
    assert found["a0"] == ("f0", "f2", "b2")
    assert found["a1"] == ("f1", "f3", "b3")
    in_place = chain_step(4, target="aten.native_batch_norm.x")
    # Nothing overlaps with the copy out of batch norm's input: it starts after the layer.
    assert moves(in_place, plan_of(in_place, "layrub_inter"))["a0"] == ("f1", "f2", "b2")


def test_layrub_puts_the_gradient_of_the_weights_first() -> None:
    trace = load_trace("resnet50-train-b8")
    plan = plan_of(trace, "layrub_intra")
    place = {op: number for number, op in enumerate(plan.order)}
    pairs = [(op, op + 1) for op, node in enumerate(trace.ops[:-1]) if trace.ops[op + 1].name == f"{node.name}_wgrad"]
    assert pairs
    assert all(place[weights] < place[data] for data, weights in pairs)
    # Random ops keep their order, so a pair of them stays as recorded.
    ops = [msgspec.structs.replace(op, random=op.name.startswith("convolution_backward")) for op in trace.ops]
    drawn = msgspec.structs.replace(trace, ops=ops)
    assert plan_of(drawn, "layrub_intra").order == tuple(range(len(ops)))
    assert outcome_of(drawn, "layrub").step_ns


def test_checkpoint_keeps_every_third_of_nine_and_computes_what_lies_between_again() -> None:
    trace = chain_step(9)
    assert cuts(Storages.of(trace)) == [op_of(trace, f"f{i}") for i in range(9)]
    # f2 and f5 are checkpoints; f8 would be one, but the backward pass begins after it.
    assert again(trace, plan_of(trace, "checkpoint")) == {"b5": ["f3", "f4"], "b2": ["f0", "f1"]}


def test_checkpoint_costs_each_forward_op_at_most_once_more() -> None:
    outcome = outcome_of(chain_step(9), "checkpoint")
    assert outcome.recompute_ns == 4 * 100_000
    assert outcome.exposed_copy_ns == 0


def test_superneurons_moves_results_of_convolutions_and_computes_the_rest_again() -> None:
    steps = [
        Step("conv", "x w", "c", kernels=(kernel(400_000),), target=CONV),
        Step("relu", "c", "r", kernels=(kernel(100_000),), target="aten.relu.default"),
        Step("conv2", "r w", "d", kernels=(kernel(400_000),), target=CONV),
        Step("relu2", "d", "s", kernels=(kernel(100_000),), target="aten.relu.default"),
        Step("fc", "s w", "l", kernels=(kernel(400_000),), target="aten.addmm.default"),
        Step("dfc", "l s w", "gs", kernels=(kernel(400_000),), target="aten.mm.default", phase="backward"),
        Step("dr2", "gs d", "gd", kernels=(kernel(100_000),), target="aten.threshold_backward.x", phase="backward"),
        Step("dc2", "gd r w", "gr", kernels=(kernel(400_000),), target="aten.convolution_backward.x", phase="backward"),
        Step("dr", "gr c", "gc", kernels=(kernel(100_000),), target="aten.threshold_backward.x", phase="backward"),
        Step("dc", "gc x w", "gw", kernels=(kernel(400_000),), target="aten.convolution_backward.x", phase="backward"),
    ]
    trace = make_trace(steps, outputs="gw", elements=SIZE // 4)
    plan = plan_of(trace, "superneurons")
    assert set(moves(trace, plan)) == {"c", "d", "l"}
    assert again(trace, plan) == {"dfc": ["relu2"], "dc2": ["relu"]}


def test_superneurons_moves_a_join_that_adds_in_place_to_what_a_batch_norm_has_made() -> None:
    """As in torchvision's ResNets: `n` is the batch norm's until the join adds to it."""
    steps = [
        Step("conv", "x w", "c", kernels=(kernel(400_000),), target=CONV),
        Step("norm", "c", "n", kernels=(kernel(100_000),), target="aten.cudnn_batch_norm.default"),
        Step("join", "n x", changes="n", kernels=(kernel(100_000),), target="aten.add_.Tensor"),
        Step("conv2", "n w", "d", kernels=(kernel(400_000),), target=CONV),
        Step("norm2", "d", "m", kernels=(kernel(100_000),), target="aten.cudnn_batch_norm.default"),
        Step("fc", "m w", "l", kernels=(kernel(400_000),), target="aten.addmm.default"),
        Step("dfc", "l m w", "gm", kernels=(kernel(400_000),), target="aten.mm.default", phase="backward"),
        Step(
            "dn2", "gm d", "gd", kernels=(kernel(100_000),), target="aten.cudnn_batch_norm_backward.x", phase="backward"
        ),
        Step("dc2", "gd n w", "gn", kernels=(kernel(400_000),), target="aten.convolution_backward.x", phase="backward"),
        Step("dc", "gn x w", "gw", kernels=(kernel(400_000),), target="aten.convolution_backward.x", phase="backward"),
    ]
    trace = make_trace(steps, outputs="gw", elements=SIZE // 4)
    plan = plan_of(trace, "superneurons")
    assert set(moves(trace, plan)) == {"n", "d", "l"}
    assert again(trace, plan) == {"dfc": ["norm2"]}


def test_superneurons_release_moves_the_least_recently_used_and_waits() -> None:
    # Room for 5 tensors: x and a0 to a3. The loss's result is the sixth: a0 has been unused for longest.
    trace = chain_step(4)
    plan = plan_of(trace, "superneurons_release", 5 * SIZE)
    assert moves(trace, plan)["a0"] == ("f3", "loss", "b1")
    assert outcome_of(trace, "superneurons_release", 5 * SIZE).peak_bytes == 5 * SIZE
    with pytest.raises(PlanError, match="needs 16 MiB at once, the budget is 12 MiB"):
        plan_of(trace, "superneurons_release", 3 * SIZE)


def test_layup_moves_convolutions_and_takes_the_cheaper_way_for_the_rest() -> None:
    trace = chain_step(6, dur_ns=1_000)  # activations of 1 us: recomputing is faster than copying
    plan = plan_of(trace, "layup")
    assert not plan.offloads
    assert plan.redos
    trace = chain_step(6, dur_ns=1_000, target=CONV)
    plan = plan_of(trace, "layup")
    assert plan.offloads
    assert not plan.redos


def test_capuchin_swaps_the_longest_free_first_and_only_as_many_as_asked_for() -> None:
    trace = chain_step(6)
    peak = outcome_of(trace, "keep_all").peak_bytes
    plan = plan_of(trace, "capuchin", peak - SIZE)
    assert list(moves(trace, plan)) == ["a0"]  # away from f1 to b1
    assert not plan.redos
    assert outcome_of(trace, "capuchin", peak - SIZE).peak_bytes <= peak - SIZE


def test_capuchin_computes_again_what_cannot_be_swapped_in_time() -> None:
    trace = chain_step(6, dur_ns=1_000)  # a step of 18 us: no copy of 84 us hides in it
    peak = outcome_of(trace, "keep_all").peak_bytes
    plan = plan_of(trace, "capuchin", peak - 2 * SIZE)
    assert not plan.offloads
    assert plan.redos
    assert outcome_of(trace, "capuchin", peak - 2 * SIZE).peak_bytes <= peak - 2 * SIZE


def test_olla_finds_an_order_of_less_memory() -> None:
    # Two branches, each with a large tensor on the way to a small one: in sequence they need less.
    steps = [
        Step("a0", "x", "a0", kernels=(kernel(1000),)),
        Step("b0", "x", "b0", kernels=(kernel(1000),)),
        Step("a1", "a0", "a1", kernels=(kernel(1000),)),
        Step("b1", "b0", "b1", kernels=(kernel(1000),)),
    ]
    trace = with_bytes(make_trace(steps, outputs="a1 b1", elements=SIZE // 4), {"a1": 512, "b1": 512})
    assert outcome_of(trace, "keep_all").peak_bytes == 3 * SIZE + 512
    outcome = outcome_of(trace, "olla")
    assert outcome.peak_bytes == 2 * SIZE + 1024
    assert [trace.ops[op].name for op in outcome.plan.order] == ["a0", "a1", "b0", "b1"]


@given(
    st.lists(st.tuples(st.integers(1, 200), st.integers(0, 50)), min_size=1, max_size=9),
    st.sampled_from((0.0, 0.3, 0.5, 0.8, 1.0)),
)
def test_knapsack_is_as_good_as_trying_all(items: list[tuple[int, int]], share: float) -> None:
    sizes, values = [size for size, _ in items], [float(value) for _, value in items]
    chosen = knapsack(sizes, values, share)
    weights = [round(size * BUCKETS / sum(sizes)) for size in sizes]
    room = int(share * BUCKETS)
    assert sum(w for w, take in zip(weights, chosen, strict=True) if take) <= room
    best = max(
        sum(v for v, take in zip(values, choice, strict=True) if take)
        for choice in itertools.product((False, True), repeat=len(items))
        if sum(w for w, take in zip(weights, choice, strict=True) if take) <= room
    )
    assert sum(v for v, take in zip(values, chosen, strict=True) if take) == best


def test_torch_budget_saves_half_of_what_it_could() -> None:
    trace = chain_step(5)
    storages = Storages.of(trace)
    plan = plan_of(trace, "torch_budget")
    dropped = {storage for redo in plan.redos for storage in redo.storages}
    assert len(storages.saved) == 5
    assert len(dropped) == 3  # two of five are at most half of the bytes
    with pytest.raises(PlanError, match="no share keeps"):
        plan_of(trace, "torch_budget", SIZE)


def test_torch_offload_lets_go_of_everything_at_the_end_of_the_forward_pass() -> None:
    trace = chain_step(4)
    found = moves(trace, plan_of(trace, "torch_offload"))
    assert set(found) == {"a0", "a1"}  # a2 is where the backward pass begins
    assert {free for _, free, _ in found.values()} == {"b3"}


def test_events_in_place_of_waits_after_each_layer_are_never_slower() -> None:
    trace = chain_step(6, dur_ns=50_000, target=CONV)
    graph = graph_of(trace)
    evaluator = MemoryEvaluator(graph)
    for name in ("vdnn_all", "vdnn_conv", "layrub_inter", "layrub"):
        policy = MEMORY_POLICIES[name]
        waiting, events = (
            evaluator.evaluate(policy(Setting(graph, evaluator.storages, synchronous=synchronous)))
            for synchronous in (True, False)
        )
        assert events.step_ns <= waiting.step_ns
        assert not events.plan.barriers
        assert waiting.plan.barriers


@pytest.mark.parametrize("policy", WITHOUT_VARIANTS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_policy_makes_a_plan_that_can_run(policy: str, data: st.DataObject) -> None:
    layers = data.draw(st.integers(1, 8))
    dur_ns = data.draw(st.sampled_from((1_000, 60_000, 300_000)))
    target = data.draw(st.sampled_from((CONV, "aten.relu.default", "aten.native_batch_norm.x")))
    trace = chain_step(layers, dur_ns=dur_ns, target=target)
    outcome = outcome_of(trace, policy)  # raises where it is impossible
    assert outcome.step_ns >= outcome_of(trace, "keep_all").step_ns
    if policy != "caffe":
        assert outcome.peak_bytes <= outcome_of(trace, "keep_all").peak_bytes + SIZE


def test_inference_has_nothing_to_plan() -> None:
    steps = [Step(f"f{i}", f"a{i - 1}" if i else "x", f"a{i}", kernels=(kernel(1000),)) for i in range(4)]
    trace = make_trace(steps, outputs="a3", elements=SIZE // 4)
    for policy in WITHOUT_VARIANTS:
        assert outcome_of(trace, policy).d2h_bytes == 0


def test_unknown_policy_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'capuchin'"):
        memory_policy_by_name("capuchino")


def test_storages_of_a_chain_are_saved_in_order() -> None:
    trace = chain_step(4)
    storages = Storages.of(trace)
    assert list(storages.saved) == [storage_of(trace, n) for n in ("a0", "a1", "a2", "g3")]


@pytest.mark.parametrize(
    ("argument", "value"), [("policies", [1]), ("policies", "olla"), ("policies", 3), ("synchronous", "layers")]
)
def test_arguments_that_make_no_sense_are_named(argument: str, value: object) -> None:
    with pytest.raises(OptionError, match=argument):
        gpusim.memory(chain_step(4), **{argument: value})  # type: ignore[arg-type]


def test_capuchin_goes_no_further_once_recomputation_takes_too_long() -> None:
    """Ops of 100 ns, so no copy hides: 18 run again within 7 of 14 tensors, 10 where the first ones are too much."""
    setting = setting_of(chain_step(12, dur_ns=100), 7 * SIZE)
    ops = [sum(len(redo.ops) for redo in capuchin(setting, most_ns).redos) for most_ns in (math.inf, 1.0)]
    assert ops == [18, 10]
    assert capuchin(setting, math.inf) == capuchin(setting)
