"""Operators and their arguments: allowed calls, changes made by a call, and encoding in a trace."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
import torch

from gpusim.errors import CaptureError, OperatorError, ReplayError
from gpusim.formats.arguments import problem_with
from gpusim.formats.trace import Op, Storage
from gpusim.gpu.replay import execute
from gpusim.gpu.replay.allowlist import allowed_operators, base_name, check_operators
from gpusim.gpu.replay.encode import decode, encode
from gpusim.gpu.replay.execute import Runner
from gpusim.gpu.replay.operators import UNDECLARED_WRITES, describe, is_random, resolve, written_arguments
from gpusim.gpu.replay.tensors import copy_sharing, flat_results, placed_results
from tests.support.helpers import chain_trace
from tests.support.networks import CPU, NETWORKS, on_cpu

aten = torch.ops.aten


# --- The allow-list ---


@pytest.mark.parametrize(
    "name",
    [
        "aten.set_",
        "aten.resize_",
        "aten.from_file",
        "aten.save",
        "aten._local_scalar_dense",
        "aten.item",
        "aten.nonzero",
        "aten.masked_select",
        "aten.record_stream",
        "aten.warn",
        "prim.Print",
        "profiler._record_function_enter",
        "quantized.linear",
        "builtins.eval",
        "os.system",
    ],
)
def test_what_does_more_than_arithmetic_is_not_allowed(name: str) -> None:
    assert not any(base_name(allowed) == name for allowed in allowed_operators())
    with pytest.raises(OperatorError, match=f"operator '{name}.default' is not on the allow-list"):
        resolve(f"{name}.default")


def test_allowed_operators_are_of_aten_or_torchvision_and_have_an_overload() -> None:
    assert {name.partition(".")[0] for name in allowed_operators()} == {"aten", "torchvision"}
    assert all(name.count(".") == 2 for name in allowed_operators())


@pytest.mark.parametrize("name", NETWORKS)
def test_operators_of_small_networks_are_allowed(name: str) -> None:
    for mode in ("infer", "train"):
        check_operators(on_cpu(name, mode).trace, "t")


def test_operator_outside_the_list_is_named_with_file_and_place() -> None:
    """Checked without torch, before anything runs."""
    trace = chain_trace(3)
    with pytest.raises(OperatorError) as caught:
        check_operators(trace, "some/t.json")
    text = "some/t.json: $.ops[0].target: operator 'aten.test.default' is not on the allow-list of replay"
    assert str(caught.value) == text
    with pytest.raises(OperatorError, match=r"aten\.test\.default"):
        Runner(trace, CPU)


@pytest.mark.parametrize("target", ["", "relu", "aten.relu", "aten..relu", "...", "aten.relu.default.__class__"])
def test_odd_target_is_an_operator_error(target: str) -> None:
    with pytest.raises(OperatorError):
        resolve(target)


def test_overload_that_is_not_on_the_list_is_named() -> None:
    with pytest.raises(OperatorError, match=r"operator 'aten\.relu\.nonsense' is not on the allow-list"):
        resolve("aten.relu.nonsense")


def test_listed_overload_that_this_torch_lacks_is_an_operator_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions of torch differ in their overloads."""
    names = frozenset({"aten.relu.of_tomorrow", "aten.of_tomorrow.default"})
    monkeypatch.setattr("gpusim.gpu.replay.operators.allowed_operators", lambda: names)
    for name in names:
        with pytest.raises(OperatorError, match=f"has no operator '{name}'"):
            resolve(name)


def test_allowed_operator_resolves_to_torchs() -> None:
    assert resolve("aten.relu.default") is aten.relu.default
    assert base_name("aten.relu.default") == "aten.relu"


# --- What a call changes ---


