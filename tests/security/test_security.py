"""Powers of a file: replay runs listed operators within their memory; code of a file runs only with permission.

The traces here are hostile; each is small and made in the test.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusim.cli import cli
from gpusim.errors import GpuError, GpusimError, OperatorError, ReplayError, TrustError
from gpusim.formats.arguments import tensor_refs
from gpusim.formats.hardware import load_hardware
from gpusim.formats.trace import Op, Storage, Tensor, TensorInit, Trace, Variant, VariantSettings
from gpusim.gpu.replay.allowlist import allowed_operators, check_operators
from gpusim.gpu.replay.execute import Runner, make_initial
from gpusim.gpu.replay.operators import resolve
from gpusim.gpu.replay.replay import replay, trial_ns
from gpusim.gpu.replay.tensors import lies_in_storage
from gpusim.trace.store import write_trace
from gpusim.validation.recipe import check_recipe, read_recipe
from gpusim.validation.run import run_recipe
from tests.support.helpers import build_graph, chain_trace, kernel
from tests.support.networks import CPU, on_cpu

ROOT = Path(__file__).parents[2]
ONES = TensorInit(kind="constant", a=1.0)


def tensor(*shape: int, dtype: str = "float32", storage: int = 0, init: TensorInit | None = ONES) -> Tensor:
    stride = [1]
    for size in shape[:0:-1]:
        stride.insert(0, stride[0] * size)
    return Tensor(
        shape=shape,
        stride=tuple(stride[: len(shape)]),
        dtype=dtype,
        storage=storage,
        role="activation" if init is None else "input",
        init=init,
    )


def trace_of(ops: list[Op], tensors: list[Tensor], storage_bytes: int = 4096) -> Trace:
    """Make a step of these ops; each tensor's storage has `storage_bytes`."""
    base = chain_trace(1)
    count = max((each.storage for each in tensors), default=0) + 1
    return msgspec.structs.replace(
        base,
        ops=tuple(msgspec.structs.replace(op, name=f"op{i}", kernels=(kernel(1000),)) for i, op in enumerate(ops)),
        tensors=tuple(tensors),
        storages=tuple(Storage(bytes=storage_bytes) for _ in range(count)),
    )


def op(
    target: str, *args: Any, outputs: tuple[int | None, ...] = (), writes: tuple[int, ...] = (), **kwargs: Any
) -> Op:
    return Op(
        name="op",
        target=target,
        args=args,
        kwargs=kwargs,
        outputs=outputs,
        reads=tuple(dict.fromkeys(tensor_refs([*args, *kwargs.values()]))),
        writes=writes or tuple(each for each in outputs if each is not None),
    )


def t(index: int) -> dict[str, int]:
    return {"tensor": index}


def run(trace: Trace) -> Runner:
    """Run replay's checks before recording, on the CPU."""
    runner = Runner(trace, CPU)
    runner.bind(make_initial(trace, CPU, seed=0).tensors)
    runner.run_in_order()
    return runner


# --- Names ---


@pytest.mark.parametrize(
    "overload",
    ["__getattribute__", "__setattr__", "__call__", "__class__", "_op", "overloads", "op", "name", "Nope", ""],
)
def test_overload_that_is_an_attribute_is_refused(overload: str) -> None:
    trace = trace_of([op(f"aten.add.{overload}", "overloads", outputs=(0,))], [tensor(1, init=None)])
    with pytest.raises(OperatorError, match=r"^t\.json: \$\.ops\[0\]\.target: operator .* is not on the allow-list"):
        check_operators(trace, "t.json")
    with pytest.raises(OperatorError):
        Runner(trace, CPU)


def test_no_attribute_of_any_operator_packet_other_than_its_overloads_resolves() -> None:
    for base in sorted({name.rpartition(".")[0] for name in allowed_operators()}):
        namespace, name = base.split(".")
        if namespace != "aten":
            continue
        packet = getattr(torch.ops.aten, name)
        overloads = set(packet.overloads())
        for attribute in {*dir(packet), *dir(type(packet))} - overloads:
            with pytest.raises(OperatorError):
                resolve(f"{base}.{attribute}")


