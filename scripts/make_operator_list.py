"""Write gpusim/gpu/replay/aten_operators.txt: the operators that replay may call, in groups with the reason for each.

    python scripts/make_operator_list.py            writes the file
    python scripts/make_operator_list.py --check    exits with 1 where the file differs

An operator is in a group after a review of its behaviour with wrong arguments; being recorded by models is not enough.
Its overloads follow from torch's schemas: those whose arguments and results a trace can hold, that write no `out`
argument, and that torch does not decompose before a recording sees them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

TARGET = Path(__file__).parent.parent / "gpusim" / "gpu" / "replay" / "aten_operators.txt"

#: Reason -> operators; a suffix `(_)` includes the in-place form.
GROUPS: dict[str, str] = {
    "Elementwise, of one tensor: shapes are those of the argument.": """
        abs(_) acos(_) acosh(_) asin(_) asinh(_) atan(_) atanh(_) bitwise_not(_) ceil(_) celu(_) cos(_) cosh(_)
        digamma(_) elu(_) erf(_) erfc(_) erfinv(_) exp(_) exp2(_) expm1(_) floor(_) frac(_) gelu(_) hardshrink
        hardsigmoid(_) hardswish(_) hardtanh(_) i0(_) isinf isnan leaky_relu(_) lgamma(_) log(_) log10(_) log1p(_)
        log2(_) logical_not(_) logit(_) mish(_) nan_to_num(_) neg(_) polygamma reciprocal(_) relu(_) round(_) rsqrt(_)
        sgn(_) sigmoid(_) sign(_) signbit silu(_) sin(_) sinc(_) sinh(_) softplus softshrink special_i1 sqrt(_) tan(_)
        tanh(_) threshold(_) trunc(_) log_sigmoid_forward _conj_physical""",
    "Elementwise, of several tensors: TensorIterator spreads them to one shape or refuses.": """
        add(_) addcdiv(_) addcmul(_) atan2(_) bitwise_and(_) bitwise_or(_) bitwise_xor(_) bitwise_left_shift(_)
        bitwise_right_shift(_) __rshift__ __lshift__ clamp(_) clamp_max(_) clamp_min(_) copysign(_) div(_) eq(_)
        floor_divide(_) fmax fmin fmod(_) ge(_) gt(_) heaviside(_) hypot(_) le(_) lerp(_) logaddexp logaddexp2
        logical_and(_) logical_or(_) logical_xor(_) lt(_) masked_fill(_) maximum minimum mul(_) ne(_) pow(_)
        remainder(_) rsub sub(_) where xlogy(_) copy_ fill_ zero_ _prelu_kernel polar""",
    "Backward of elementwise operators: TensorIterator, as above.": """
        elu_backward gelu_backward glu_backward hardshrink_backward hardsigmoid_backward hardswish_backward
        hardtanh_backward leaky_relu_backward log_sigmoid_backward logit_backward mish_backward native_dropout_backward
        _prelu_kernel_backward sigmoid_backward silu_backward softplus_backward softshrink_backward tanh_backward
        threshold_backward""",
    "Losses; the targets of nll_loss are class numbers, see gpusim/gpu/replay/saved.py.": """
        binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits huber_loss
        huber_loss_backward mse_loss mse_loss_backward smooth_l1_loss smooth_l1_loss_backward soft_margin_loss
        soft_margin_loss_backward nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward""",
    "Reductions, scans and sorting along dimensions that are checked.": """
        all any amax amin aminmax argmax argmin cumprod cumsum kthvalue linalg_vector_norm logsumexp max mean median
        min norm prod sort std sum topk var var_mean std_mean _log_softmax _log_softmax_backward_data _softmax
        _softmax_backward_data _safe_softmax glu""",
    "Products of matrices: sizes are checked before a library is called.": """
        addbmm addmm addmv addr baddbmm bmm dot mm mv vdot""",
    "Convolutions: sizes are checked before a library is called.": """
        convolution convolution_backward""",
    "Normalisation: sizes of weights and statistics are checked in gpusim/gpu/replay/size_rules.py.": """
        native_batch_norm native_batch_norm_backward cudnn_batch_norm cudnn_batch_norm_backward
        _native_batch_norm_legit _native_batch_norm_legit_functional _native_batch_norm_legit_no_training
        native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward
        _fused_rms_norm _fused_rms_norm_backward""",
    "Attention; backward takes what its forward saved (gpusim/gpu/replay/saved.py).": """
        _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
        _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
        _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
        _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward""",
    "Cells of recurrent networks; backward takes what its forward saved (gpusim/gpu/replay/saved.py).": """
        _thnn_fused_gru_cell _thnn_fused_gru_cell_backward _thnn_fused_lstm_cell _thnn_fused_lstm_cell_backward_impl""",
    "Pooling; places of maxima come from the forward, and gradients have its shape (gpusim/gpu/replay/saved.py).": """
        _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward
        adaptive_max_pool2d adaptive_max_pool2d_backward adaptive_max_pool3d adaptive_max_pool3d_backward avg_pool2d
        avg_pool2d_backward avg_pool3d avg_pool3d_backward max_pool2d_with_indices max_pool2d_with_indices_backward
        max_pool3d_with_indices max_pool3d_with_indices_backward""",
    "Resampling and padding: the forward checks sizes, gradients are checked in gpusim/gpu/replay/size_rules.py.": """
        affine_grid_generator col2im constant_pad_nd grid_sampler_2d grid_sampler_2d_backward im2col pixel_shuffle
        pixel_unshuffle channel_shuffle
        reflection_pad1d reflection_pad1d_backward reflection_pad2d reflection_pad2d_backward reflection_pad3d
        reflection_pad3d_backward replication_pad1d replication_pad1d_backward replication_pad2d
        replication_pad2d_backward replication_pad3d replication_pad3d_backward upsample_bicubic2d
        upsample_bicubic2d_backward upsample_bilinear2d upsample_bilinear2d_backward upsample_linear1d
        upsample_linear1d_backward upsample_nearest1d upsample_nearest1d_backward upsample_nearest2d
        upsample_nearest2d_backward upsample_nearest3d upsample_nearest3d_backward upsample_trilinear3d
        upsample_trilinear3d_backward _upsample_bicubic2d_aa _upsample_bicubic2d_aa_backward _upsample_bilinear2d_aa
        _upsample_bilinear2d_aa_backward _upsample_nearest_exact1d _upsample_nearest_exact1d_backward
        _upsample_nearest_exact2d _upsample_nearest_exact2d_backward _upsample_nearest_exact3d
        _upsample_nearest_exact3d_backward""",
    "Indexing: every index is checked, on the GPU by an assertion that ends the process.": """
        embedding embedding_dense_backward gather index index_add(_) index_copy(_) index_fill(_) index_put(_)
        index_select max_unpool2d masked_scatter(_) masked_scatter_backward scatter(_) scatter_add(_)
        scatter_reduce(_) bucketize""",
    "Rows and labels that follow from what the trace says (gpusim/gpu/replay/known_values.py, saved.py).": """
        _embedding_bag _embedding_bag_forward_only _embedding_bag_backward _embedding_bag_dense_backward
        _embedding_bag_per_sample_weights_backward _ctc_loss _ctc_loss_backward""",
    "Fourier transforms: dimensions and lengths are checked in gpusim/gpu/replay/size_rules.py.": """
        _fft_r2c _fft_c2r _fft_c2c""",
    "Views: torch checks that they lie in the storage, and replay checks it again.": """
        alias as_strided as_strided_ detach diagonal expand permute select slice split split_with_sizes squeeze
        squeeze_ t t_ transpose transpose_ unbind unfold unsqueeze unsqueeze_ unsafe_split unsafe_split_with_sizes
        view view_as_complex view_as_real _unsafe_view _conj lift_fresh""",
    "Copies in another shape, order or type.": """
        cat clone diag_embed diagonal_backward flip lift_fresh_copy repeat roll select_backward slice_backward stack
        tril(_) triu(_) unfold_backward _to_copy""",
    "New tensors: their shape is in the trace, and their device is the step's GPU.": """
        arange empty empty_like empty_strided eye full full_like linspace new_empty new_empty_strided new_full new_ones
        new_zeros ones ones_like rand rand_like randint randn randn_like randperm scalar_tensor tril_indices
        triu_indices zeros zeros_like""",
    "Random numbers of the default generator.": """
        bernoulli(_) exponential_ multinomial native_dropout normal_ random_ uniform_
        _fused_dropout _masked_scale""",
    "Optimizers, clipping of gradients, and scaling of losses; lists of one length, or torch refuses.": """
        _foreach_abs(_) _foreach_add(_) _foreach_addcdiv(_) _foreach_addcmul(_) _foreach_clamp_max(_)
        _foreach_clamp_min(_) _foreach_copy_ _foreach_div(_) _foreach_exp(_) _foreach_lerp(_) _foreach_max
        _foreach_maximum(_) _foreach_minimum(_) _foreach_mul(_) _foreach_neg(_) _foreach_norm _foreach_pow(_)
        _foreach_reciprocal(_) _foreach_rsqrt(_) _foreach_sign(_) _foreach_sqrt(_) _foreach_sub(_) _foreach_zero(_)
        _amp_foreach_non_finite_check_and_unscale_ _amp_update_scale_""",
    "Optimizers in one kernel: sizes and strides are checked in gpusim/gpu/replay/size_rules.py.": """
        _fused_adagrad_ _fused_adam_ _fused_adamw_ _fused_sgd_""",
}
#: Operators that models record but replay refuses, with the reason.
LEFT_OUT: dict[str, str] = {
    "set_ resize_ _reshape_alias": "lay a tensor over memory without a check",
    "_unsafe_index _unsafe_index_put _index_put_impl_": "may skip the check of indices",
    "_local_scalar_dense item equal nonzero": "give values to the host",
    "embedding_renorm_": "indices are not checked on every device",
    "_cudnn_rnn _cudnn_rnn_backward mkldnn_rnn_layer mkldnn_rnn_layer_backward": "a packed buffer of unchecked size",
    "_cudnn_ctc_loss": "its labels and lengths are in the host's memory",
    "multi_margin_loss multi_margin_loss_backward multilabel_margin_loss_forward multilabel_margin_loss_backward": (
        "class numbers are not checked in the backward"
    ),
    "fractional_max_pool2d fractional_max_pool2d_backward": "places are not checked on every device",
    "_cdist_forward _cdist_backward _weight_norm_interface _weight_norm_interface_backward": (
        "sizes of saved values are not checked"
    ),
    "_transformer_encoder_layer_fwd _native_multi_head_attention": "sizes of weights are not checked",
    "_foreach_copy": "the lengths of its lists are not checked",
    "_efficientzerotensor": "a tensor without memory",
    "angle": "belongs to complex numbers",
    "rrelu_with_noise rrelu_with_noise_ rrelu_with_noise_backward": "the size of the noise is not checked",
}
#: Operators that torch decomposes on some devices only.
WHOLE_ON_CUDA = {"_embedding_bag_backward", "_fused_rms_norm", "mish_backward", "silu_backward"}
#: Overloads that take lengths as tensors in host memory.
HOST_OVERLOADS = {"aten._ctc_loss.Tensor", "aten._ctc_loss_backward.Tensor"}
TORCHVISION = ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")

#: Types of arguments that a trace can hold; a generator is always left out of a call.
ARGUMENT = re.compile(
    r"^(Tensor|number|int|float|bool|str|Device|Generator|Optional\[.*\]|List\[.*\]|ScalarType|Layout|MemoryFormat)$"
)
RESULT = re.compile(r"^(Tensor|int|List\[Tensor\])$")


def names_of(text: str) -> Iterator[str]:
    """Yield the operators that a group names, in-place forms included."""
    for word in text.split():
        yield word.removesuffix("(_)")
        if word.endswith("(_)"):
            yield word.removesuffix("(_)") + "_"


def overloads(name: str) -> list[str]:
    """Return the allowed overloads of an operator: `aten.add.Tensor`, `aten.add.Scalar`."""
    names = []
    for schema in torch._C._jit_get_schemas_for_operator(f"aten::{name}"):
        types = [str(argument.type) for argument in schema.arguments]
        fits = all(ARGUMENT.match(kind) for kind in types) and all(RESULT.match(str(r.type)) for r in schema.returns)
        out = any(argument.is_out for argument in schema.arguments)
        key = f"aten::{name}" + (f".{schema.overload_name}" if schema.overload_name else "")
        registered = torch._C._dispatch_has_kernel(key)
        # torch decomposes such an operator before a recording sees it.
        apart = (
            registered
            and name not in WHOLE_ON_CUDA
            and torch._C._dispatch_has_kernel_for_dispatch_key(key, "CompositeImplicitAutograd")
        )
        named = any("Dimname" in str(argument) for argument in schema.arguments) or "names" in schema.overload_name
        if fits and registered and not (out or apart or named):
            names.append(f"aten.{name}.{schema.overload_name or 'default'}")
    return sorted(set(names) - HOST_OVERLOADS)


def text_of_list() -> str:
    """Return the whole file."""
    lines = [
        "# Operators that replay may call, each with its overload. scripts/make_operator_list.py writes this file",
        "# and says there which operators are left out, and why.",
    ]
    for reason, names in GROUPS.items():
        entries = sorted(entry for name in names_of(names) for entry in overloads(name))
        lines += ["", f"# {reason}", *entries]
    lines += ["", "# torchvision: it checks sizes; images of boxes are checked in gpusim/gpu/replay/saved.py."]
    lines += sorted(f"torchvision.{n}.default" for n in (*TORCHVISION, *(f"_{name}_backward" for name in TORCHVISION)))
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the file, or compare it."""
    text = text_of_list()
    if "--check" in sys.argv[1:]:
        return int(TARGET.read_text(encoding="utf-8") != text)
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
