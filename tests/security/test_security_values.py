"""Unchecked lookup numbers in tensors: they follow from the trace, or replay refuses."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from gpusim.errors import OperatorError, ReplayError
from gpusim.formats.trace import Op, Tensor, TensorInit, Trace
from gpusim.gpu.replay import allowlist
from gpusim.gpu.replay.allowlist import SIZES, WORDS, allowed_operators, base_name, check_operators
from gpusim.gpu.replay.operators import check_schemas, resolve
from gpusim.gpu.replay.result_sizes import check_result_sizes
from gpusim.gpu.replay.saved import SavedRules, ordered_inputs
from gpusim.gpu.replay.saved_facts import BACKWARDS, VIEWS
from gpusim.trace.store import read_trace
from tests.security.test_security import op, run, t, tensor, trace_of
from tests.support.operator_steps import trace_files

ROOT = Path(__file__).parents[2]
TRACES = [path.relative_to(ROOT).as_posix() for path in trace_files()]
GPU = {"device": "cuda"}
ROWS, WIDTH, BAGS, TAKEN = 10, 4, 3, 6


def values(*numbers: float, dtype: str = "int64", storage: int = 0, shape: tuple[int, ...] = ()) -> Tensor:
    init = TensorInit(kind="values", values=tuple(float(n) for n in numbers))
    return tensor(*(shape or (len(numbers),)), dtype=dtype, storage=storage, init=init)


def bag(
    rows: Tensor | None = None, offsets: Tensor | None = None, extra: list[Op] | None = None, **changes: Any
) -> Trace:
    """Make an embedding bag over a table of 10 rows: tensor 0 the table, 1 the rows, 2 the offsets, 3 to 6 its
    results.
    """
    tensors = [
        tensor(ROWS, WIDTH),
        rows or values(0, 9, 3, 3, 1, 2, storage=1),
        offsets or values(0, 2, 2, storage=2),
        tensor(BAGS, WIDTH, storage=3, init=None),
        *(tensor(BAGS, dtype="int64", storage=4 + i, init=None) for i in range(3)),
        tensor(BAGS, WIDTH, storage=7),
        tensor(ROWS, WIDTH, storage=8, init=None),
        *changes.get("tensors", []),
    ]
    forward = op("aten._embedding_bag.default", t(0), t(1), t(2), False, changes.get("mode", 0), outputs=(3, 4, 5, 6))
    if "args" in changes:
        forward = op("aten._embedding_bag.default", *changes["args"], outputs=(3, 4, 5, 6))
    return trace_of([*(extra or []), forward, *changes.get("after", [])], tensors)


def refused(trace: Trace, problem: str) -> None:
    with pytest.raises(OperatorError, match=problem):
        check_operators(trace, "t")


# --- Every trace of the project ---


def test_there_are_traces_of_all_kinds_of_models() -> None:
    kinds = [name for name in TRACES if name.startswith("validate/traces/kinds/")]
    assert len(kinds) == 24
    assert sum("recommendation" in name for name in kinds) == 2


@pytest.mark.parametrize("name", TRACES)
def test_every_trace_of_the_project_passes_the_checks_of_replay(name: str) -> None:
    trace = read_trace(ROOT / name)
    check_operators(trace, name)
    check_schemas(trace)


@pytest.mark.parametrize("kind", ["recommendation_large", "transformer_small", "unet_small", "heads", "graphs_small"])
def test_results_of_captured_steps_have_the_sizes_that_torch_evaluates(kind: str) -> None:
    """On fake tensors of a GPU: nothing runs, and no GPU is needed."""
    for name in TRACES:
        if f"/kinds/{kind}" in name:
            trace = read_trace(ROOT / name)
            check_result_sizes(trace, [resolve(each.target) for each in trace.ops], torch.device("cuda", 0))


# --- Embedding bags ---


def backward(*args: Any) -> list[Op]:
    return [op("aten._embedding_bag_backward.default", t(7), t(1), t(2), t(4), t(5), t(6), *args, outputs=(8,))]


def test_embedding_bag_and_its_backward_run() -> None:
    runner = run(bag(after=backward(ROWS, False, 0, False, None)))
    grad = runner.tensors[8]
    assert grad is not None
    assert grad[:, 0].tolist() == [1, 1, 1, 2, 0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    "rows",
    [
        values(0, 10, 3, 3, 1, 2, storage=1),
        values(0, -1, 3, 3, 1, 2, storage=1),
        values(0, 2**40, 3, 3, 1, 2, storage=1),
        values(0, 9.5, 3, 3, 1, 2, storage=1),
        tensor(TAKEN, dtype="int64", storage=1, init=TensorInit(kind="integers", a=0, b=10)),
        tensor(TAKEN, dtype="int64", storage=1, init=TensorInit(kind="normal", a=0, b=1)),
        tensor(TAKEN, dtype="int64", storage=1, init=TensorInit(kind="constant", a=-1)),
    ],
    ids=["beyond", "negative", "huge", "between", "drawn", "normal", "constant"],
)
def test_rows_beyond_the_table_are_refused(rows: Tensor) -> None:
    refused(bag(rows), "its rows are below 10")


@pytest.mark.parametrize(
    "offsets",
    [
        values(0, 4, 2, storage=2),
        values(1, 2, 4, storage=2),
        values(0, 2, 7, storage=2),
        values(0, -2, 2, storage=2),
        tensor(BAGS, dtype="int64", storage=2, init=TensorInit(kind="integers", a=0, b=2)),
    ],
    ids=["falls", "not_from_0", "beyond", "negative", "drawn"],
)
def test_offsets_that_do_not_rise_within_the_rows_are_refused(offsets: Tensor) -> None:
    refused(bag(offsets=offsets), "its offsets rise from 0 to 6")


def test_rows_with_gaps_or_of_another_type_are_refused() -> None:
    gaps = msgspec.structs.replace(values(0, 1, 2, 3, 4, 5, storage=1), stride=(2,))
    refused(bag(gaps), "are not one-dimensional integer tensors")
    refused(bag(values(0, 1, 2, 3, 4, 5, storage=1, dtype="float32")), "not one-dimensional integer")


def test_rows_that_an_op_changes_at_any_time_are_refused() -> None:
    """A schedule or the next run of the step may move the change before the bag."""
    change = op("aten.add_.Tensor", t(1), 1, outputs=(1,))
    refused(bag(extra=[change]), "its rows are below 10")
    refused(bag(after=[change]), "its rows are below 10")


def test_rows_that_share_their_memory_with_another_initial_tensor_are_refused() -> None:
    refused(bag(tensors=[tensor(TAKEN, dtype="float32", storage=1)]), "its rows are below 10")


def test_rows_that_a_float_view_changes_are_refused() -> None:
    alias = tensor(2 * TAKEN, dtype="float32", storage=1, init=None)
    ops = [op("aten.view.dtype", t(1), {"dtype": "float32"}, outputs=(9,), writes=(1,))]
    refused(bag(after=ops, tensors=[alias]), "its rows are below 10")


def test_rows_and_offsets_that_follow_from_other_operators_are_known() -> None:
    more = [
        values(5, 23, 1, 40, 7, 8, storage=9, shape=(3, 2)),
        tensor(3, 2, dtype="int64", storage=10, init=None),
        tensor(TAKEN, dtype="int64", storage=10, init=None),
        tensor(BAGS, dtype="int64", storage=11, init=None),
    ]
    ops = [
        op("aten.remainder.Scalar", t(9), ROWS, outputs=(10,)),
        op("aten.view.default", t(10), [-1], outputs=(11,), writes=(10,)),
        op("aten.arange.start_step", 0, 6, 2, outputs=(12,), device=GPU, dtype={"dtype": "int64"}),
    ]
    ops[1] = msgspec.structs.replace(ops[1], writes=())
    trace = bag(extra=ops, tensors=more, args=[t(0), t(11), t(12)])
    check_operators(trace, "t")
    run(trace)
    far = msgspec.structs.replace(ops[0], args=(t(9), ROWS + 1))
    refused(bag(extra=[far, *ops[1:]], tensors=more, args=[t(0), t(11), t(12)]), "its rows are below 10")


def test_joins_in_joins_are_looked_at_once() -> None:
    """60 times a tensor with itself: 2^60 paths."""
    more = [values(1, storage=9), *(tensor(2**3, dtype="int64", storage=10 + i, init=None) for i in range(60))]
    ops = [op("aten.cat.default", [t(9 + i), t(9 + i)], outputs=(10 + i,)) for i in range(60)]
    trace = trace_of(ops, [*bag().tensors, *more])
    assert SavedRules(trace).known.bounds(69) == (1, 1)


def test_backward_of_a_bag_takes_what_its_forward_saved_and_makes_its_rows() -> None:
    check_operators(bag(after=backward(ROWS, False, 0, False, None)), "t")
    refused(bag(after=backward(2**20, False, 0, False, None)), "another number of rows")
    refused(bag(after=backward(ROWS, False, 1, False, None)), "argument 8 is not that of")
    wrong = op(
        "aten._embedding_bag_backward.default",
        *(t(7), t(1), t(2), t(2), t(5), t(6), ROWS, False, 0, False, None),
        outputs=(8,),
    )
    refused(bag(after=[wrong]), "its saved tensors are not those|is not what")


def test_weights_of_a_bag_are_one_for_each_row() -> None:
    args = [t(0), t(1), t(2), False, 0, False, t(9)]
    check_operators(bag(args=args, tensors=[tensor(TAKEN, storage=9)]), "t")
    refused(bag(args=args, tensors=[tensor(TAKEN - 1, storage=9)]), "not have one weight per row")
    refused(bag(args=[t(0), t(1), t(2), False, 0, True]), "sparse gradients")


def test_offsets_that_are_an_input_keep_their_order_when_inputs_are_shuffled() -> None:
    assert ordered_inputs(bag()) == {2}


# --- Losses, transforms, boxes ---


def ctc(labels: Tensor, steps: list[int], lengths: list[int]) -> Trace:
    tensors = [
        tensor(4, 2, 5),
        labels,
        tensor(2, storage=2, init=None),
        tensor(2, 4, 2 * max(lengths, default=0) + 1, storage=3, init=None),
    ]
    made = op("aten._ctc_loss.default", t(0), t(1), steps, lengths, outputs=(2, 3))
    return trace_of([made], tensors)


def test_labels_and_lengths_of_a_ctc_loss_are_known() -> None:
    run(ctc(values(1, 2, 4, storage=1), [4, 3], [2, 1]))
    refused(ctc(values(1, 2, 5, storage=1), [4, 3], [2, 1]), "its labels are below 5")
    refused(ctc(values(1, 2, 4, storage=1), [5, 3], [2, 1]), "those of its sequences")
    refused(ctc(values(1, 2, 4, storage=1), [4, 3], [2, 2]), "those of its labels")
    refused(ctc(values(1, 2, 4, storage=1), [4, 3], [4, -1]), "those of its sequences")
    refused(ctc(values(1, 2, 4, storage=1), [4], [3]), "one length per sample")


def test_fourier_transform_back_has_the_length_of_its_argument() -> None:
    def transform(length: int, dims: list[int]) -> Trace:
        tensors = [tensor(3, 5, dtype="complex64"), tensor(3, length, storage=1, init=None)]
        return trace_of([op("aten._fft_c2r.default", t(0), dims, 2, length, outputs=(1,))], tensors)

    run(transform(8, [1]))
    run(transform(9, [1]))
    refused(transform(100, [1]), "length of its result")
    refused(transform(8, [2]), "not those of the tensor")
    refused(transform(8, [1, -1]), "not those of the tensor")


def boxes(image: float, cat: int = 1) -> Trace:
    tensors = [
        tensor(2, 3, 8, 8),
        tensor(4, 4, storage=1),
        tensor(4, 1, storage=2, init=None),
        tensor(4, 5, storage=3, init=None),
        tensor(4, 3, 2, 2, storage=4, init=None),
    ]
    ops = [
        op("aten.full.default", [4, 1], image, outputs=(2,), device=GPU),
        op("aten.cat.default", [t(2), t(1)], cat, outputs=(3,)),
        op("torchvision.roi_align.default", t(0), t(3), 1.0, 2, 2, 2, False, outputs=(4,)),
    ]
    return trace_of(ops, tensors)


def test_boxes_are_of_images_that_are_there() -> None:
    check_operators(boxes(1), "t")
    refused(boxes(2), "its boxes are of images below 2")
    refused(boxes(-1), "its boxes are of images below 2")
    unknown = boxes(1)
    direct = msgspec.structs.replace(unknown.ops[2], args=(t(0), t(5), *unknown.ops[2].args[2:]))
    refused(
        trace_of([*unknown.ops[:2], direct], [*unknown.tensors, tensor(4, 5, storage=5)]), "its boxes are of images"
    )


# --- Sizes among arguments ---


@pytest.mark.parametrize(
    "made",
    [
        op("aten.repeat.default", t(0), [2**36], outputs=(1,)),
        op("aten.constant_pad_nd.default", t(0), [0, 2**36], 0, outputs=(1,)),
        op("aten.upsample_nearest1d.default", t(2), [2**36], outputs=(1,)),
        op("aten.linspace.default", 0, 1, 2**36, outputs=(1,), device=GPU),
        op("aten.arange.default", 2**36, outputs=(1,), device=GPU),
        op("aten.diag_embed.default", t(3), outputs=(1,)),
        op("aten.slice_backward.default", t(0), [2**36], 0, 0, 2, 1, outputs=(1,)),
        op("aten.select_backward.default", t(0), [2**36, 2], 0, 0, outputs=(1,)),
        op("aten._adaptive_avg_pool2d.default", t(4), [2**18, 2**18], outputs=(1,)),
        op("aten.tril_indices.default", 2**20, 2**20, 0, outputs=(1,), device=GPU),
        op("aten.multinomial.default", t(0), 2**36, True, outputs=(1,)),
        op("aten.eye.default", 2**20, outputs=(1,), device=GPU),
    ],
    ids=lambda made: made.target,
)
def test_result_larger_than_declared_is_refused_before_memory_is_taken(made: Op) -> None:
    """Each would take 64 GB or more; nothing runs here."""
    tensors = [
        tensor(2),
        tensor(4, storage=1, init=None),
        tensor(1, 1, 2, storage=2),
        tensor(2**18, storage=3),
        tensor(1, 1, 2, 2, storage=4),
    ]
    trace = trace_of([made], tensors, storage_bytes=2**20)
    check_operators(trace, "t")
    with pytest.raises(OperatorError, match="it makes a tensor of shape"):
        check_result_sizes(trace, [resolve(made.target)], torch.device("cpu"))


def test_shape_that_the_trace_declares_is_made() -> None:
    tensors = [tensor(2), tensor(4, storage=1, init=None)]
    run(trace_of([op("aten.repeat.default", t(0), [2], outputs=(1,))], tensors))


def test_result_declared_without_gaps_has_none() -> None:
    """A kernel that treats memory as one piece would leave an expanded tensor."""
    made = op("aten.expand.default", t(0), [1000], outputs=(1,))
    trace = trace_of([msgspec.structs.replace(made, writes=())], [tensor(1), tensor(1000, init=None)])
    with pytest.raises(ReplayError, match="with gaps"):
        run(trace)


@pytest.mark.parametrize("shape", [[3], [2**40], [-2], [2, -1, -1], [8]])
def test_unsafe_view_to_another_size_is_refused(shape: list[int]) -> None:
    made = op("aten._unsafe_view.default", t(0), shape, outputs=(1,))
    trace = trace_of([made], [tensor(4), tensor(4, init=None)])
    with pytest.raises(ReplayError, match=r"is invalid for input of size 4|only one dimension|invalid shape"):
        run(trace)


# --- What ops declare ---


def test_statistics_that_batch_norm_changes_are_among_its_writes() -> None:
    """Its schema does not declare these changes, and another operator may look the values up."""
    tensors = [tensor(2, 3, 4, 4), *(tensor(3, storage=1 + i) for i in range(2))]
    tensors += [tensor(2, 3, 4, 4, storage=3, init=None), *(tensor(3, storage=4 + i, init=None) for i in range(2))]

    def norm(training: bool, *writes: int) -> Trace:
        args = (t(0), None, None, t(1), t(2), training, 0.1, 1e-5)
        return trace_of(
            [op("aten.native_batch_norm.default", *args, outputs=(3, 4, 5), writes=(3, 4, 5, *writes))], tensors
        )

    check_operators(norm(True, 1, 2), "t")
    check_operators(norm(False), "t")
    refused(norm(True), "changes its statistics, which its 'writes' do not list")


def test_saved_tensors_are_among_the_reads_and_nothing_changes_them_later() -> None:
    """Otherwise a schedule may move a change before the backward."""
    from tests.security.test_security import pooled

    (forward, back), tensors = pooled()
    change = op("aten.fill_.Scalar", t(2), 2**40, outputs=(2,))
    refused(trace_of([forward, back, change], tensors), r"changes later|made more than once")
    silent = msgspec.structs.replace(back, reads=(1, 0))
    refused(trace_of([forward, silent], tensors), "its 'reads'")


def test_tensor_that_is_there_is_returned_by_ops_that_change_it_and_by_views_alone() -> None:
    """Otherwise other values would replace checked ones without a change of the storage."""
    from tests.security.test_security import pooled

    drawn = op("aten.randint.low", 0, 2**40, [TAKEN], outputs=(1,), device=GPU)
    refused(bag(extra=[msgspec.structs.replace(drawn, writes=())]), "its 'writes' do not list")
    refused(bag(extra=[drawn]), "its rows are below 10")
    (forward, back), tensors = pooled()
    other = op("aten.full_like.default", t(2), 2**40, outputs=(2,))
    refused(trace_of([forward, msgspec.structs.replace(other, writes=()), back], tensors), "its 'writes' do not list")
    refused(trace_of([forward, other, back], tensors), "made more than once")
    view = op("aten.as_strided.default", t(2), [1, 1, 2, 2], [0, 0, 0, 0], outputs=(2,))
    refused(trace_of([forward, msgspec.structs.replace(view, writes=()), back], tensors), "made more than once")


def test_operators_that_may_return_a_tensor_again_are_views() -> None:
    for target in VIEWS - {f"aten.{n}" for n in ("_unsafe_view.default", "lift_fresh.default")}:
        schema = resolve(target)._schema
        unsafe = target.startswith("aten.unsafe_split")  # views without a mark
        assert unsafe or all(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns), target


def test_range_of_more_numbers_than_python_counts_is_refused() -> None:
    far = op("aten.arange.start", -(2**63) + 1, 2**63 - 1, outputs=(9,), device=GPU)
    more = [tensor(BAGS, dtype="int64", storage=9, init=None)]
    refused(bag(extra=[far], tensors=more, args=[t(0), t(1), t(9)]), "its offsets rise")


# --- Arguments that no rule expects ---


def test_ctc_loss_without_samples_is_refused() -> None:
    tensors = [tensor(5, 0, 3), values(storage=1, shape=(0, 2)), *(tensor(0, storage=n, init=None) for n in (2, 3))]
    refused(trace_of([op("aten._ctc_loss.default", t(0), t(1), [], [], outputs=(2, 3))], tensors), "it has no samples")


def test_scale_beyond_any_size_is_refused() -> None:
    made = op("aten._upsample_bilinear2d_aa.default", t(0), [8, 8], False, 1e308, 1e308, outputs=(1,))
    refused(trace_of([made], [tensor(1, 1, 4, 4), tensor(1, 1, 8, 8, storage=1, init=None)]), r"t: \$\.ops\[0\]: ")


@pytest.mark.parametrize("step", [0, -1])
def test_range_that_does_not_rise_bounds_nothing(step: int) -> None:
    made = op("aten.arange.start_step", 0, 5, step, outputs=(1,), device=GPU)
    rows = tensor(TAKEN, dtype="int64", storage=1, init=None)
    refused(bag(rows, extra=[made]), "nothing in the trace shows that its rows are")


def test_rule_that_cannot_be_evaluated_refuses_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (OverflowError, ValueError, IndexError, TypeError, KeyError, RecursionError):

        def fails(*_: object, error: type[Exception] = error) -> str:
            raise error

        monkeypatch.setattr(allowlist, "_problem_with_sizes", fails)
        refused(bag(), r"^t: \$\.ops\[0\]: operator '.*' is refused: its arguments cannot be checked$")


RULED = sorted(
    name
    for name in allowed_operators()
    if name in {*BACKWARDS, *VIEWS, *(forward for rule in BACKWARDS.values() for forward in rule.forwards)}
    or base_name(name) in {*SIZES, *WORDS}
    or any(part in name for part in ("_fused_", "_foreach_", "_aa", "_fft_", "pad", "arange", "unfold", "norm", "pool"))
    or name.startswith(("torchvision.", "aten.index", "aten.cat", "aten.clamp", "aten.remainder", "aten.grid_sampler"))
)
NUMBERS = (0, 1, -1, 3, 2**62, -(2**62), 0.5, 1e308, -1e308, True, None)


@pytest.mark.parametrize("seed", range(20))
def test_no_argument_of_an_operator_with_rules_is_a_traceback(seed: int) -> None:
    rng = random.Random(seed)
    tensors = [
        tensor(4, 4),
        values(0, 9, 3, storage=1),
        tensor(2, 3, 4, 4, storage=2),
        tensor(5, 0, 3, storage=3),
        tensor(storage=4, dtype="int64"),
        values(0, 1, storage=5),
        *(tensor(4, dtype="int64", storage=6 + n, init=None) for n in range(4)),
    ]

    def argument(depth: int = 0) -> Any:
        kind = rng.random()
        if kind < 0.5:
            return t(rng.randrange(len(tensors)))
        if kind < 0.8 or depth == 2:
            return rng.choice(NUMBERS)
        return [argument(depth + 1) for _ in range(rng.randrange(4))]

    for name in RULED:
        before = op("aten.arange.start_step", *(rng.choice(NUMBERS) for _ in range(3)), outputs=(6,), device=GPU)
        for _ in range(3):
            args = [tuple(argument() for _ in range(rng.randrange(13))) for _ in range(2)]
            ops = [op(name, *each, outputs=(7, 8, 9), device=GPU) for each in args]
            with suppress(OperatorError):
                check_operators(trace_of([before, *ops], tensors), "t")