def call(name: str, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    namespace, operator, overload = name.split(".")
    function = getattr(getattr(getattr(torch.ops, namespace), operator), overload)
    return written_arguments(function, args, kwargs)


def test_declared_changes_are_found_in_arguments_lists_and_keywords() -> None:
    a, b, c = torch.zeros(2), torch.ones(2), torch.ones(2)
    assert call("aten.add.Tensor", a, b) == []
    assert call("aten.add_.Tensor", a, b)[0] is a
    assert [t is w for t, w in zip(call("aten._foreach_add_.List", [a, b], [c, c]), (a, b), strict=True)] == [True] * 2
    assert call("aten.add.out", a, b, out=c)[0] is c


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_changes_its_statistics_in_training_only(training: bool) -> None:
    x, mean, var = torch.randn(2, 3), torch.zeros(3), torch.ones(3)
    written = call("aten.native_batch_norm.default", x, None, None, mean, var, training, 0.1, 1e-5)
    assert [id(t) for t in written] == ([id(mean), id(var)] if training else [])
    assert call("aten.native_batch_norm.default", x, None, None, None, None, True, 0.1, 1e-5) == []


def test_operators_with_undeclared_writes_exist() -> None:
    """A renamed operator would silently lose its entry."""
    for name in UNDECLARED_WRITES:
        assert hasattr(aten, name.removeprefix("aten.")), name


def test_random_operators_are_known() -> None:
    assert all(is_random(f) for f in (aten.native_dropout.default, aten.bernoulli.default, aten.rand_like.default))
    assert not any(is_random(f) for f in (aten.relu.default, aten.native_batch_norm.default))


# --- Arguments to JSON and back ---


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        -0.5,
        "mean",
        [1, [2, None]],
        torch.float32,
        torch.bfloat16,
        torch.strided,
        torch.channels_last,
        torch.device("cpu"),
        math.inf,
        -math.inf,
    ],
    ids=str,
)
def test_argument_survives_the_encoding(value: object) -> None:
    coded = encode(value, lambda _: 0, CPU)
    assert problem_with(coded) is None
    found = decode(coded, [], CPU)
    assert found == value
    assert type(found) is type(value)


def test_not_a_number_survives_the_encoding() -> None:
    assert math.isnan(decode(encode(math.nan, lambda _: 0, CPU), [], CPU))


def test_tensors_become_references_and_come_back_as_themselves() -> None:
    tensors: list[torch.Tensor | None] = [torch.zeros(1), torch.ones(1)]
    coded = encode([tensors[1], None, tensors[0]], lambda t: int(t.item()), CPU)
    assert coded == [{"tensor": 1}, None, {"tensor": 0}]
    back = decode(coded, tensors, CPU)
    assert back[0] is tensors[1]
    assert back[2] is tensors[0]


def test_gpu_of_the_capture_becomes_the_device_of_the_replay() -> None:
    gpu = torch.device("cuda", 1)
    assert encode(torch.device("cuda", 1), lambda _: 0, gpu) == {"device": "cuda"}
    assert encode(torch.device("cuda"), lambda _: 0, gpu) == {"device": "cuda"}
    assert decode({"device": "cuda"}, [], gpu) == gpu
    with pytest.raises(OperatorError, match="unknown device 'cpu'"):
        decode({"device": "cpu"}, [], gpu)
    with pytest.raises(CaptureError, match="the step computes on cpu, too"):
        encode(CPU, lambda _: 0, gpu)
    with pytest.raises(CaptureError, match="the step computes on cuda:3, too; all of it must be on the same GPU"):
        encode(torch.device("cuda", 3), lambda _: 0, gpu)


def test_what_has_no_encoding_is_refused() -> None:
    with pytest.raises(CaptureError, match="argument of type Generator has no encoding"):
        encode(torch.Generator(), lambda _: 0, CPU)


@pytest.mark.parametrize("coded", [{"dtype": "nn"}, {"dtype": "load"}, {"layout": "float32"}, {"memory_format": "x"}])
def test_name_that_is_not_of_its_kind_is_refused(coded: dict[str, str]) -> None:
    """A trace must not reach other attributes of torch by name."""
    with pytest.raises(OperatorError, match=f"unknown {next(iter(coded))}"):
        decode(coded, [], CPU)


# --- Running ops ---


def test_op_that_torch_refuses_is_named_with_the_reason() -> None:
    found = on_cpu("outputs", "infer")
    runner = found.rerun()
    runner.functions[0] = lambda *_: aten.mm.default(torch.zeros(2, 3), torch.zeros(2, 3))
    with pytest.raises(ReplayError) as caught:
        runner.run(0)
    assert str(caught.value).startswith(f"op {describe(found.trace.ops[0])} failed: ")
    assert "\n" not in str(caught.value)


def test_op_that_returns_more_than_its_trace_says_is_refused() -> None:
    """Another version of torch may return other results."""
    runner = on_cpu("outputs", "infer").rerun()
    runner.functions[0] = lambda *_: (torch.zeros(1), torch.zeros(1))
    with pytest.raises(ReplayError, match="returned 2 results, its trace has 1"):
        runner.run(0)


def attention(outputs: tuple[int | None, ...]) -> Op:
    return Op(name="a", target="aten._scaled_dot_product_cudnn_attention.default", outputs=outputs, host_ns=1)


@pytest.mark.parametrize(
    ("node", "may"),
    [
        (attention((7, None, None)), True),
        (attention((None, None)), True),
        (attention((7, 8, None)), False),
        (attention((7, None, 9)), False),
        (Op(name="m", target="aten.mm.default", outputs=(7, None), host_ns=1), False),
    ],
)
def test_only_attention_may_leave_out_results_that_nobody_uses(node: Op, may: bool) -> None:
    """At inference it returns no logsumexp, which shifts the positions of all later results."""
    assert execute._uses_fixed_results_only(node) is may


