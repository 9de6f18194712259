"""Memory plans with variants: predictions by hand, vDNN's memory-optimal algorithms, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgspec
import pytest

import gpusim
from gpusim.analysis.simulation import simulate_plan
from gpusim.errors import PlanError
from gpusim.formats.trace import Trace, Variant, VariantSettings
from gpusim.memplan.compare import compare_policies
from gpusim.memplan.evaluate import MemoryEvaluator, Outcome
from gpusim.memplan.lower_bound import LowerBound
from gpusim.memplan.plan import MemoryPlan
from gpusim.memplan.policies.base import Setting
from gpusim.memplan.policies.registry import MEMORY_POLICIES
from gpusim.memplan.snapshot import snapshot_document
from gpusim.report.memory_table import memory_document, print_memory
from gpusim.units import parse_bytes
from tests.support.helpers import kernel
from tests.support.memory_steps import SIZE, chain_step, graph_of, op_of

CONV = "aten.convolution.default"
#: Algorithms of two ops of the chain: workspace in tensors, and time. The first is the captured one.
ALGORITHMS = {
    "f3": {"captured": (4, 100_000), "small": (0, 150_000), "as small": (0, 160_000)},
    "b3": {"captured": (3, 200_000), "middle": (2, 220_000), "slow": (2, 250_000), "small": (1, 300_000)},
}


def with_algorithms(trace: Trace, algorithms: Mapping[str, Mapping[str, tuple[float | None, int]]]) -> Trace:
    """Return the trace with workspaces of ops, and with variants of known or unknown (None) workspace."""
    ops = list(trace.ops)
    for name, of_op in algorithms.items():
        (captured, _), *variants = of_op.values()
        assert captured is not None
        index = op_of(trace, name)
        ops[index] = msgspec.structs.replace(
            ops[index],
            workspace_bytes=round(captured * SIZE),
            variants=tuple(
                Variant(
                    name=variant,
                    settings=VariantSettings(deterministic=True),
                    kernels=(kernel(dur_ns),),
                    workspace_bytes=None if tensors is None else round(tensors * SIZE),
                )
                for variant, (tensors, dur_ns) in zip(list(of_op)[1:], variants, strict=True)
            ),
        )
    return msgspec.structs.replace(trace, ops=tuple(ops))


def step() -> Trace:
    return with_algorithms(chain_step(4, target=CONV), ALGORITHMS)


def chosen(trace: Trace, plan: MemoryPlan) -> dict[str, str]:
    """Return the variants of a plan by op name."""
    return {
        op.name: op.variants[number - 1].name for op, number in zip(trace.ops, plan.variants, strict=False) if number
    }


def running(trace: Trace, names: Mapping[str, str]) -> tuple[int, ...]:
    """Return the numbers of variants by op name."""
    return tuple(
        [variant.name for variant in op.variants].index(names[op.name]) + 1 if op.name in names else 0
        for op in trace.ops
    )


def plan_of(trace: Trace, policy: str, tensors: float | None = None) -> MemoryPlan:
    budget = None if tensors is None else round(tensors * SIZE)
    return MEMORY_POLICIES[policy](Setting.of(graph_of(trace), budget))


def outcome_of(trace: Trace, plan: MemoryPlan) -> Outcome:
    return MemoryEvaluator(graph_of(trace)).evaluate(plan)


def test_plan_has_times_and_workspaces_of_its_variants() -> None:
    # Kept are x, a0 .. a3 during f3 and x, a0, a1, a2, g3, g2 during b3: 5 and 6 tensors, with workspaces of 4 and 3.
    trace = step()
    captured_ns = 4 * 100_000 + 1_000 + 4 * 200_000
    for names, tensors, longer_ns in (
        ({}, 9, 0),
        ({"f3": "small"}, 6 + 3, 50_000),
        ({"f3": "small", "b3": "middle"}, 6 + 2, 70_000),
        ({"f3": "small", "b3": "small"}, 6 + 1, 150_000),
    ):
        outcome = outcome_of(trace, MemoryPlan(variants=running(trace, names)))
        assert outcome.peak_bytes == tensors * SIZE
        assert outcome.step_ns == captured_ns + longer_ns
        assert (outcome.exposed_copy_ns, outcome.recompute_ns, outcome.variants_ns) == (0, 0, longer_ns)
        simulated = simulate_plan(graph_of(trace), outcome.plan)
        assert (simulated.makespan_ns, simulated.peak_bytes) == (outcome.step_ns, outcome.peak_bytes)
        assert simulated.timeline.makespan_ns == outcome.step_ns


def test_memory_optimal_is_the_least_workspace_and_the_fastest_of_these() -> None:
    # Copied back before b3 are a1 and a2: with x, g3 and g2 there are 5 tensors. During f3 x, a2 and a3 are there.
    trace = step()
    for policy in ("vdnn_all", "vdnn_conv"):
        plain, optimal = plan_of(trace, policy), plan_of(trace, f"{policy}_m")
        assert not plain.has_variants
        assert replace(optimal, variants=()) == plain
        assert chosen(trace, optimal) == {"f3": "small", "b3": "small"}
        assert outcome_of(trace, plain).peak_bytes == (5 + 3) * SIZE
        assert outcome_of(trace, optimal).peak_bytes == (5 + 1) * SIZE


def test_time_of_other_kernels_is_told_from_that_of_copies(capsys: pytest.CaptureFixture[str]) -> None:
    """f3 takes 50 us more and b3 100 us, of 1,201 us; the rest of the loss is the copies'."""
    comparison = compare_policies(graph_of(step()), policies=["vdnn_all", "vdnn_all_m"])
    plain, optimal = (comparison.row(policy).outcome for policy in ("vdnn_all", "vdnn_all_m"))
    assert plain is not None
    assert optimal is not None
    assert (plain.variants_ns, optimal.variants_ns) == (0, 150_000)
    assert optimal.step_ns == 1_201_000 + 150_000 + optimal.exposed_copy_ns
    print_memory(comparison)
    assert "Other kernels, of the time of keep_all: vdnn_all_m +12.5%\n" in capsys.readouterr().out
    assert [row.get("variants_ns") for row in memory_document(comparison)["policies"]] == [0, 0, 150_000]


