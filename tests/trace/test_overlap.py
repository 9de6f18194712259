"""Tensors of one storage that share elements: compared with the sets of their elements."""

from __future__ import annotations

from itertools import product

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusim.formats.trace import Op, Storage, Tensor, Trace
from gpusim.trace import overlap
from gpusim.trace.dependencies import dependencies
from gpusim.trace.overlap import MAX_TENSORS, may_overlap, memory_units
from tests.support.helpers import chain_trace


def tensor(shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0, dtype: str = "float32") -> Tensor:
    return Tensor(shape=shape, stride=stride, dtype=dtype, storage=0, offset=offset, role="activation")


def elements(one: Tensor) -> set[int]:
    places = product(*(range(size) for size in one.shape))
    return {one.offset + sum(i * d for i, d in zip(place, one.stride, strict=True)) for place in places}


def test_slices_of_a_concatenation_lie_apart_in_any_layout() -> None:
    """Channels 0 to 2 and 3 to 7 of [2, 8, 3, 3], contiguous and channels last: interleaved, no element shared."""
    for stride in ((72, 9, 3, 1), (72, 1, 24, 8)):
        whole = tensor((2, 8, 3, 3), stride)
        first, second = tensor((2, 3, 3, 3), stride), tensor((2, 5, 3, 3), stride, 3 * stride[1])
        assert not may_overlap(first, second)
        assert may_overlap(whole, first)
        assert may_overlap(whole, second)


def test_columns_of_a_matrix_lie_apart() -> None:
    assert not may_overlap(tensor((4,), (3,), 0), tensor((4,), (3,), 1))
    assert may_overlap(tensor((4,), (3,), 0), tensor((4,), (3,), 3))


def test_other_types_overlap_unless_their_bytes_lie_apart() -> None:
    assert may_overlap(tensor((4,), (2,), 0), tensor((2,), (1,), 1, "float64"))
    assert not may_overlap(tensor((4,), (1,), 0), tensor((2,), (1,), 2, "float64"))


def test_empty_and_expanded_tensors() -> None:
    assert not may_overlap(tensor((0, 3), (3, 1)), tensor((3,), (1,)))
    assert may_overlap(tensor((4, 2), (0, 1)), tensor((2,), (1,), 1))


strided = st.integers(1, 3).flatmap(
    lambda n: st.builds(
        tensor,
        st.tuples(*[st.integers(0, 3)] * n),
        st.tuples(*[st.sampled_from((0, 1, 2, 3, 4, 6, 8, 12, 24))] * n),
        st.integers(0, 30),
    )
)


@given(strided, strided)
def test_tensors_told_apart_share_no_element(one: Tensor, other: Tensor) -> None:
    if not may_overlap(one, other):
        assert not elements(one) & elements(other)


def concat_trace(frontend: str = "inductor", parts: int = 2) -> Trace:
    """Make ops that each write a part of a buffer, one that reads it all, and one that writes the first part again."""
    base = chain_trace(2)
    tensors = [tensor((4, 1), (parts, 1), part) for part in range(parts)] + [tensor((4, parts), (parts, 1))]

    def call(name: str, reads: tuple[int, ...], writes: tuple[int, ...]) -> Op:
        return Op(name=name, target="aten.test.default", reads=reads, writes=writes, kernels=base.ops[0].kernels)

    ops = [call(f"write{part}", (), (part,)) for part in range(parts)]
    ops += [call("read", (parts,), ()), call("again", (), (0,))]
    model = msgspec.structs.replace(base.model, frontend=frontend)
    storages = (Storage(bytes=16 * parts),)
    return msgspec.structs.replace(base, model=model, storages=storages, tensors=tuple(tensors), ops=tuple(ops))


def test_writers_of_parts_do_not_wait_for_each_other_and_the_reader_waits_for_all() -> None:
    assert dependencies(concat_trace()) == ((), (), (0, 1), (0, 2))


def test_in_aten_traces_a_storage_is_one_unit() -> None:
    assert dependencies(concat_trace("aten")) == ((), (0,), (1,), (1, 2))


def test_storage_of_very_many_parts_is_one_unit() -> None:
    parts = MAX_TENSORS
    assert memory_units(concat_trace(parts=parts)) == ([(0,)] * (parts + 1), 1)


def test_storages_are_one_unit_once_enough_pairs_have_been_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tensors make three pairs."""
    monkeypatch.setattr(overlap, "MAX_PAIRS", 3)
    assert dependencies(concat_trace()) == ((), (), (0, 1), (0, 2))
    monkeypatch.setattr(overlap, "MAX_PAIRS", 2)
    assert memory_units(concat_trace()) == ([(0,)] * 3, 1)