def test_whatever_is_listed_resolves_to_an_overload_even_if_the_list_names_an_attribute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attributes = [f"aten.add.{name}" for name in ("__class__", "__call__", "_op", "overloads", "_qualified_op_name")]
    monkeypatch.setattr("gpusim.gpu.replay.operators.allowed_operators", lambda: frozenset(attributes))
    resolve.cache_clear()
    for target in attributes:
        with pytest.raises(OperatorError, match="has no operator"):
            resolve(target)


def test_every_listed_operator_of_aten_is_an_overload_that_writes_no_out_argument() -> None:
    for target in sorted(allowed_operators()):
        if target.startswith("aten."):
            found = resolve(target)
            assert isinstance(found, torch._ops.OpOverload), target
            assert not any(argument.is_out for argument in found._schema.arguments), target


def test_list_is_what_its_script_writes_and_nothing_left_out_is_on_it() -> None:
    spec = importlib.util.spec_from_file_location("make_operator_list", ROOT / "scripts" / "make_operator_list.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    left_out = {f"aten.{name}" for names in script.LEFT_OUT for name in names.split()}
    assert not left_out & {name.rpartition(".")[0] for name in allowed_operators()}
    named = {f"aten.{name}" for names in script.GROUPS.values() for name in script.names_of(names)}
    assert {n.rpartition(".")[0] for n in allowed_operators() if n.startswith("aten.")} == named


@pytest.mark.parametrize(
    "target",
    [
        "aten._reshape_alias.default",
        "aten.set_.source_Tensor",
        "aten.resize_.default",
        "aten._index_put_impl_.default",
        "aten._unsafe_index.Tensor",
        "aten.append.t",
        "aten.Delete.t",
        "aten.from_file.default",
        "aten.add.out",
        "aten.item.default",
        "aten._cudnn_rnn.default",
        "aten.as_tensor.list",
    ],
)
def test_operators_that_reach_beyond_tensors_are_not_listed(target: str) -> None:
    assert target not in allowed_operators()


BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("torch is blocked")
sys.meta_path.insert(0, Block())
from gpusim.cli import main
sys.argv = ["gpusim", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize("command", [("replay", "--policy", "sequential", "--trace"), ("explore", "--measure", "1")])
def test_hostile_operator_is_refused_without_torch(command: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    trace = trace_of(
        [op("aten.add.__getattribute__", t(0), outputs=(1,))], [tensor(1), tensor(1, storage=1, init=None)]
    )
    write_trace(trace, path)
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, *command, str(path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert f"{path}: $.ops[0].target: operator 'aten.add.__getattribute__' is not on the allow-list" in done.stderr


# --- Arguments ---


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("eval", "no argument of it"),
        ({"device": "cpu"}, "device 'cpu' is not the step's GPU"),
        ({"dtype": "load"}, "unknown dtype"),
        ({"dtype": "float32", "tensor": 0}, "one key"),
        ({"layout": "sparse_coo"}, "a layout is one of"),
        (2**63, "too large"),
        (["x"], "no argument of it"),
        ([[{"device": "meta"}]], "a device is one of"),
    ],
)
def test_argument_that_no_step_has_is_refused_without_torch(value: Any, problem: str) -> None:
    trace = trace_of([op("aten.add.Tensor", t(0), value, outputs=(1,))], [tensor(1), tensor(1, storage=1, init=None)])
    with pytest.raises(OperatorError, match=rf"^t: \$\.ops\[0\]\.args\[1\]: operator 'aten\.add\.Tensor'.*{problem}"):
        check_operators(trace, "t")


def test_words_are_those_of_the_argument() -> None:
    tensors = [tensor(2), tensor(2, storage=1, init=None)]
    run(trace_of([op("aten.gelu.default", t(0), outputs=(1,), approximate="tanh")], tensors))
    with pytest.raises(OperatorError, match="the text 'floor' is not one of none, tanh"):
        run(trace_of([op("aten.gelu.default", t(0), outputs=(1,), approximate="floor")], tensors))


@pytest.mark.parametrize(
    ("ops", "problem"),
    [
        ([op("aten.relu.default", t(0), t(0), outputs=(1,))], "it takes 1 arguments, the trace has 2"),
        ([op("aten.relu.default", outputs=(1,), self=t(0))], "no argument 'self' by name"),
        ([op("aten.relu.default", [t(0)], outputs=(1,))], "argument 'self' is not a Tensor"),
        ([op("aten.sum.dim_IntList", t(0), [0.5], outputs=(1,))], "argument 'dim' is no"),
        ([op("aten.bernoulli_.float", t(0), 0.5, outputs=(0,), generator=1)], "argument 'generator' is no"),
        ([op("aten.relu_.default", t(0), outputs=(1,))], "its 'writes' do not list"),
    ],
)
def test_argument_that_the_schema_does_not_have_is_refused(ops: list[Op], problem: str) -> None:
    with pytest.raises(OperatorError, match=problem):
        run(trace_of(ops, [tensor(2), tensor(2, storage=1, init=None)]))


def test_new_tensor_needs_the_gpu_and_the_shape_that_the_trace_declares() -> None:
    tensors = [tensor(2, init=None)]
    gpu = {"device": "cuda"}
    run(trace_of([op("aten.zeros.default", [2], outputs=(0,), device=gpu)], tensors))
    with pytest.raises(OperatorError, match="no device is given"):
        run(trace_of([op("aten.zeros.default", [2], outputs=(0,))], tensors))
    with pytest.raises(OperatorError, match="another shape"):
        run(trace_of([op("aten.zeros.default", [2**33], outputs=(0,), device=gpu)], tensors))


ENCODED = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.dictionaries(
        st.sampled_from(["tensor", "float", "dtype", "device", "layout", "x"]), st.text() | st.integers(0, 1)
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=2),
    max_leaves=6,
)
SAMPLE = (
    "aten.add.Tensor",
    "aten.relu.default",
    "aten.sum.dim_IntList",
    "aten.cat.default",
    "aten.view.default",
    "aten.as_strided.default",
    "aten.expand.default",
    "aten.split.Tensor",
    "aten.unbind.int",
    "aten._foreach_add_.List",
    "aten.zeros.default",
    "aten.index.Tensor",
    "aten.gelu.default",
)


@given(
    st.sampled_from(SAMPLE), st.lists(ENCODED, max_size=4), st.dictionaries(st.text(max_size=6), ENCODED, max_size=2)
)
@settings(max_examples=300, deadline=None)
def test_any_arguments_give_an_error_of_gpusim_or_tensors_within_their_memory(
    target: str, args: list[Any], kwargs: dict[str, Any]
) -> None:
    tensors = [tensor(2, 2), tensor(2, 2, storage=1, init=None)]
    made = Op(name="op", target=target, args=tuple(args), kwargs=kwargs, outputs=(1,), writes=(1,))
    try:
        runner = run(trace_of([made], tensors))
    except GpusimError:
        return
    assert all(type(found) is torch.Tensor and lies_in_storage(found) for found in runner.tensors if found is not None)


# --- Memory ---


def test_view_beyond_its_storage_is_refused_by_torch_and_by_replay() -> None:
    wide = tensor(1000, storage=0, init=None)
    made = op("aten.as_strided.default", t(0), [1000], [1], outputs=(1,))
    with pytest.raises(ReplayError, match="out of bounds for storage"):
        run(trace_of([made], [tensor(4), wide], storage_bytes=16))
    runner = Runner(trace_of([made], [tensor(4), wide], storage_bytes=16), CPU)
    beyond = torch.ops.aten._reshape_alias.default(torch.zeros(4), [1000], [1])
    with pytest.raises(ReplayError, match=r"returned a tensor of shape \[1000\] that reaches beyond its memory"):
        runner.store(0, beyond)


@pytest.mark.parametrize(("result", "kind"), [(3, "int"), (print, "builtin"), ("x", "str"), ({}, "dict")])
def test_result_that_is_no_tensor_is_not_stored(result: object, kind: str) -> None:
    runner = on_cpu("outputs", "infer").rerun()
    with pytest.raises(ReplayError, match=f"returned a {kind}"):
        runner.store(0, result)


def test_result_of_another_shape_type_or_memory_than_declared_is_refused() -> None:
    made = op("aten.relu.default", t(0), outputs=(1,))
    for declared in (tensor(3, storage=1, init=None), tensor(2, dtype="int64", storage=1, init=None)):
        words = r"it makes a tensor of shape|returned a float32 of shape"
        with pytest.raises((OperatorError, ReplayError), match=words):
            run(trace_of([made], [tensor(2), declared]))
        runner = run(trace_of([made], [tensor(2), tensor(2, storage=1, init=None)]))
        runner.trace = trace_of([made], [tensor(2), declared])
        with pytest.raises(ReplayError, match="returned a float32 of shape"):
            runner.store(0, torch.zeros(2))
    view = op("aten.view.default", t(0), [2], outputs=(1,))
    with pytest.raises(ReplayError, match="in the memory of tensor 0, and its trace does not say so"):
        run(trace_of([view], [tensor(2), tensor(2, storage=1, init=None)]))


def test_change_of_a_tensors_shape_in_place_leaves_the_tensor_under_its_id() -> None:
    made = op("aten.as_strided_.default", t(0), [1], [1], outputs=(1,), writes=(0, 1))
    runner = run(trace_of([made], [tensor(4), tensor(1, init=None)]))
    assert [tuple(found.shape) for found in runner.tensors if found is not None] == [(4,), (1,)]


def test_tensor_that_no_op_made_is_one_line() -> None:
    liar = op("aten.relu_.default", t(0), outputs=(0,), writes=(0, 1))
    user = op("aten.relu.default", t(1), outputs=(2,))
    tensors = [tensor(2), tensor(2, storage=1, init=None), tensor(2, storage=2, init=None)]
    with pytest.raises(ReplayError, match="tensor 1 is missing"):
        run(trace_of([liar, user], tensors))


def test_initial_tensor_beyond_its_storage_and_of_unknown_dtype_are_refused() -> None:
    made = [op("aten.relu.default", t(0), outputs=(1,))]
    wrong = trace_of(made, [tensor(1000), tensor(1000, storage=1, init=None)], storage_bytes=8)
    with pytest.raises(ReplayError, match=r"reaches beyond its storage|cannot be filled"):
        make_initial(wrong, CPU, seed=0)
    with pytest.raises(ReplayError, match="unknown dtype 'load'"):
        make_initial(trace_of(made, [tensor(1, dtype="load")]), CPU, seed=0)


# --- What a forward saved ---


def pooled() -> tuple[list[Op], list[Tensor]]:
    """Make a max pool and its backward, as captured."""
    image, small = (1, 1, 4, 4), (1, 1, 2, 2)
    tensors = [
        tensor(*image),
        tensor(*small, storage=1, init=None),
        tensor(*small, dtype="int64", storage=2, init=None),
        tensor(*image, storage=3, init=None),
        tensor(*small, dtype="int64", storage=4),
    ]
    window = ([2, 2], [2, 2], [0, 0], [1, 1], False)
    forward = op("aten.max_pool2d_with_indices.default", t(0), *window, outputs=(1, 2))
    backward = op("aten.max_pool2d_with_indices_backward.default", t(1), t(0), *window, t(2), outputs=(3,))
    return [forward, backward], tensors


def test_places_of_maxima_are_those_that_the_forward_saved_unchanged() -> None:
    (forward, backward), tensors = pooled()
    run(trace_of([forward, backward], tensors))
    other = msgspec.structs.replace(backward, args=(*backward.args[:-1], t(4)))
    with pytest.raises(OperatorError, match=r"saved tensors are not those of a 'aten\.max_pool2d_with_indices"):
        check_operators(trace_of([forward, other], tensors), "t")
    change = op("aten.fill_.Scalar", t(2), 2**40, outputs=(None,), writes=(2,))
    with pytest.raises(OperatorError, match="has changed since"):
        check_operators(trace_of([forward, change, backward], tensors), "t")
    by_name = msgspec.structs.replace(backward, args=backward.args[:-1], kwargs={"indices": t(4)})
    with pytest.raises(OperatorError, match="it lacks arguments"):
        check_operators(trace_of([forward, by_name], tensors), "t")


def test_gradient_has_the_shape_of_the_result_and_the_samples_of_the_image() -> None:
    (forward, backward), tensors = pooled()
    wrong = msgspec.structs.replace(backward, args=(t(0), *backward.args[1:]))
    with pytest.raises(OperatorError, match="the gradient has another shape than the result"):
        check_operators(trace_of([forward, wrong], tensors), "t")
    images = [tensor(1, 1, 2, 2), tensor(8, 1, 4, 4, storage=1), tensor(8, 1, 4, 4, storage=2, init=None)]
    adaptive = op("aten._adaptive_avg_pool2d_backward.default", t(0), t(1), outputs=(2,))
    with pytest.raises(OperatorError, match="other samples or channels"):
        check_operators(trace_of([adaptive], images), "t")


def test_batch_norm_has_one_number_for_each_channel() -> None:
    tensors = [tensor(2, 64, 4, 4), tensor(1, storage=1), *(tensor(1, storage=2 + i, init=None) for i in range(3))]
    made = op("aten.native_batch_norm.default", t(0), t(1), None, None, None, True, 0.1, 1e-5, outputs=(2, 3, 4))
    with pytest.raises(OperatorError, match="argument 1 does not have one number per channel"):
        check_operators(trace_of([made], tensors, 2**14), "t")


def test_group_norm_has_the_numbers_of_its_image() -> None:
    tensors = [tensor(2, 4, 2, 2), *(tensor(1, storage=1 + i, init=None) for i in range(3))]
    made = op("aten.native_group_norm.default", t(0), None, None, 2**20, 4, 4, 2, 1e-5, outputs=(1, 2, 3))
    with pytest.raises(OperatorError, match="are not those of the image"):
        check_operators(trace_of([made], tensors), "t")


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        (
            op("aten._log_softmax_backward_data.default", t(0), t(1), 1, {"dtype": "float32"}, outputs=(2,)),
            "the result",
        ),
        (op("aten._softmax_backward_data.default", t(0), t(1), 1, {"dtype": "float32"}, outputs=(2,)), "the result"),
        (op("aten.unfold_backward.default", t(1), [3, 4], 0, 4, 1, outputs=(2,)), "the windows"),
        (op("aten._upsample_bicubic2d_aa.default", t(3), [4, 8], False, None, 1.0, outputs=(2,)), "its scales"),
    ],
    ids=lambda each: each.target if isinstance(each, Op) else "",
)
def test_sizes_that_torch_does_not_check_are_checked(made: Op, problem: str) -> None:
    """With each of these, torch 2.13 reads beyond a tensor on the CPU."""
    tensors = [tensor(3, 1), tensor(1, storage=1), tensor(3, 1, storage=2, init=None), tensor(3, 3, 1, 6, storage=3)]
    with pytest.raises(OperatorError, match=problem):
        check_operators(trace_of([made], tensors), "t")