def test_captured_algorithm_stays_where_none_takes_less() -> None:
    trace = with_algorithms(chain_step(4, target=CONV), {"f3": {"captured": (1, 100_000), "larger": (2, 50_000)}})
    assert plan_of(trace, "vdnn_all_m") == plan_of(trace, "vdnn_all")


def test_dynamic_downgrades_only_the_algorithms_that_do_not_fit() -> None:
    trace = step()
    assert plan_of(trace, "vdnn_dyn", 9) == MemoryPlan()
    assert plan_of(trace, "vdnn_dyn", 8) == plan_of(trace, "vdnn_conv")
    # 7 tensors: b3 takes 5 + 3, and 5 + 2 with the faster one of two; f3 takes 3 + 4, which fits.
    downgraded = plan_of(trace, "vdnn_dyn", 7)
    assert replace(downgraded, variants=()) == plan_of(trace, "vdnn_conv")
    assert chosen(trace, downgraded) == {"b3": "middle"}
    assert chosen(trace, plan_of(trace, "vdnn_dyn", 6)) == {"f3": "small", "b3": "small"}
    with pytest.raises(PlanError, match="no configuration keeps"):
        plan_of(trace, "vdnn_dyn", 5.9)


def test_size_that_the_dynamic_policy_names_works_as_its_budget() -> None:
    """The least peak, of 5 tensors and a workspace of 1.0003, is 24.001 MiB: 24 MiB would not do."""
    small = {"captured": (3, 200_000), "small": (1.0003, 300_000)}
    trace = with_algorithms(chain_step(4, target=CONV), {"b3": small})
    with pytest.raises(PlanError, match=r"no configuration keeps 24 MiB; .* takes [\d.]+ MiB") as caught:
        plan_of(trace, "vdnn_dyn", 6)
    named_bytes = parse_bytes(str(caught.value).rpartition("takes ")[2])
    assert outcome_of(trace, plan_of(trace, "vdnn_dyn", named_bytes / SIZE)).peak_bytes > 6 * SIZE


def test_dynamic_tries_all_inputs_before_it_downgrades() -> None:
    """Layer 1 pools, so only `all` moves its input: 5 tensors during b3 and not 6, which f3 with 3 + 4 allows."""
    trace = step()
    ops = tuple(
        msgspec.structs.replace(
            op, target={"f1": "aten.avg_pool2d.default", "b1": "aten.avg_pool2d_backward.default"}[op.name]
        )
        if op.name in ("f1", "b1")
        else op
        for op in trace.ops
    )
    trace = msgspec.structs.replace(trace, ops=ops)
    peaks = {name: outcome_of(trace, plan_of(trace, name)).peak_bytes / SIZE for name in ("vdnn_conv", "vdnn_all")}
    assert peaks["vdnn_all"] < peaks["vdnn_conv"]
    assert plan_of(trace, "vdnn_dyn", peaks["vdnn_all"]) == plan_of(trace, "vdnn_all")
    conv = plan_of(trace, "vdnn_dyn", peaks["vdnn_all"] - 0.5)
    assert replace(conv, variants=()) == plan_of(trace, "vdnn_conv")
    assert conv.has_variants
    least = outcome_of(trace, plan_of(trace, "vdnn_all_m")).peak_bytes / SIZE
    assert least < outcome_of(trace, plan_of(trace, "vdnn_conv_m")).peak_bytes / SIZE
    moved = plan_of(trace, "vdnn_dyn", least)
    assert replace(moved, variants=()) == plan_of(trace, "vdnn_all")


