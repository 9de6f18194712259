"""Which ops add atomically, and which results are behind them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpusim.formats.trace import Source, Trace
from gpusim.trace.atomic_additions import adds_atomically, behind_atomic_additions
from tests.support.helpers import in_place, make_trace, op, view

TRITON = "tl.atomic_add(out_ptr0 + (x0 + 8*tmp4), tmp6, xmask, sem='relaxed')"
#: Metadata that Inductor writes to each of its Triton kernels.
METADATA = "inductor_meta={'atomic_add_found': False, 'num_load': 2}; tl.store(out_ptr0 + (x0), tmp2, xmask)"


def with_code(trace: Trace, texts: dict[str, str]) -> Trace:
    """Return a trace in which ops have code of their own, by name."""
    sources = {name: Source(sha256=f"{place:064x}", text=text) for place, (name, text) in enumerate(texts.items())}
    ops = (replace(each, source=sources[each.name].sha256) if each.name in texts else each for each in trace.ops)
    return replace(trace, ops=tuple(ops), sources=tuple(sources.values()))


@pytest.mark.parametrize(
    ("text", "adds"),
    [
        (TRITON, True),
        ("atomic_add(&out_ptr0[static_cast<int64_t>(x1)], static_cast<float>(tmp9));", True),
        ("atomic_add_vec<float, 2, 1>(out_ptr3, tmp35, tmp32);", True),
        ("transpose_mxn<float,16,16,true>(tmp1, 16, out_ptr0, 8);", True),
        ("transpose_mxn<float,16,16,false>(tmp1, 16, out_ptr0, 8);", False),
        (METADATA, False),
        ("std::atomic<int> inductor_cpu_integer_div_error{0}; out_ptr0[x0] += tmp3;", False),
    ],
)
def test_code_shows_atomic_additions(text: str, adds: bool) -> None:
    trace = with_code(make_trace([op("a", "x"), op("b", "x")]), {"a": text, "b": METADATA})
    assert adds_atomically(trace) == [adds, False]


def test_what_reads_a_sum_is_behind_it_through_views_and_changes_in_place() -> None:
    steps = [
        op("before", "x"),
        op("sum", "before"),
        op("beside", "before"),
        view("row", "sum"),
        op("scaled", "row"),
        in_place("update", "weight", "scaled"),
        in_place("other", "bias", "beside"),
        op("loss", "beside bias"),
        op("norm", "weight loss"),
    ]
    trace = with_code(make_trace(steps), {"sum": TRITON, "beside": METADATA})
    names = {trace.tensors[index].name for index in behind_atomic_additions(trace)}
    assert names == {"sum", "row", "scaled", "weight", "norm"}


def test_a_view_of_what_is_changed_in_place_is_behind_it() -> None:
    steps = [op("zeros", "x"), view("part", "zeros"), in_place("sum", "zeros", "x"), op("late", "part")]
    trace = with_code(make_trace(steps), {"sum": TRITON})
    assert {trace.tensors[index].name for index in behind_atomic_additions(trace)} == {"zeros", "part", "late"}


def test_a_step_without_code_has_none() -> None:
    trace = make_trace([op("a", "x"), op("b", "a")])
    assert behind_atomic_additions(trace) == frozenset()