def test_sizes_that_fit_are_taken() -> None:
    tensors = [tensor(2, 3), tensor(2, 3, storage=1), tensor(2, 3, storage=2, init=None)]
    run(
        trace_of(
            [op("aten._softmax_backward_data.default", t(0), t(1), 1, {"dtype": "float32"}, outputs=(2,))], tensors
        )
    )
    windows = [tensor(2, 2, 2), tensor(2, 4, storage=1, init=None)]
    run(trace_of([op("aten.unfold_backward.default", t(0), [2, 4], 1, 2, 2, outputs=(1,))], windows))
    images = [tensor(1, 1, 4, 4), tensor(1, 1, 8, 8, storage=1, init=None)]
    run(trace_of([op("aten._upsample_bicubic2d_aa.default", t(0), [8, 8], False, 2.0, 2.0, outputs=(1,))], images))


@pytest.mark.parametrize(
    ("lists", "problem"),
    [
        (([t(0)], [t(1)], [t(2)]), "hold tensors of other shapes"),
        (([t(0)], [t(2)], []), "not of one length"),
        (([t(0), t(2)], [t(2)], [t(2)]), "not of one length"),
    ],
)
def test_lists_of_an_optimizers_kernel_fit_each_other(lists: tuple[list[Any], ...], problem: str) -> None:
    tensors = [tensor(8), tensor(1, storage=1), tensor(8, storage=2)]
    words = {"weight_decay": 0.0, "momentum": 0.9, "lr": 0.1, "dampening": 0.0}
    flags = {"nesterov": False, "maximize": False, "is_first_step": False}
    made = op("aten._fused_sgd_.default", *lists, writes=(0, 1, 2), **words, **flags)
    with pytest.raises(OperatorError, match=problem):
        check_operators(trace_of([made], tensors), "t")


