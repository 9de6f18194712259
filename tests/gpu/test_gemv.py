"""Products of one row or column as sums: what stands for which product, with which result, and for which steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import fx, nn
from torch._inductor.inductor_prims import force_stride_order
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from gpusim.gpu.capture.calls import Value
from gpusim.gpu.capture.in_memory import function_step, options_of
from gpusim.gpu.capture.rebuild import Rebuilt, bare_trace, check_against_calls
from gpusim.gpu.capture.record import record
from gpusim.gpu.capture.user_step import Untouched, record_step
from gpusim.gpu.inductor.functional import FunctionalGraph
from gpusim.gpu.inductor.gemv import block_of, blocks_of_sums, mostly_gemv, products_as_sums
from gpusim.gpu.inductor.step import inductor_step
from gpusim.gpu.inductor.styles import GEMV
from gpusim.trace.store import bundled_traces, read_trace
from tests.gpu.test_inductor import TOLERANCE, check_orders
from tests.support.networks import CPU

ATEN = torch.ops.aten
PRODUCTS = {ATEN.mm.default, ATEN.bmm.default, ATEN.addmm.default, ATEN.baddbmm.default}


def graph_of(function: Callable[..., Any], *tensors: torch.Tensor) -> FunctionalGraph:
    mode = FakeTensorMode()
    fake = tuple(mode.from_tensor(tensor) for tensor in tensors)
    return FunctionalGraph(make_fx(function, tracing_mode="fake")(*fake), mode, fake, (), (), {})


def targets(graph: FunctionalGraph) -> list[Any]:
    return [node.target for node in graph.module.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (torch.mm, [(1, 96), (96, 40)]),
        (torch.mm, [(40, 96), (96, 1)]),
        (torch.mm, [(1, 96), (96, 1)]),
        (lambda x, w: torch.mm(x, w.t()), [(1, 96), (40, 96)]),
        (torch.bmm, [(3, 1, 96), (3, 96, 40)]),
        (torch.bmm, [(3, 40, 96), (3, 96, 1)]),
        (torch.addmm, [(40,), (1, 96), (96, 40)]),
        (lambda b, x, w: torch.addmm(b, x, w, beta=0.5, alpha=2), [(1, 40), (1, 96), (96, 40)]),
        (lambda b, x, w: torch.addmm(b / 0, x, w, beta=0), [(40,), (1, 96), (96, 40)]),
        (lambda b, x, w: torch.baddbmm(b, x, w, alpha=-1), [(3, 1, 40), (3, 1, 96), (3, 96, 40)]),
    ],
    ids=["row", "column", "row and column", "row, transposed", "rows", "columns", "added", "scaled", "no nan", "both"],
)
def test_a_sum_gives_what_the_product_gives(
    function: Callable[..., torch.Tensor], shapes: list[tuple[int, ...]], dtype: torch.dtype
) -> None:
    """In the product's type and strides; deviations from FP64 are those of rounding inputs and result once."""
    torch.manual_seed(0)
    tensors = [torch.randn(shape).to(dtype) for shape in shapes]
    graph = products_as_sums(graph_of(function, *tensors))
    assert not PRODUCTS & set(targets(graph))
    result, product = graph.module(*tensors), function(*tensors)
    assert (result.dtype, result.shape, result.stride()) == (product.dtype, product.shape, product.stride())
    exact = function(*(tensor.double() for tensor in tensors))
    torch.testing.assert_close(result, exact.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.randn(2, 8), torch.randn(8, 2)),
        (torch.randn(1, 8).double(), torch.randn(8, 4).double()),
        (torch.ones(1, 8, dtype=torch.int64), torch.ones(8, 4, dtype=torch.int64)),
        (torch.randn(1, 1), torch.randn(1, 4)),
    ],
    ids=["rows", "double", "integer", "outer"],
)
def test_other_products_stay(one: torch.Tensor, other: torch.Tensor) -> None:
    """Of several rows, of other types, and outer products."""
    assert targets(products_as_sums(graph_of(torch.mm, one, other))) == [ATEN.mm.default]


