"""Memory plans as files: unchanged by a round trip, and refused for another trace."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import gpusim
from gpusim.errors import ScheduleError
from gpusim.formats.trace import Trace, Variant, VariantSettings
from gpusim.memplan.plan import MemoryPlan, Offload, Redo, read_memory_plan, write_memory_plan
from tests.support.memory_steps import chain_step, op_of, storage_of


def a_plan() -> MemoryPlan:
    trace = chain_step(4)
    return MemoryPlan(
        offloads=(Offload(storage_of(trace, "a0"), op_of(trace, "f1"), op_of(trace, "f2"), op_of(trace, "b1")),),
        redos=(Redo(op_of(trace, "b2"), (op_of(trace, "f1"),), (storage_of(trace, "a1"),)),),
        held=(storage_of(trace, "a2"),),
        barriers=(op_of(trace, "f3"),),
        order=tuple(range(len(trace.ops))),
    ).made("by hand", "test", 5, 6)


def test_plan_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_memory_plan(a_plan(), chain_step(4), path)
    found = read_memory_plan(path, chain_step(4))
    assert found == a_plan()
    assert (found.policy, found.made_by, found.predicted_ns, found.predicted_peak_bytes) == ("by hand", "test", 5, 6)


def test_plan_of_another_trace_is_refused_also_where_both_have_one_name(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_memory_plan(a_plan(), chain_step(4), path)
    same = chain_step(5)
    with pytest.raises(ScheduleError, match=r"\$.trace_hash: is a memory plan of another trace, also named "):
        read_memory_plan(path, same)
    other = msgspec.structs.replace(same, model=msgspec.structs.replace(same.model, batch=same.model.batch + 1))
    with pytest.raises(ScheduleError, match=r"is a memory plan of another trace: of '.+', not of this '.+'"):
        read_memory_plan(path, other)


@pytest.mark.parametrize(
    ("change", "place", "problem"),
    [
        ({"offloads": [{"storage": 99, "after": "f0", "free": "f1", "back": "b0"}]}, "offloads", "no storage 99, of"),
        ({"offloads": [{"storage": 1, "after": "f0", "free": "zz", "back": "b0"}]}, "offloads", "no op 'zz'"),
        ({"redos": [{"before": "b0", "ops": ["nope"], "storages": []}]}, "redos", "no op 'nope'"),
        ({"redos": [{"before": "b0", "ops": [], "storages": [77]}]}, "redos", "no storage 77"),
        ({"held": [-1]}, "held", ">= 0"),
        ({"barriers": ["x"]}, "barriers", "no op 'x'"),
        ({"order": ["f0", "y"]}, "order", "no op 'y'"),
        ({"offloads": 3}, "offloads", "array"),
        (
            {"variants": [{"op": "f1", "variant": "x"}]},
            "variants[0].variant",
            "op 'f1' has no variant 'x' (the trace has",
        ),
        ({"variants": [{"op": "z", "variant": "x"}]}, "variants[0].op", "no op 'z'"),
        ({"variants": {"f1": "x"}}, "variants", "array"),
        ({"variants": [{"op": "f1", "variant": ""}]}, "variants[0].variant", "without a name"),
        ({"unknown": 3}, "", "unknown"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_place(
    tmp_path: Path, change: dict[str, object], place: str, problem: str
) -> None:
    path = tmp_path / "plan.json"
    write_memory_plan(a_plan(), chain_step(4), path)
    document = msgspec.json.decode(path.read_bytes())
    path.write_bytes(msgspec.json.encode({**document, **change}))
    with pytest.raises(ScheduleError) as caught:
        read_memory_plan(path, chain_step(4))
    assert place in str(caught.value)
    assert problem in str(caught.value)


def test_variants_are_named_in_the_file_and_come_back(tmp_path: Path) -> None:
    """Which number a variant has is the trace's business: in another capture of the step it may be another."""
    path = tmp_path / "plan.json"
    trace = with_variants(chain_step(4), {2: ("a", "b"), 5: ("c",)})
    plan = MemoryPlan(variants=(0, 0, 2, 0, 0, 1, 0, 0, 0))
    write_memory_plan(plan, trace, path)
    assert msgspec.json.decode(path.read_bytes())["variants"] == [
        {"op": trace.ops[2].name, "variant": "b"},
        {"op": trace.ops[5].name, "variant": "c"},
    ]
    assert read_memory_plan(path, trace) == plan
    assert read_memory_plan(path, with_variants(chain_step(4), {2: ("b",), 5: ("x", "c")})).variants[2:6] == (
        1,
        0,
        0,
        2,
    )
    with pytest.raises(ScheduleError, match=r"\$.variants\[1\].variant: op 'b3' has no variant 'c' \(there are: d\)"):
        read_memory_plan(path, with_variants(chain_step(4), {2: ("b",), 5: ("d",)}))


def with_variants(trace: Trace, names: dict[int, tuple[str, ...]]) -> Trace:
    """Return the trace with variants of these names, by op index."""
    ops = list(trace.ops)
    for index, of_op in names.items():
        variants = (Variant(name=name, settings=VariantSettings(), kernels=ops[index].kernels) for name in of_op)
        ops[index] = msgspec.structs.replace(ops[index], variants=tuple(variants))
    return msgspec.structs.replace(trace, ops=tuple(ops))


def test_plan_in_memory_of_another_trace_is_refused_even_where_its_numbers_make_sense() -> None:
    """The other step has as many ops and tensors; the same step captured again, with other times, is no other."""
    plan = gpusim.memory(chain_step(4), policies=["torch_budget"]).plan("torch_budget")
    assert plan.redos
    assert gpusim.simulate(chain_step(4, dur_ns=70_000), plan).makespan_ns
    with pytest.raises(ScheduleError, match="one of another trace"):
        gpusim.simulate(chain_step(4, target="aten.gelu.default"), plan)
