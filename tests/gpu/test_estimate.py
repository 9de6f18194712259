"""A step without a GPU run: recorded parts are exact, estimates are marked, and replay refuses it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

import gpusim
from gpusim.cli import main
from gpusim.errors import CaptureError, OperatorError
from gpusim.formats.hardware import load_hardware
from gpusim.formats.trace import Trace
from gpusim.gpu.capture.estimate import capture_estimated
from gpusim.gpu.capture.options import CaptureOptions
from gpusim.gpu.replay.allowlist import check_operators, not_listed
from gpusim.plan.estimated_kernels import CONSTANTS, SHAPES, work_of
from gpusim.trace.store import load_trace

NETWORKS = Path(__file__).parents[2] / "validate" / "networks"

DROPOUT = nn.functional.dropout

OWN_MODEL = """
import torch
from torch import nn


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, groups=1)
        self.apart = nn.Conv2d(16, 16, 3, groups=16)
        self.query = nn.Linear(16, 64)
        self.last = nn.Linear(16, 10)

    def forward(self, x):
        x = self.apart(self.first(x).relu()).flatten(2).mT
        q = self.query(x).view(x.shape[0], -1, 4, 16).transpose(1, 2)
        mask = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=x.device).tril()
        attended = nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        return self.last(attended.mean((1, 2)))


def make(batch):
    return Own(), torch.randn(batch, 3, 12, 12)


class Fused(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True)
        self.dropout, self.inplace = nn.Dropout(0.25), nn.Dropout(0.25, inplace=True)
        self.last = nn.Linear(16, 10)

    def forward(self, x):
        x = self.dropout(self.attention(x, x, x, need_weights=False)[0])
        x = torch.dropout(self.inplace(x * 2), 0.25, self.training)
        return self.last(nn.functional.dropout(x, 0.0, self.training).mean(1))


def fused(batch):
    return Fused(), torch.randn(batch, 8, 16)


class Looking(Own):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x.flatten(1)


def looking(batch):
    return Looking(), torch.randn(batch, 3, 12, 12)


