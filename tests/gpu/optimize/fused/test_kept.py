"""Kernels of a step survive a second start and other uses of torch.compile in the process."""

from __future__ import annotations

import copy
import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (torch's own habit)

from gpusim.formats.trace import Source
from gpusim.gpu.inductor import kernels
from gpusim.gpu.inductor.seam import OWN
from gpusim.gpu.optimize import cache, choose
from gpusim.gpu.optimize.callable import OptimizedStep
from tests.support.fused_steps import (
    by_inductor,
    close,
)
from tests.support.optimizing import batches, eager_step, net


def entry(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    (path,) = (tmp_path / "cache").glob("*.json")
    return path, json.loads(path.read_bytes())


def test_the_cache_has_the_choice_and_no_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = batches(1)[0][0]
    first = by_inductor(net().eval(), x)
    path, document = entry(tmp_path)
    assert document["frontend"] == "inductor"
    assert "async_compile" not in path.read_text()
    monkeypatch.setattr(choose, "explore", lambda *_, **__: pytest.fail("searched again"))
    model = net(seed=4).eval()  # other weights, the same step
    second = by_inductor(model, x)
    assert second.gain.decided_by == "what was found before"
    assert (second.gain.streams, second.gain.policy) == (first.gain.streams, first.gain.policy)
    with torch.no_grad():
        close(second(x), model(x))


def of_training() -> tuple[Any, nn.Module]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return by_inductor(model, batches(1)[0], loss=F.cross_entropy, optimizer=optimizer), model


def test_the_second_start_does_not_ask_inductor_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training step, its kernels from torch's cache on disk: it goes on as eager does."""
    of_training()
    monkeypatch.setattr("gpusim.gpu.optimize.fused.own_step", lambda *_, **__: pytest.fail("compiled again"))
    step, model = of_training()
    assert step.gain.decided_by == "what was found before"
    other = copy.deepcopy(model)
    eager = eager_step(other, torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9))
    for x, y in batches(4):
        close(step(x, y), eager(x, y))
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        close(mine, theirs)


def test_a_folder_of_torchs_that_cannot_be_written_is_said_and_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: str) -> str:
        raise OSError("No space left on device")

    monkeypatch.setattr("gpusim.gpu.optimize.kept_step.store_text", full)
    lines: list[str] = []
    assert isinstance(by_inductor(net().eval(), batches(1)[0][0], say=lines.append), OptimizedStep)
    assert "not kept in the cache: No space left on device" in lines
    assert not list((tmp_path / "cache").glob("*.json"))


@pytest.mark.parametrize("kind", ["no text", "another text", "a key that leaves the folder", "a tensor too many"])
def test_kernels_that_torch_has_no_more_are_compiled_again(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = batches(1)[0][0]
    by_inductor(net().eval(), x)
    path, document = entry(tmp_path)
    sources = document["step"]["sources"]
    if kind == "no text":
        monkeypatch.setattr("gpusim.gpu.optimize.kept_step.stored_text", lambda _: None)
    elif kind == "another text":
        monkeypatch.setattr("gpusim.gpu.optimize.kept_step.stored_text", lambda _: "import os")
    elif kind == "a key that leaves the folder":
        document["step"]["sources"] = dict.fromkeys(sources, "../" * 9 + "etc/passwd")
    else:
        document["step"]["ops"][0]["reads"] = [10_000]
    path.write_text(json.dumps(document))
    lines: list[str] = []
    model = net(seed=4).eval()
    step = by_inductor(model, x, say=lines.append)
    assert any(line.startswith("compiled again: ") for line in lines)
    assert step.gain.decided_by == "what was found before"
    with torch.no_grad():
        close(step(x), model(x))


def test_an_entry_for_other_kernels_is_passed_over(tmp_path: Path) -> None:
    x = batches(1)[0][0]
    by_inductor(net().eval(), x)
    path, document = entry(tmp_path)
    path.write_text(json.dumps({**document, "kernels": "0" * 32}))
    lines: list[str] = []
    step = by_inductor(net().eval(), x, say=lines.append)
    assert any("is for other kernels than torch makes now" in line for line in lines)
    assert step.gain.decided_by != "what was found before"
    assert cache.folder() == tmp_path / "cache"


def test_a_later_torch_compile_takes_nothing_away() -> None:
    model = net().eval()
    x = batches(1)[0][0]
    step = by_inductor(model, x)
    with torch.no_grad():
        wanted = model(x)
        close(torch.compile(model)(x), wanted)
    torch._dynamo.reset()
    gc.collect()
    close(step(x), wanted)


def test_kernels_have_names_that_no_torch_compile_has() -> None:
    """torch returns one object per text, and a kernel's name is part of Triton's."""
    step = by_inductor(net().eval(), batches(1)[0][0])
    (variant,) = step._variants.values()
    names = [op.name for op in variant.captured.trace.ops if op.source]
    assert names
    assert all(name.endswith(OWN) for name in names)


def test_code_of_a_recorded_graph_is_held_as_it_was() -> None:
    """torch replaces a kernel's loaded code when it is tuned again, and unloads code without references."""

    class Kernel:
        def __init__(self) -> None:
            self.launchers, self.compile_results = [object()], [object()]

        def run(self, *_: Any, stream: int) -> None: ...

    kernel = Kernel()
    function = kernels._launcher(kernel)
    code = [*kernel.launchers, *kernel.compile_results]
    ((held, launchers, results),) = kernels.loaded_code([function, torch.ops.aten.relu.default, function])
    kernel.launchers, kernel.compile_results = [], []
    assert held is kernel
    assert [*launchers, *results] == code


def test_code_of_a_compiled_functions_graph_is_held_whoever_drops_the_kernel() -> None:
    """A second torch.compile of a model ended the first one's CUDA graph in an illegal access."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    kernel = object.__new__(CachingAutotuner)
    kernel.launchers = [object()]
    code = kernel.launchers[0]
    held = kernels.all_loaded_code()
    kernel.launchers = []
    assert [launchers for each, launchers, _ in held if each is kernel] == [[code]]


def test_kernels_do_not_wait_for_torchs_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """They need seconds to get ready, and a second start finds all kernels in Triton's cache."""
    from torch._inductor.async_compile import AsyncCompile

    made: list[str] = []
    monkeypatch.setattr(AsyncCompile, "wait_pool_ready", lambda *_: pytest.fail("waited"))
    monkeypatch.setattr(AsyncCompile, "triton", lambda _, name, text, **given: made.append(name) or max)
    text = "async_compile.triton('triton_gpusim', '''\n''', device_str='cuda')"
    found = kernels.Compiling([Source(sha256="1", text=text)]).kernels()
    assert (list(found), made) == (["1"], ["triton_gpusim"])