@pytest.mark.parametrize(
    "trace",
    [
        chain_step(4, target=CONV),
        with_algorithms(chain_step(4, target=CONV), {"f3": {"captured": (4, 100_000), "unknown": (None, 50_000)}}),
    ],
)
def test_without_workspaces_of_variants_there_is_no_memory_optimal(
    trace: Trace, capsys: pytest.CaptureFixture[str]
) -> None:
    """The dynamic policy goes without; the table has one line with the reason, and the others are as ever."""
    comparison = compare_policies(graph_of(trace), policies=["vdnn_all", "vdnn_all_m", "vdnn_conv_m"])
    for name in ("vdnn_all_m", "vdnn_conv_m"):
        assert "`gpusim capture --variants` measures it" in comparison.row(name).problem
    assert comparison.row("vdnn_all").outcome is not None
    print_memory(comparison)
    assert capsys.readouterr().out.count("vdnn_all_m, vdnn_conv_m: no convolution has a variant whose workspace") == 1
    document = memory_document(comparison)
    assert "vdnn_all" in [row["policy"] for row in document["policies"] if row["step_ns"] > 0]
    assert [row["policy"] for row in document["without_plan"]] == ["vdnn_all_m", "vdnn_conv_m"]
    keep_all = outcome_of(trace, MemoryPlan()).peak_bytes / SIZE
    assert plan_of(trace, "vdnn_dyn", keep_all) == MemoryPlan()
    assert plan_of(trace, "vdnn_dyn", keep_all - 0.5) == plan_of(trace, "vdnn_conv")


def test_step_without_convolutions_is_told_no_capture_that_would_not_help() -> None:
    comparison = compare_policies(graph_of(chain_step(4)), policies=["vdnn_all_m", "vdnn_conv_m"])
    assert list(comparison.without_plan.values()) == [["vdnn_all_m", "vdnn_conv_m"]]
    assert list(comparison.without_plan) == ["the step has no convolution, whose algorithms could be chosen"]


def test_bounds_and_snapshot_know_that_a_plan_runs_variants() -> None:
    """b3 takes x, g3, a2, g2 and its workspace of 3 tensors as captured: a bound that a plan with variants may pass."""
    trace = step()
    plan = plan_of(trace, "vdnn_all_m")
    bound = LowerBound(MemoryEvaluator(graph_of(trace)))
    assert bound.least_bytes == 7 * SIZE > outcome_of(trace, plan).peak_bytes
    assert not bound.holds_for(plan)
    assert bound.holds_for(plan_of(trace, "vdnn_all"))
    comparison = compare_policies(graph_of(trace), policies=["vdnn_all_m"])
    evaluator = MemoryEvaluator(graph_of(trace))
    outcome = comparison.row("vdnn_all_m").outcome
    assert outcome is not None
    assert comparison.bound_ns(outcome) is None
    document = snapshot_document(evaluator.choosing(outcome.plan).storages, outcome)
    live = peak = 0
    for entry in document["device_traces"][0]:
        live += (
            entry["size"]
            if entry["action"] == "alloc"
            else -entry["size"]
            if entry["action"] == "free_completed"
            else 0
        )
        peak = max(peak, live)
    assert peak == outcome.peak_bytes


@pytest.mark.parametrize(
    ("variants", "problem"),
    [
        ((1,), "has variants for 1 ops, of 9"),
        ((5, *[0] * 8), "op 'f0' has no variant 5, of 0"),
        ((0, 0, 0, 3, *[0] * 5), "the workspace of variant 'unknown' of op 'f3' is unknown; `gpusim capture"),
        ((0, 0, 0, 2, *[0] * 5), "variant 'fused' of op 'f3' runs other ops, too"),
    ],
)
def test_plan_with_a_variant_that_cannot_run_is_refused(variants: tuple[int, ...], problem: str) -> None:
    trace = step()
    small, fused = (
        Variant(name=name, settings=VariantSettings(), kernels=(kernel(1000),), workspace_bytes=0, covers=covers)
        for name, covers in (("small", ()), ("fused", (op_of(trace, "loss"),)))
    )
    unknown = msgspec.structs.replace(small, name="unknown", workspace_bytes=None)
    ops = list(trace.ops)
    ops[3] = msgspec.structs.replace(ops[3], variants=(small, fused, unknown))
    trace = msgspec.structs.replace(trace, ops=tuple(ops))
    with pytest.raises(PlanError, match=problem):
        outcome_of(trace, MemoryPlan(variants=variants))


def test_torchs_own_tools_refuse_a_plan_with_variants() -> None:
    trace = step()
    plan = plan_of(trace, "vdnn_all_m")
    with pytest.raises(PlanError, match="runs variants of ops"):
        gpusim.checkpoint_policy(trace, plan)
    with pytest.raises(PlanError, match="runs variants of ops"):
        gpusim.mark_offloads([], trace, plan)
