"""Write gpusim/runtime/aten_operators.txt: the operators that replay may call.

Run with a new torch to see what its registry adds: python scripts/make_operator_list.py >
gpusim/runtime/aten_operators.txt
"""

from __future__ import annotations

import re

import torch

#: Left out: files and printing; values read back to the host or shapes that depend on them; storage tricks; sparse,
#: quantised, nested and complex bookkeeping; communication; tests of torch itself; back ends that are not CUDA's.
LEFT_OUT = re.compile(
    r"(file|save|load|print|item|local_scalar|nonzero|unique|masked_select|allclose|^equal$|is_|record_stream|set_|"
    r"resize|storage|sparse|csr|csc|coo|quant|q_scale|q_zero|nested|jagged|named|names|align|_test|mkldnn|mps|xnnpack|"
    r"miopen|vulkan|metal|onednn|fbgemm|dynamo|dispatch|assert|sym_|_version|requires_grad|retain_grad|backward$|"
    r"^_backward|pin_memory|cpu|host|to_here|rpc|rng|seed|get_gradients|bincount|histogram|histc|combinations|lstsq|"
    r"_thnn_|choose_|_cslt|_scaled_grouped|dist_|_use_|can_cast|result_type|promote|size$|numel|stride$|dim$|"
    r"_fw_primal|_make_dual|_unpack_dual|_wrapped|__)"
)
#: Backward operators are wanted although the pattern above stops the word: those that compute gradients from tensors.
BACKWARD = re.compile(r"_backward(_data|_input|_weight|_elemt|_reduce)?$")
KEEP_ANYWAY = {"aten._scaled_dot_product_flash_attention_for_cpu", "aten.nll_loss2d_forward"}
TORCHVISION = ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")


def allowed(name: str, schemas: list[torch._C.FunctionSchema]) -> bool:
    """Whether an operator computes tensors from tensors and is safe to call on what a file says."""
    makes = any("Tensor" in str(r.type) for s in schemas for r in s.returns)
    changes = any(a.alias_info is not None and a.alias_info.is_write for s in schemas for a in s.arguments)
    if not (makes or changes):
        return False
    if BACKWARD.search(name) and not re.search(r"sparse|mkldnn|mps|miopen|nested|quant|names|file", name):
        return True
    return LEFT_OUT.search(name) is None


def main() -> None:
    """Print the list, sorted."""
    found: dict[str, list[torch._C.FunctionSchema]] = {}
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace == "aten":
            found.setdefault(name, []).append(schema)
    names = {f"aten.{name}" for name, schemas in found.items() if allowed(name, schemas)}
    names |= KEEP_ANYWAY | {f"torchvision.{name}" for name in TORCHVISION}
    names |= {f"torchvision._{name}_backward" for name in TORCHVISION}
    print("# Operators that `gpusim replay` may call; see gpusim/runtime/operators.py.")
    print(f"# Made by scripts/make_operator_list.py with torch {torch.__version__.split('+')[0]}.")
    for name in sorted(names):
        print(name)


if __name__ == "__main__":
    main()