def test_a_product_that_counts_nothing_stays() -> None:
    """Infinities in it give no NaN."""
    given = torch.ones(4), torch.full((1, 8), torch.inf), torch.zeros(8, 4)
    graph = products_as_sums(graph_of(lambda b, x, w: torch.addmm(b, x, w, alpha=0), *given))
    assert targets(graph) == [ATEN.addmm.default]


def test_a_sum_stands_for_the_results_of_calls_that_the_product_was() -> None:
    graph = graph_of(torch.mm, torch.randn(1, 8), torch.randn(8, 4))
    (product,) = (node for node in graph.module.graph.nodes if node.target == ATEN.mm.default)
    product.meta["custom"] = {"gpusim_call": "score"}
    summed = products_as_sums(dataclasses.replace(graph, values={product: (Value("score", None),)}))
    ((node, values),) = summed.values.items()
    assert node.target == ATEN.sum.dim_IntList
    assert values == (Value("score", None),)
    made = [each for each in summed.module.graph.nodes if each.op == "call_function"]
    assert {each.meta["custom"]["gpusim_call"] for each in made} == {"score"}


@pytest.mark.parametrize(
    ("function", "written"),
    [
        (lambda x, w: (x.sigmoid() * x).view(1, 64) @ w, False),
        (lambda x, w: (x.view(1, 64) @ w @ w).tanh() @ w, False),
        (lambda x, w: (x / x.square().mean()).view(1, 64) @ w, False),
        (lambda x, w: nn.functional.avg_pool2d(x.repeat(4, 4).view(1, 1, 16, 64), (16, 1)).view(1, 64) @ w, True),
        (lambda x, w: w[x.view(1, 64).argmax(dim=1)].relu() @ w, True),
    ],
    ids=["gate", "products", "norm", "pooling", "lookup"],
)
def test_a_vector_is_computed_anew_for_each_few_rows_only_if_elementwise(
    function: Callable[..., torch.Tensor], written: bool
) -> None:
    """A window of a pooling would be read again with each few rows of the matrix; it is written to memory first."""
    graph = products_as_sums(graph_of(function, torch.randn(4, 16), torch.randn(64, 64)))
    assert (force_stride_order in targets(graph)) == written


def test_steps_that_mostly_read_matrices_for_one_row_have_the_style() -> None:
    mostly = {name for name, file in bundled_traces().items() if mostly_gemv(read_trace(file))}
    assert mostly == {"decoder_small-infer-b1-bf16", "vgg16-infer-b1"}
    trace = read_trace(bundled_traces()["vgg16-infer-b1"])
    in_double = (msgspec.structs.replace(tensor, dtype="float64") for tensor in trace.tensors)
    assert not mostly_gemv(msgspec.structs.replace(trace, tensors=tuple(in_double)))


