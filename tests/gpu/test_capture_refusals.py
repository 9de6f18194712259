"""Refusals of capture, in one line each: steps that a trace cannot hold, failed checks, models that cannot load."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from gpusim.errors import CaptureError, GpuError, ReplayError, UnknownNameError
from gpusim.formats.trace import Mode, Op, TensorInit, Trace
from gpusim.gpu.capture import capture as capture_module
from gpusim.gpu.capture import users_errors
from gpusim.gpu.capture.capture import build_step, capture
from gpusim.gpu.capture.joint_graph import LEARNING_RATE, joint_graph
from gpusim.gpu.capture.models import AUXILIARY_WEIGHT, ModelStep, load_step
from gpusim.gpu.capture.options import CaptureOptions
from gpusim.gpu.capture.rebuild import check_against_model
from gpusim.gpu.capture.record import record
from gpusim.gpu.replay.execute import make_initial
from gpusim.trace.check import check_trace
from tests.support.helpers import with_kernels
from tests.support.networks import CPU, OnCpu, on_cpu, spec

MODES: tuple[Mode, ...] = ("infer", "train")


def one_line(error: pytest.ExceptionInfo[Any]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


# --- Steps that a trace cannot hold, and checks that fail loudly ---


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["reads_a_value", "masked"])
def test_step_that_depends_on_data_is_one_line(name: str, mode: Mode) -> None:
    step = load_step(spec(name), mode=mode, batch=2, dtype="fp32", memory_format="contiguous", device=CPU)
    with pytest.raises(CaptureError) as caught:
        record(joint_graph(step))
    assert "data" in one_line(caught)


def test_op_that_cannot_be_called_on_its_own_is_one_line() -> None:
    """Some operators are recorded with arguments that only their own caller may pass (mkldnn's LSTM on the CPU)."""
    graph = joint_graph(on_cpu("outputs").step)
    broken = dataclasses.replace(graph.calls[0], args=(*graph.calls[0].args, "one too many"))
    with pytest.raises(CaptureError) as caught:
        record(dataclasses.replace(graph, calls=(broken, *graph.calls[1:])))
    assert f"op '{broken.name}' ({broken.function}) cannot be called on its own: " in one_line(caught)


def tampered(found: OnCpu, change: Callable[[Op], Op | None]) -> Trace:
    """Replace the first op that `change` accepts in the trace."""
    ops = list(found.trace.ops)
    for index, op in enumerate(ops):
        new = change(op)
        if new is not None:
            ops[index] = new
            return msgspec.structs.replace(found.trace, ops=tuple(ops))
    raise AssertionError("nothing to tamper with")


def replace_argument(phase: str, old: object, new: object) -> Callable[[Op], Op | None]:
    def change(op: Op) -> Op | None:
        if op.phase != phase or old not in (*op.args, *op.kwargs.values()):
            return None
        args = tuple(new if arg == old else arg for arg in op.args)
        kwargs = {key: new if arg == old else arg for key, arg in op.kwargs.items()}
        return msgspec.structs.replace(op, args=args, kwargs=kwargs)

    return change


@pytest.mark.parametrize(
    ("phase", "old", "new", "complaint"),
    [
        ("forward", 0.5, 0.6, "outputs differ from the model's own by"),
        ("backward", AUXILIARY_WEIGHT, 0.5, "gradients differ from the model's own by"),
        ("optimizer", -LEARNING_RATE, -100.0, "the rebuilt step leaves '"),
        ("forward", 0.5, {"float": "nan"}, "outputs differ from the model's own by more than any limit (not finite,"),
    ],
)
def test_trace_that_computes_something_else_is_refused(phase: str, old: float, new: object, complaint: str) -> None:
    found = on_cpu("outputs")
    wrong = tampered(found, replace_argument(phase, old, new))
    with pytest.raises(CaptureError) as caught:
        check_against_model(wrong, found.step, found.graph, found.recorded, found.options, CPU)
    assert complaint in one_line(caught)


def test_missing_gradient_is_refused() -> None:
    found = on_cpu("outputs")
    recorded = copy.copy(found.recorded)
    recorded.gradients = recorded.gradients[1:]
    with pytest.raises(CaptureError, match=r"has 5 gradients, the model's own 6"):
        check_against_model(found.trace, found.step, found.graph, recorded, found.options, CPU)


@pytest.mark.parametrize("version", ["2.10.1", "2.12.0+cu130", "3.0.0"])
def test_front_end_of_an_unknown_torch_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(capture_module, "require_gpu", lambda: CPU)
    monkeypatch.setattr(torch, "__version__", version)
    options = CaptureOptions(spec=spec("outputs"), mode="infer", batch=1, frontend="inductor")
    with pytest.raises(CaptureError) as refused:
        capture(options)
    assert str(refused.value) == f"the front end 'inductor' knows torch 2.11 and 2.13; this is {version}: use 'aten'"


def test_variants_of_fused_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_module, "require_gpu", lambda: CPU)
    options = CaptureOptions(spec=spec("outputs"), mode="infer", batch=1, frontend="inductor", variants=True)
    with pytest.raises(CaptureError, match="variants are measured with the front end 'aten' only"):
        capture(options)


