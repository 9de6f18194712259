"""Supported versions of torch and their differences: the only module that checks the version.

The interface uses private parts of Inductor. `tests/gpu/test_inductor.py` tests it on the installed version: 2.13 ran
on CPUs, 2.11 on GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from gpusim.errors import CaptureError

SUPPORTED: Final = ("2.11", "2.13")

#: Settings of Inductor for a capture, on every version: no cache may replace the compiler, no buffer may be reused
#: (that would order independent kernels), and nothing may stand between the kernels.
_SETTINGS: Final[dict[str, Any]] = {
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
    "allow_buffer_reuse": False,
    "inplace_buffers": False,
    "memory_planning": False,
    "graph_partition": False,
    "size_asserts": False,
    "nan_asserts": False,
    "alignment_asserts": False,
    "cpp_wrapper": False,
    "fx_wrapper": False,
    "generate_intermediate_hooks": False,
    "profile_bandwidth": False,
    "triton.cudagraphs": False,
    "triton.unique_kernel_names": True,
    "triton.multi_kernel": 0,
    "triton.autotune_at_compile_time": False,
    # Its second half is PyTorch statements between kernels, unknown to the scheduler.
    "triton.mix_order_reduction": False,
}


def series() -> str:
    """Return the running torch's version as `2.13`."""
    return ".".join(str(torch.__version__).split("+")[0].split(".")[:2])


def require_supported() -> None:
    """Raise `CaptureError` for a torch whose Inductor is not supported."""
    if series() not in SUPPORTED:
        known = " and ".join(SUPPORTED)
        raise CaptureError(f"the front end 'inductor' knows torch {known}; this is {torch.__version__}: use 'aten'")


def settings(**more: Any) -> dict[str, Any]:
    """Return Inductor's settings for a capture, as `torch._inductor.config.patch` takes them."""
    return {**_SETTINGS, **more}


@contextmanager
def wrapper_of(device: str, wrapper: Any) -> Iterator[None]:
    """Let Inductor write its wrapper for `device` ("cuda", "cpu") with the class `wrapper` within this context."""
    from torch._inductor.codegen import common

    common.init_backend_registration()
    before = common.device_codegens[device]
    common.device_codegens[device] = common.DeviceCodegen(
        before.scheduling, wrapper, before.cpp_wrapper_codegen, before.fx_wrapper_codegen
    )
    try:
        yield
    finally:
        common.device_codegens[device] = before


@contextmanager
def no_early_compiling() -> Iterator[None]:
    """Keep torch from compiling each Triton kernel as soon as it is written: kernels of ours get another name first."""
    from torch._inductor.codegen import triton

    before = getattr(triton, "async_compile", None)
    if before is None or isinstance(before, _Idle):  # by another thread, which puts it back
        yield
        return
    triton.async_compile = _Idle()
    try:
        yield
    finally:
        triton.async_compile = before


@contextmanager
def dtype_rules_made_once() -> Iterator[None]:
    """Keep torch from making the rules of its one `DtypePropagationOpsHandler` again at each of thousands of uses,
    unless there are new rules: 4 % of lowering.
    """
    from torch._inductor import dtype_propagation, utils

    kind: Any = dtype_propagation.DtypePropagationOpsHandler
    rules = utils.op_dtype_propagation_rules
    if kind() is not kind():
        yield
        return
    original, made = kind.__init__, len(rules)

    def init(self: Any) -> None:
        nonlocal made
        if len(rules) != made:
            original(self)
            made = len(rules)

    kind.__init__ = init
    try:
        yield
    finally:
        kind.__init__ = original


class _Idle:
    """Stand-in for torch's compiler of kernels, which `define_kernel` asks whether it is ready."""

    def use_process_pool(self) -> bool:
        """Say that no process is ready."""
        return False


def signature_of(line: Any) -> list[str] | None:
    """Return the names of a Triton kernel's arguments in the order of its call, or None where the line lacks them."""
    meta = line.triton_meta or {}
    signature = meta.get("signature")
    if not isinstance(signature, dict):
        return None
    names = list(signature)
    called, rest = names[: len(line.call_args)], names[len(line.call_args) :]
    # Block sizes come last and are not passed; a number that is 1 is a constant, too, and is passed.
    return called if all(signature[name] == "constexpr" for name in rest) else None