class Wide(nn.Module):
    """One row, normed, for several matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.experts = nn.LayerNorm(32), nn.Parameter(torch.randn(3, 32, 40))

    def forward(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return self.norm(x) @ self.experts


class Token(nn.Module):
    """A token through a gated layer with a cache, twice, and its scores."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(32)
        self.query, self.gate, self.up = nn.Linear(32, 32), nn.Linear(32, 80), nn.Linear(32, 80, bias=False)
        self.down, self.scores = nn.Linear(80, 32), nn.Linear(32, 11)

    def forward(self, x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            normed = self.norm(x)
            shares = (self.query(normed).unsqueeze(1) @ keys).softmax(-1)
            x = x + (shares @ keys.transpose(1, 2)).squeeze(1)
            x = x + self.down(self.gate(normed).sigmoid() * self.up(normed))
        return self.scores(x)


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("kind", [Token, Wide])
def test_a_token_ends_as_in_eager_in_any_legal_order(kind: type[nn.Module], trains: bool) -> None:
    torch.manual_seed(1)
    model, keys = kind().requires_grad_(trains), torch.randn(1, 32, 9)

    def step(x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        scores = model(x, keys)
        if trains:
            scores.square().mean().backward()
        return scores.detach()

    user = function_step(step, (torch.randn(1, 32), keys), CPU)
    options = options_of(user, "test.step", "train" if trains else "infer", "fp32", False, 0, False, "inductor")
    with Untouched(user).around() as untouched:
        graph = record_step(user, untouched, options.seed)
    plain = record(graph)
    recorded = inductor_step(graph, plain, trains, GEMV)
    if not trains:  # gradients of weights are outer products, which stay on a CPU
        assert not any("mm" in op.target for op in recorded.ops)
    trace = bare_trace(options, user, recorded)
    check_orders(trace, recorded)
    calls = Rebuilt(bare_trace(dataclasses.replace(options, frontend="aten"), user, plain), plain, 0.0, 0.0)
    assert max(check_against_calls(calls, trace, recorded, graph, options, CPU)) < TOLERANCE


@pytest.mark.parametrize(
    ("rows", "summed", "element_bytes", "block"),
    [
        (5632, 2048, 2, (4, 1024, 8)),
        (1024, 2048, 2, (4, 1024, 8)),  # 256 blocks
        (1023, 2048, 2, (2, 1024, 4)),
        (300, 2048, 2, (1, 1024, 4)),
        (4096, 25088, 4, (4, 512, 8)),  # 2 KiB of a row
        (4096, 200, 4, (4, 256, 8)),  # 256 hold the row
        (7, 30, 4, (1, 32, 4)),
    ],
)
def test_a_block_reads_few_rows_and_kernels_have_blocks_for_all_sms(
    rows: int, summed: int, element_bytes: int, block: tuple[int, int, int]
) -> None:
    """By hand: 2 KiB of up to four rows at once, two warps a row, four at least, as long as there are 256 blocks."""
    made = block_of(rows, summed, element_bytes)
    assert (made["XBLOCK"], made["R0_BLOCK"], made["num_warps"]) == block


class Reduction:
    """What torch tells of a kernel: its reductions, each with the bytes of its matrix's elements, if it has one."""

    numel, reduction_numel = 2048, 5632

    def __init__(self, *element_bytes: int) -> None:
        self.marks = element_bytes

    def reduction_nodes(self) -> list[Any]:
        def node(mark: int) -> Any:
            origins = [fx.Graph().placeholder("x"), fx.Graph().placeholder("y")]
            origins[1].meta["custom"] = {"gpusim_gemv_bytes": mark} if mark else {}
            return SimpleNamespace(node=SimpleNamespace(get_origins=lambda: origins))

        return list(map(node, self.marks))


def test_kernels_that_sum_matrices_alone_have_these_blocks() -> None:
    tiles = [{"x": 2048, "r0_": 5632}]
    with blocks_of_sums():
        given = V.choices.triton_kernel_kwargs(None, Reduction(2), tiles, {"features": 1})
        assert given["fixed_config"].config == block_of(2048, 5632, 2)
        both = V.choices.triton_kernel_kwargs(None, Reduction(2, 4), tiles, {})
        assert both["fixed_config"].config == block_of(2048, 5632, 4)
        assert given["features"] == 1
        assert given["override_persistent_reduction"] is False
        for other in (Reduction(), Reduction(0), Reduction(2, 0)):
            assert V.choices.triton_kernel_kwargs(None, other, tiles, {}) == {}
        assert V.choices.triton_kernel_kwargs(None, Reduction(2), [{"x": 1, "y": 2, "r0_": 3}], {}) == {}
    assert V.choices.triton_kernel_kwargs(None, Reduction(2), tiles, {}) == {}


@pytest.mark.gpu
def test_on_a_gpu_kernels_of_sums_have_these_blocks() -> None:
    torch.manual_seed(1)
    model = Token().cuda().requires_grad_(False)
    given = (torch.randn(1, 32, device="cuda"), torch.randn(1, 32, 9, device="cuda"))
    user = function_step(model, given, torch.device("cuda"))
    options = options_of(user, "test.step", "infer", "fp32", False, 0, False, "inductor")
    with Untouched(user).around() as untouched:
        graph = record_step(user, untouched, options.seed)
    recorded = inductor_step(graph, record(graph), False, GEMV)
    assert sum("fixed_config" in source.text for source in recorded.sources) >= 4
    assert not any("mm" in op.target for op in recorded.ops)