def test_split_into_more_parts_than_the_trace_has_is_refused_before_the_call() -> None:
    huge = Tensor(shape=(2**40,), stride=(0,), dtype="float32", storage=0, role="input", init=ONES)
    for made in (op("aten.split.Tensor", t(0), 1, outputs=(0,)), op("aten.unbind.int", t(0), outputs=(0,))):
        with pytest.raises(OperatorError, match="results, the trace 1"):
            check_operators(trace_of([made], [huge]), "t")


def test_variant_of_an_optimizers_step_fits_too() -> None:
    """A variant runs the three ops in torch's own kernel, which trusts the sizes."""
    tensors = [tensor(8), tensor(1, storage=1), tensor(8, storage=2)]
    variant = Variant(
        name="fused_sgd", settings=VariantSettings(composition="fused"), kernels=(kernel(1000),), covers=(0, 1)
    )
    momenta, gradients, parameters = [t(0)], [t(1)], [t(2)]
    ops = [
        op("aten._foreach_mul_.Scalar", momenta, 0.9, writes=(0,)),
        op("aten._foreach_add_.List", momenta, gradients, writes=(0,)),
        op("aten._foreach_add_.List", parameters, momenta, writes=(2,), alpha=-0.1),
    ]
    ops[2] = msgspec.structs.replace(ops[2], variants=(variant,))
    with pytest.raises(OperatorError, match="variant 'fused_sgd': its lists hold tensors of other shapes"):
        check_operators(trace_of(ops, tensors), "t")
    check_operators(trace_of(ops, [tensors[0], tensor(8, storage=1), tensors[2]]), "t")


