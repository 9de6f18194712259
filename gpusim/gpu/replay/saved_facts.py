"""Facts on operators: the forward of each backward, the operands taken from it, and sizes that must agree.

They are read off torch's schemas and kernels; `gpusim.gpu.replay.saved` and `gpusim.gpu.replay.size_rules` check the
ops of a trace against them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final


@dataclass(frozen=True)
class Backward:
    """Link of a backward operator to its forward, by positions of arguments and results."""

    forwards: tuple[str, ...]
    saved: dict[int, int] = field(default_factory=dict)
    """Argument position -> result of the forward that it must be, unchanged."""
    same: dict[int, int] = field(default_factory=dict)
    """Argument position -> argument of the forward that it must be."""
    grad: int | None = 0
    """Position of the argument with the shape of the forward's first result."""


def _pool(name: str, indices: int) -> dict[str, Backward]:
    return {f"aten.{name}_backward.default": Backward((f"aten.{name}.default",), {indices: 1}, {1: 0})}


BAG: Final = ("aten._embedding_bag.default", "aten._embedding_bag_forward_only.default")
_NLL: Final = {6: 1}, {1: 0, 2: 1, 3: 2, 4: 3, 5: 4}
BACKWARDS: Final[dict[str, Backward]] = {
    **_pool("max_pool2d_with_indices", 7),
    **_pool("max_pool3d_with_indices", 7),
    **_pool("adaptive_max_pool2d", 2),
    **_pool("adaptive_max_pool3d", 2),
    "aten.native_layer_norm_backward.default": Backward(
        ("aten.native_layer_norm.default",), {3: 1, 4: 2}, {1: 0, 2: 1, 5: 2}
    ),
    "aten._fused_rms_norm_backward.default": Backward(("aten._fused_rms_norm.default",), {3: 1}, {1: 0, 2: 1, 4: 2}),
    "aten.native_group_norm_backward.default": Backward(
        ("aten.native_group_norm.default",), {2: 1, 3: 2}, {1: 0, 4: 1, 5: 3, 6: 4, 7: 5, 8: 6}
    ),
    "aten.native_batch_norm_backward.default": Backward(
        (
            "aten.native_batch_norm.default",
            "aten._native_batch_norm_legit.default",
            "aten._native_batch_norm_legit_functional.default",
        ),
        {5: 1, 6: 2},
        {1: 0, 2: 1, 3: 3, 4: 4, 7: 5},
    ),
    "aten.cudnn_batch_norm_backward.default": Backward(
        ("aten.cudnn_batch_norm.default",), {5: 1, 6: 2, 8: 3}, {0: 0, 2: 1, 3: 3, 4: 4}, grad=1
    ),
    "aten.nll_loss_backward.default": Backward(("aten.nll_loss_forward.default",), *_NLL),
    "aten.nll_loss2d_backward.default": Backward(("aten.nll_loss2d_forward.default",), *_NLL),
    "aten.embedding_dense_backward.default": Backward(("aten.embedding.default",), {}, {1: 1}),
    "aten._embedding_bag_backward.default": Backward(
        BAG[:1], {3: 1, 4: 2, 5: 3}, {1: 1, 2: 2, 7: 3, 8: 4, 9: 5, 10: 6}
    ),
    "aten._embedding_bag_dense_backward.default": Backward(BAG[:1], {2: 1, 3: 2, 4: 3}, {1: 1, 6: 3, 7: 4, 8: 6}),
    "aten._embedding_bag_per_sample_weights_backward.default": Backward(BAG[:1], {4: 1}, {1: 0, 2: 1, 3: 2, 5: 4}),
    "aten._ctc_loss_backward.default": Backward(
        ("aten._ctc_loss.default",), {5: 0, 6: 1}, {1: 0, 2: 1, 3: 2, 4: 3, 7: 4}
    ),
    "torchvision._roi_align_backward.default": Backward(("torchvision.roi_align.default",), {}, {1: 1, 3: 3, 4: 4}),
    **{
        f"torchvision._{name}_backward.default": Backward((f"torchvision.{name}.default",), {2: 1}, {1: 1, 4: 3, 5: 4})
        for name in ("roi_pool", "ps_roi_pool", "ps_roi_align")
    },
    "aten._thnn_fused_lstm_cell_backward_impl.default": Backward(
        ("aten._thnn_fused_lstm_cell.default",), {3: 1, 4: 2}, {2: 2}
    ),
    "aten._thnn_fused_gru_cell_backward.default": Backward(("aten._thnn_fused_gru_cell.default",), {1: 1}),
    "aten._scaled_dot_product_efficient_attention_backward.default": Backward(
        ("aten._scaled_dot_product_efficient_attention.default",),
        {5: 0, 6: 1, 7: 2, 8: 3},
        {1: 0, 2: 1, 3: 2, 4: 3},
    ),
    "aten._scaled_dot_product_flash_attention_backward.default": Backward(
        ("aten._scaled_dot_product_flash_attention.default",), {4: 0, 5: 1, 12: 4, 13: 5}, {1: 0, 2: 1, 3: 2}
    ),
    "aten._scaled_dot_product_cudnn_attention_backward.default": Backward(
        ("aten._scaled_dot_product_cudnn_attention.default",),
        {4: 0, 5: 1, 6: 4, 7: 5},
        {1: 0, 2: 1, 3: 2, 8: 3},
    ),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": Backward(
        ("aten._scaled_dot_product_flash_attention_for_cpu.default",), {4: 0, 5: 1}, {1: 0, 2: 1, 3: 2}
    ),
}
#: Results whose size or device depends on the version of a library: only the operator's backward may take them.
VARYING: Final[dict[str, tuple[int, ...]]] = {
    "aten.cudnn_batch_norm.default": (3,),
    **dict.fromkeys(BAG, (1, 2, 3)),
    "aten._scaled_dot_product_efficient_attention.default": (1, 2, 3),
    "aten._scaled_dot_product_flash_attention.default": (1, 4, 5, 6),
    "aten._scaled_dot_product_cudnn_attention.default": (1, 4, 5, 6),
}
#: Results of packed sequences, by position in the schema: no step has any, so no place in `outputs` counts them.
NEVER_THERE: Final[dict[str, tuple[int, ...]]] = {
    "aten._scaled_dot_product_flash_attention.default": (2, 3),
    "aten._scaled_dot_product_cudnn_attention.default": (2, 3),
}
#: Forwards that save for a backward only where this argument is true.
SAVES_IF: Final = {
    "aten._scaled_dot_product_efficient_attention.default": 4,
    "aten._scaled_dot_product_cudnn_attention.default": 4,
}
#: Lengths of sequences that a backward takes as numbers: their positions, and those of the query and the key.
SEQUENCE_LENGTHS: Final = {
    "aten._scaled_dot_product_flash_attention_backward.default": {8: 1, 9: 2},
    "aten._scaled_dot_product_cudnn_attention_backward.default": {11: 1, 12: 2},
}
#: Arguments of packed sequences, which must be null: no trace holds such sequences.
NULL_ARGUMENTS: Final = {
    "aten._scaled_dot_product_flash_attention_backward.default": (6, 7),
    "aten._scaled_dot_product_cudnn_attention_backward.default": (9, 10),
}
#: Batch norm: positions of weight, bias, mean and variance, each null or one number per channel.
PER_CHANNEL: Final = {
    "aten.native_batch_norm.default": (1, 2, 3, 4),
    "aten.cudnn_batch_norm.default": (1, 2, 3, 4),
    "aten._native_batch_norm_legit.default": (1, 2, 3, 4),
    "aten._native_batch_norm_legit.no_stats": (1, 2),
    "aten._native_batch_norm_legit_functional.default": (1, 2, 3, 4),
    "aten._native_batch_norm_legit_no_training.default": (1, 2, 3, 4),
}
#: Default values of arguments that a call leaves out: operator -> position -> value.
DEFAULTS: Final[dict[str, dict[int, Any]]] = {
    "aten._embedding_bag.default": {3: False, 4: 0, 5: False, 6: None},
    "aten._ctc_loss.default": {4: 0},
}
#: Rows of a weight that a backward makes a gradient for: positions of the number, and of the forward's weight.
WEIGHT_ROWS: Final = {
    "aten.embedding_dense_backward.default": (2, 0),
    "aten._embedding_bag_backward.default": (6, 0),
    "aten._embedding_bag_dense_backward.default": (5, 0),
}
#: Boxes of torchvision: position of the sizes (images, channels, height, width) in a backward.
BOX_IMAGES: Final = {
    "torchvision._roi_align_backward.default": 5,
    "torchvision._roi_pool_backward.default": 6,
    "torchvision._ps_roi_align_backward.default": 7,
    "torchvision._ps_roi_pool_backward.default": 6,
}
BOX_FORWARDS: Final = frozenset(
    f"torchvision.{name}.default" for name in ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool")
)
#: Operators that change arguments although their schema does not say so: argument positions written in training mode,
#: and the position of the training flag (None: always).
UNDECLARED_WRITES: Final[dict[str, tuple[tuple[int, ...], int | None]]] = {
    "aten.cudnn_batch_norm": ((3, 4), 5),
    "aten.native_batch_norm": ((3, 4), 5),
    "aten.miopen_batch_norm": ((3, 4), 5),
    "aten._batch_norm_impl_index": ((3, 4), 5),
    "aten.batch_norm_gather_stats": ((3, 4), None),
    "aten.batch_norm_gather_stats_with_counts": ((3, 4), None),
}
#: Optimizers in one kernel: number of their lists; except for SGD, the last list has the steps.
FUSED_LISTS: Final = {"_fused_adam_": 6, "_fused_adamw_": 6, "_fused_sgd_": 3, "_fused_adagrad_": 4}
#: Gradients with the argument's leading dimensions: number of trailing dimensions that may differ.
LEADING: Final = {
    **dict.fromkeys((f"aten.{n}1d_backward.default" for n in ("reflection_pad", "replication_pad")), 1),
    **dict.fromkeys(
        (
            f"aten.{n}_backward.default"
            for n in ("_adaptive_avg_pool2d", "avg_pool2d", "reflection_pad2d", "replication_pad2d")
        ),
        2,
    ),
    **dict.fromkeys(
        (
            f"aten.{n}_backward.default"
            for n in ("_adaptive_avg_pool3d", "avg_pool3d", "reflection_pad3d", "replication_pad3d")
        ),
        3,
    ),
}


#: Backward of a softmax: gradient and result have one shape.
ALIKE: Final = frozenset({"aten._softmax_backward_data.default", "aten._log_softmax_backward_data.default"})


#: Operators whose results share their argument's memory.
VIEWS: Final = frozenset(
    f"aten.{name}"
    for name in [
        "_conj.default",
        "_unsafe_view.default",
        "alias.default",
        "as_strided.default",
        "detach.default",
        "diagonal.default",
        "expand.default",
        "lift_fresh.default",
        "permute.default",
        "select.int",
        "slice.Tensor",
        "split.Tensor",
        "split_with_sizes.default",
        "squeeze.default",
        "squeeze.dim",
        "squeeze.dims",
        "t.default",
        "transpose.int",
        "unbind.int",
        "unfold.default",
        "unsafe_split.Tensor",
        "unsafe_split_with_sizes.default",
        "unsqueeze.default",
        "view.default",
        "view.dtype",
        "view_as_complex.default",
        "view_as_real.default",
    ]
)
#: Forwards that save nothing, with the rule of their backward.
UNSAVED: Final = {rule.forwards[0]: rule for rule in BACKWARDS.values() if not rule.saved}