def test_style_of_another_front_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_module, "require_gpu", lambda: CPU)
    options = CaptureOptions(spec=spec("outputs"), mode="infer", batch=1, style="apart")
    with pytest.raises(CaptureError, match="style 'apart' is one of the front end 'inductor'"):
        capture(options)
    with pytest.raises(UnknownNameError, match=r"unknown style 'appart'.*apart"):
        capture(dataclasses.replace(options, frontend="inductor", style="appart"))


# --- SPEC ---


def load(text: str, mode: Mode = "infer") -> ModelStep:
    return load_step(text, mode=mode, batch=2, dtype="fp32", memory_format="contiguous", device=CPU)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("googlenet", "give torchvision:NAME, timm:NAME or path/to/file.py:function"),
        ("torchvision:", "give torchvision:NAME, timm:NAME or path/to/file.py:function"),
        ("http://x.org/m.py", "give torchvision:NAME, timm:NAME or path/to/file.py:function"),
        ("nowhere/model.py:make", "nowhere/model.py: no such file"),
        (spec("wrong_return"), "must return (module, inputs) or (module, inputs, loss function)"),
    ],
)
def test_wrong_spec_is_one_line(text: str, complaint: str) -> None:
    with pytest.raises(CaptureError) as caught:
        load(text)
    assert complaint in one_line(caught)


def test_file_named_like_a_module_does_not_take_its_place(tmp_path: Path) -> None:
    path = tmp_path / "json.py"
    path.write_text("import torch\ndef make(batch):\n    return torch.nn.Linear(4, 3), torch.randn(batch, 4)\n")
    load(f"{path}:make")
    assert sys.modules["json"].__file__ != str(path)


def test_missing_function_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'branches'") as caught:
        load(spec("brunches"))
    one_line(caught)


def test_training_of_a_model_without_parameters_is_refused() -> None:
    load(spec("untrainable"), "infer")
    with pytest.raises(CaptureError, match="has no trainable parameter; capture it in mode infer"):
        load(spec("untrainable"), "train")


@pytest.mark.parametrize("package", ["torchvision", "timm"])
def test_missing_model_library_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (package, "torchvision.models"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(GpuError, match=f"{package} is not installed") as caught:
        load(f"{package}:resnet18")
    one_line(caught)


def test_model_whose_forward_fails_is_one_line(tmp_path: Path) -> None:
    """In training the forward runs once before recording, to find the number of classes."""
    path = tmp_path / "broken.py"
    path.write_text("import torch\ndef make(batch):\n    return torch.nn.Linear(4, 3), torch.randn(batch, 5)\n")
    for mode in MODES:
        with pytest.raises(CaptureError, match="mat1 and mat2 shapes cannot be multiplied") as caught:
            joint_graph(load(f"{path}:make", mode))
        one_line(caught)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        ("torch.jit.script(torch.nn.Linear(4, 3))", "has a module of torch.jit; return the module that it was made"),
        ("torch.nn.DataParallel(torch.nn.Linear(4, 3))", "has a module of DataParallel"),
        ("torch.nn.Sequential(torch.nn.LazyLinear(3))", "has a lazy module"),
        ("torch.nn.Sequential(torch.nn.LazyBatchNorm1d())", "has a lazy module"),
    ],
)
def test_module_without_parameters_to_replace_is_one_line(
    model: str, complaint: str, mode: Mode, tmp_path: Path
) -> None:
    path = tmp_path / "odd.py"
    path.write_text(f"import torch\ndef make(batch):\n    return {model}, torch.randn(batch, 4)\n")
    with pytest.raises(CaptureError, match=complaint) as caught:
        load(f"{path}:make", mode)
    one_line(caught)