# --- Code that a file brings along ---


def recipe_with_code(folder: Path) -> tuple[Path, Path]:
    """Make a recipe that names a file, and the mark that importing the file would leave."""
    left = folder / "imported"
    code = folder / "model.py"
    code.write_text(f"open({str(left)!r}, 'w').close()\n")
    path = folder / "r.toml"
    path.write_text(f'name = "r"\n[[case]]\nspec = "{code}:f"\nmode = "infer"\nbatch = 1\n')
    return path, left


def test_recipe_that_names_a_python_file_is_refused_and_the_file_is_not_imported(tmp_path: Path) -> None:
    path, left = recipe_with_code(tmp_path)
    done = CliRunner().invoke(cli, ["validate", str(path), "-o", str(tmp_path)])
    assert isinstance(done.exception, TrustError)
    assert str(path) in str(done.exception)
    assert "$.case[0].spec" in str(done.exception)
    assert "add --trust-code (trust_code=True in Python)" in str(done.exception)
    with pytest.raises(TrustError):
        run_recipe(read_recipe(path), tmp_path, "c", lambda _: None)
    assert not left.exists()
    check_recipe(read_recipe(path), str(path), trust_code=True)


def test_recipe_with_a_hostile_trace_is_refused_before_the_gpu_is_looked_for(tmp_path: Path) -> None:
    trace = tmp_path / "t.json"
    write_trace(chain_trace(2), trace)
    path = tmp_path / "r.toml"
    path.write_text(f'name = "r"\n[[case]]\ntrace = "{trace}"\n')
    with pytest.raises(OperatorError, match=r"t\.json: \$\.ops\[0\]\.target"):
        check_recipe(read_recipe(path), str(path), trust_code=True)


def test_trace_of_the_inductor_front_end_runs_only_if_it_is_trusted(tmp_path: Path) -> None:
    trace = chain_trace(2)
    trace = msgspec.structs.replace(trace, model=msgspec.structs.replace(trace.model, frontend="inductor"))
    path = tmp_path / "t.json"
    write_trace(trace, path)
    hardware = load_hardware("h200")
    for refused in (
        lambda: replay(build_graph(trace, hardware), []),
        lambda: trial_ns(build_graph(trace, hardware), []),
    ):
        with pytest.raises(TrustError, match="front end 'inductor' runs the code in it"):
            refused()
    for words in (["replay", "--policy", "sequential", "--trace"], ["explore", "--measure", "1"]):
        assert isinstance(CliRunner().invoke(cli, [*words, str(path)]).exception, TrustError)
        trusted = CliRunner().invoke(cli, [words[0], "--trust-code", *words[1:], str(path)])
        assert isinstance(trusted.exception, GpuError | OperatorError)  # its operators are looked up on the GPU