A, B, C = torch.zeros(1), torch.ones(1), torch.full((1,), 2.0)
CUDNN = "aten._scaled_dot_product_cudnn_attention.default"


@pytest.mark.parametrize(
    ("target", "result", "count", "wanted"),
    [
        ("x.y.default", (A, None, B), 3, [A, None, B]),  # as recorded without memory: None holds its place
        ("x.y.default", (A, None, B), 2, [A, B]),  # as recorded on real tensors: absent results are omitted
        ("x.y.default", (A, [B, None], 3), 4, [A, B, None, 3]),
        ("x.y.default", A, 1, [A]),
        ("x.y.default", None, 1, [None]),
        ("x.y.default", None, 0, []),
        ("x.y.default", (A, None, B), 1, None),
        ("x.y.default", (A, B), 3, None),
        (CUDNN, (A, B, None, None, 7, 8, A, C, None), 7, [A, B, 7, 8, A, C, None]),
        (CUDNN, (A, None, None, None, 7, 8, A, C, None), 7, [A, None, 7, 8, A, C, None]),
        (CUDNN, (A, B, None, None, 7, 8, A, C, None), 6, [A, B, 7, 8, A, C]),
        (CUDNN, [A, None, 7, 8, A, C, None], 7, [A, None, 7, 8, A, C, None]),  # already at its places
    ],
)
def test_results_are_at_the_places_of_the_schema(target: str, result: Any, count: int, wanted: Any) -> None:
    placed = placed_results(target, result, count)
    assert (placed is None) == (wanted is None)
    if placed is not None:
        assert [id(part) for part in placed] == [id(part) for part in wanted]


def test_a_result_that_is_absent_is_refused_only_where_it_is_used() -> None:
    """Without memory torch gives some operators more results than they have on a GPU."""
    trace = on_cpu("outputs", "infer").trace
    unused = len(trace.tensors)
    extra = msgspec.structs.replace(trace.tensors[trace.ops[0].outputs[0]], storage=len(trace.storages))

    def runner(used: bool) -> Runner:
        outputs = (*trace.ops[0].outputs, unused)
        ops = [msgspec.structs.replace(trace.ops[0], outputs=outputs), *trace.ops[1:]]
        role = "output" if used else "activation"
        made = msgspec.structs.replace(
            trace,
            ops=tuple(ops),
            tensors=(*trace.tensors, msgspec.structs.replace(extra, role=role)),
            storages=(*trace.storages, Storage(bytes=trace.storages[trace.tensors[outputs[0]].storage].bytes)),
        )
        return Runner(made, CPU, own=True)

    given = torch.zeros(trace.tensors[trace.ops[0].outputs[0]].shape)
    runner(False).store(0, (given, None))
    runner(False).store(0, (given, given.clone()))
    with pytest.raises(ReplayError, match=f"returned a NoneType where its trace has tensor {unused}"):
        runner(True).store(0, (given, None))


def test_out_of_memory_goes_through_untouched() -> None:
    """`explain_out_of_memory` turns it into a message with numbers further up."""
    runner = on_cpu("outputs", "infer").rerun()

    def full(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    runner.functions[0] = full
    with pytest.raises(torch.cuda.OutOfMemoryError):
        runner.run(0)


def test_released_storage_takes_all_its_tensors_and_temporaries_can_be_dropped() -> None:
    found = on_cpu("views", "infer")
    runner = found.rerun()
    runner.run_in_order()
    held = {t.storage for t in found.trace.tensors if t.init is not None}
    storage = next(t.storage for t in found.trace.tensors if t.storage not in held)
    runner.release([storage])
    assert all(runner.tensors[i] is None for i, t in enumerate(found.trace.tensors) if t.storage == storage)
    runner.drop_temporaries()
    assert [t is not None for t in runner.tensors] == [t.init is not None for t in found.trace.tensors]


# --- Small things about tensors ---


def test_results_are_flattened_with_their_gaps() -> None:
    a = torch.zeros(1)
    assert flat_results(None) == []
    assert flat_results(a)[0] is a
    assert flat_results((a, [a, 3]))[2] == 3


def test_copies_share_memory_as_the_originals_do() -> None:
    base = torch.arange(6.0).reshape(2, 3)
    copies = copy_sharing({0: base, 5: base.t(), 7: base[1], 9: torch.ones(2)})
    assert (copies[5].stride(), copies[7].storage_offset()) == ((1, 3), 3)
    copies[7].fill_(9.0)
    assert copies[0][1].tolist() == copies[5][:, 1].tolist() == [9.0] * 3
    assert base[1].tolist() == [3.0, 4.0, 5.0]
    assert copies[9].tolist() == [1.0, 1.0]
