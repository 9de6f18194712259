"""Kernels that are products: GEMM-like by name, of an op and with a name that is no convolution's."""

from __future__ import annotations

import msgspec
import pytest

from tests.support.helpers import Step, build_graph, kernel, make_trace


@pytest.mark.parametrize(
    ("target", "name", "product"),
    [
        ("aten.mm.default", "ampere_sgemm_128x64_nn", True),
        ("aten.convolution.default", "ampere_sgemm_128x64_nn", False),
        ("aten.mm.default", "sm80_xmma_fprop_implicit_gemm_tf32f32", False),
        ("imported.kernel", "sm80_xmma_gemm_tf32f32_tf32f32_f32", False),
        ("aten.add.Tensor", "vectorized_elementwise_kernel", False),
    ],
)
def test_a_product_is_gemm_like_and_known_to_be_no_convolution(target: str, name: str, product: bool) -> None:
    kernels = (msgspec.structs.replace(kernel(1000), name=name),)
    graph = build_graph(make_trace([Step("a", "x", "a", kernels=kernels, target=target)]))
    assert [task.product for task in graph.tasks[0]] == [product]