class Recurrent(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.recurrent = layer

    def forward(self, x):
        return self.recurrent(x)[0]


def recurrent(kind):
    return lambda batch: (Recurrent(kind(8, 16)), torch.randn(5, batch, 8))


lstm, gru, rnn = recurrent(nn.LSTM), recurrent(nn.GRU), recurrent(nn.RNN)


def sparse(batch):
    return nn.EmbeddingBag(100, 8, sparse=True), torch.randint(0, 100, (batch, 3))
"""


def estimated(spec: str, mode: str = "train", batch: int = 2) -> Trace:
    options = CaptureOptions(spec=spec, mode=mode, batch=batch)  # type: ignore[arg-type]
    return capture_estimated(options, load_hardware("h200"), lambda _: None)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN_MODEL, encoding="utf-8")
    return path


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in this process: exit code, output, errors."""

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["gpusim", *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as exited:
            code = int(exited.code or 0)
        return code, *capsys.readouterr()

    return call


@pytest.mark.parametrize("name", ["transformer_small-infer-b1", "experts_small-infer-b2"])
def test_ops_and_memory_are_those_of_the_captured_step(name: str) -> None:
    captured = load_trace(name)
    file = captured.model.spec.rpartition("/")[2]
    trace = estimated(f"{NETWORKS / file}", captured.model.mode, captured.model.batch)
    assert [op.layer for op in trace.ops] == [op.layer for op in captured.ops]
    assert [storage.bytes for storage in trace.storages] == [storage.bytes for storage in captured.storages]
    assert gpusim.load(trace).graph.trace.provenance.estimated


def test_a_step_of_ones_own_is_explored_without_a_gpu(own: Path, tmp_path: Path, run: Run) -> None:
    trace = tmp_path / "own.json.gz"
    code, out, _ = run("capture", f"{own}:make", "--mode=train", "--batch=2", "--estimate", "-o", trace, "--json")
    assert code == 0
    document = json.loads(out)
    assert document["estimated"] == "tensor sizes and the data sheet of h200"
    assert document["eager"] is None
    code, out, err = run("explore", trace, "--streams", "2")
    assert code == 0
    assert "no GPU has run this step" in err
    assert "estimated, so 40% of its time is in doubt: capture the step on its GPU" in " ".join(out.split())
    assert "without a graph" not in out  # host times are unknown
    code, out, _ = run("memory", trace, "--policy", "checkpoint", "--json")
    assert code == 0
    assert json.loads(out)["estimated"] == document["estimated"]
    code, out, _ = run("doctor", trace)
    assert code == 1
    assert "estimated" in out


def test_attention_is_one_operator_forward_and_one_backward(own: Path) -> None:
    targets = [op.target for op in estimated(f"{own}:make").ops if "attention" in op.target]
    assert targets == [
        "aten._scaled_dot_product_efficient_attention.default",
        "aten._scaled_dot_product_efficient_attention_backward.default",
    ]


def test_attention_and_dropout_inside_of_torch_are_those_of_a_gpu(own: Path) -> None:
    trace = estimated(f"{own}:fused")
    targets = [op.target for op in trace.ops]
    assert targets.count("aten._scaled_dot_product_efficient_attention.default") == 1
    assert not any("softmax" in target for target in targets if "log" not in target)
    masks = [op.outputs[1] for op in trace.ops if op.target == "aten.native_dropout.default"]
    assert [trace.tensors[mask].dtype for mask in masks if mask is not None] == ["bool", "bool"]
    assert targets.count("aten.native_dropout_backward.default") == 2
    assert targets.count("aten.bernoulli_.float") == 1  # in place, and so on a GPU, too
    assert nn.functional.dropout is DROPOUT


def test_a_parameter_that_two_modules_share_is_one() -> None:
    trace = estimated(f"{Path(__file__).parents[1] / 'support' / 'networks.py'}:shared")
    names = {t.name for t in trace.tensors if t.role == "parameter"}
    assert {"body.weight", "body.bias"} <= names
    assert "tied.weight" not in names


def test_step_that_is_not_trained_drops_nothing(own: Path) -> None:
    assert not any("dropout" in op.target or "bernoulli" in op.target for op in estimated(f"{own}:fused", "infer").ops)


def test_replay_refuses_it(own: Path) -> None:
    with pytest.raises(OperatorError, match=r"own\.json: is estimated, .* capture the step"):
        check_operators(estimated(f"{own}:make"), "own.json")


def test_code_of_it_is_refused_by_the_option_and_its_file(own: Path, tmp_path: Path, run: Run) -> None:
    trace, code_file = tmp_path / "own.json.gz", tmp_path / "s.py"
    gpusim.load(estimated(f"{own}:make", "infer")).save(trace)
    code, _, err = run("export", trace, "--python", code_file, "--policy", "sequential")
    assert code == 2
    assert f"gpusim: --python {code_file}: {trace} is estimated, without the values" in err.splitlines()[-1]
    assert not code_file.exists()


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_a_step_that_looks_at_elements_is_refused_with_its_line(mode: str, own: Path) -> None:
    """In training the forward runs once before recording, and fails there: a tensor has no elements to look at."""
    line = 1 + OWN_MODEL.splitlines().index("        return super().forward(x) if x.sum() > 0 else x.flatten(1)")
    with pytest.raises(CaptureError, match=re.escape(f"{own}:{line}: the step reads the elements of a tensor")):
        estimated(f"{own}:looking", mode)


def test_what_no_line_of_the_user_makes_has_no_line(own: Path, tmp_path: Path, run: Run) -> None:
    """A gradient is made in torch, called from gpusim: a line of either is no place to look for the mistake."""
    code, _, errors = run(
        "capture", f"{own}:sparse", "--mode", "train", "--batch", "2", "--estimate", "-o", tmp_path / "t.json"
    )
    assert code == 2
    assert errors.splitlines()[-1].startswith("gpusim: the step makes a tensor of layout sparse_coo")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--variants", "--estimate"], "an estimate has neither"),
        (["--frontend", "inductor", "--estimate"], "an estimate has neither"),
        (["--counters", "--estimate"], "--counters"),
        (["--hw", "h200"], "--hw h200"),
        (["--estimate", "--hw", "no_such_gpu"], "no_such_gpu"),
    ],
)
def test_options_that_contradict_it_are_one_line(
    own: Path, tmp_path: Path, arguments: list[str], problem: str, run: Run
) -> None:
    trace = tmp_path / "own.json"
    code, _, err = run("capture", f"{own}:make", "--mode=infer", "--batch=1", "-o", trace, *arguments)
    assert code == 2
    assert problem in err.splitlines()[-1]
    assert not trace.exists()


def test_every_family_has_times_and_a_shape() -> None:
    assert CONSTANTS.keys() == SHAPES.keys()


def test_families_of_a_training_step() -> None:
    trace = load_trace("googlenet-train-b8")
    families = {work_of(trace, op).family for op in trace.ops if op.writes}
    assert {"convolution", "convolution, input gradient", "convolution, weight gradient"} <= families
    assert {"batch norm", "batch norm, backward", "pooling", "pooling, backward", "lists", "elementwise"} <= families


@pytest.mark.parametrize("mode", ["infer", "train"])
@pytest.mark.parametrize("name", ["lstm", "gru", "rnn"])
def test_recurrent_layer_is_refused_as_by_a_capture_since_no_gpu_runs_its_decomposition(
    name: str, mode: str, own: Path
) -> None:
    with pytest.raises(CaptureError) as caught:
        estimated(f"{own}:{name}", mode)
    line = OWN_MODEL.splitlines().index("        return self.recurrent(x)[0]") + 1
    assert str(caught.value) == f"{own}:{line}: {not_listed('aten._cudnn_rnn.default')}"