# --- Initial states that cannot be made ---


def broken_initial_states(trace: Trace) -> dict[str, Trace]:
    """Return valid traces whose initial state cannot be made."""
    replace = msgspec.structs.replace
    first = next(i for i, t in enumerate(trace.tensors) if t.init is not None and t.shape == (8, 6))

    def tensor(init: TensorInit) -> Trace:
        tensors = list(trace.tensors)
        tensors[first] = replace(tensors[first], init=init)
        return replace(trace, tensors=tuple(tensors))

    return {
        "odd size": replace(trace, storages=tuple(replace(s, bytes=s.bytes + 1) for s in trace.storages)),
        "huge": replace(trace, storages=tuple(replace(s, bytes=2**60) for s in trace.storages)),
        "too few values": tensor(TensorInit(kind="values", values=(1.0,))),
        "no integers": tensor(TensorInit(kind="integers", a=5, b=1)),
        "large integers": tensor(TensorInit(kind="integers", a=1e300, b=1e301)),
        "negative spread": tensor(TensorInit(kind="normal", b=-1.0)),
        "empty range": tensor(TensorInit(kind="uniform", a=3, b=1)),
    }


@pytest.mark.parametrize(
    "case",
    ["odd size", "huge", "too few values", "no integers", "large integers", "negative spread", "empty range"],
)
def test_initial_state_that_cannot_be_made_is_one_line(case: str) -> None:
    trace = broken_initial_states(with_kernels(on_cpu("outputs").trace))[case]
    check_trace(trace, case)  # the file itself is in order
    with pytest.raises(
        ReplayError, match=r"tensor \d+ of 'outputs-train-b2-fp32' cannot be filled as its trace says: "
    ):
        make_initial(trace, CPU, seed=0)


# --- Mistakes in the user's own file ---


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def net(batch:\n", "SyntaxError"),
        ("import no_such_module_at_all\n", "ModuleNotFoundError"),
        ("def net(batch):\n    return 1 / 0\n", "2: ZeroDivisionError"),
        ("def net():\n    pass\n", "TypeError"),
        ("import json\ndef net(batch):\n    json.loads('[')\n", "3: JSONDecodeError"),
        ("import sys\nsys.exit(3)\n", "2: SystemExit: 3"),
        ("raise ValueError('one\\ntwo')\n", "1: ValueError: one"),
        ("raise ValueError('\\none')\n", "1: ValueError: one"),
    ],
)
def test_mistake_in_the_users_own_file_is_one_line_with_its_place(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(CaptureError) as caught:
        build_step(CaptureOptions(spec=f"{path}:net", mode="infer", batch=1), torch.device("cpu"))
    assert str(caught.value).startswith(str(path))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("1 / 0", "ZeroDivisionError: "),
        ("{}['a']", "KeyError: 'a'"),
        ("sys.exit(3)", "SystemExit: 3"),
        ("x @ x.new_ones(9, 9)", "RuntimeError: "),
    ],
)
def test_mistake_while_the_step_runs_is_one_line_with_its_place(line: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "import sys\nimport torch\nclass Net(torch.nn.Module):\n    def forward(self, x):\n"
        f"        return {line}\ndef net(batch):\n    return Net(), torch.ones(batch, 3)\n"
    )
    step = build_step(CaptureOptions(spec=f"{path}:net", mode="infer", batch=2), torch.device("cpu"))
    with pytest.raises(CaptureError) as caught:
        joint_graph(step)
    assert str(caught.value).startswith(f"{path}:5: the step of 'net' cannot be recorded: {says}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("error", "raised"), [("KeyError", KeyError), ("IndexError", CaptureError)])
def test_key_that_gpusim_lacks_is_no_error_of_the_user(error: str, raised: type[Exception]) -> None:
    line = compile(f"raise {error}('a')", f"{users_errors.GPUSIM}ours.py", "exec")
    with pytest.raises(raised), users_errors.users_code("the step fails"):
        exec(line)
