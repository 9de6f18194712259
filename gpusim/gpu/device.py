"""The current GPU and its software: presence, identity, clocks."""

from __future__ import annotations

import datetime
import functools
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch

from gpusim.errors import GpuError
from gpusim.formats.trace import Dtype, Gpu
from gpusim.units import format_bytes
from gpusim.version import code_version

Params = ParamSpec("Params")
Result = TypeVar("Result")


def require_gpu() -> torch.device:
    """Return the current CUDA device. Raises `GpuError` where there is none."""
    if not torch.cuda.is_available():
        raise GpuError(
            "no GPU: this command runs kernels on a CUDA GPU, and torch "
            f"{torch.__version__} sees none here (explore and simulate need no GPU)"
        )
    return torch.device("cuda", torch.cuda.current_device())


def is_another_gpu(device: torch.device, own: torch.device) -> bool:
    """Whether a device is of the same type as a step's `own`, but not the same one. None as index means the current."""
    return device.type == own.type and None not in (device.index, own.index) and device.index != own.index


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context within which a GPU is the current one: new streams and graphs are on that. No-op for a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def gpu_facts(busy: Callable[[], object] | None = None) -> Gpu:
    """Return name, driver, versions, and the clocks while the GPU runs `busy` repeatedly (0 where they cannot
    be read).
    """
    driver, sm_clock, mem_clock = _nvidia_smi(gpu_id()) if busy is None else _while_busy(busy)
    torch.cuda.synchronize()
    return Gpu(
        name=torch.cuda.get_device_name(),
        driver=driver,
        cuda=torch.version.cuda or "",
        torch=str(torch.__version__),
        cudnn=str(torch.backends.cudnn.version() or ""),
        sm_clock_mhz=sm_clock,
        mem_clock_mhz=mem_clock,
    )


def gpu_id() -> str:
    """Return the driver's identifier of the current GPU, as `nvidia-smi -L` shows it; empty if unknown."""
    if not torch.cuda.is_available():
        return ""
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    return "" if uuid is None else f"GPU-{uuid}"


def provenance(command: str, busy: Callable[[], object]) -> dict[str, Any]:
    """Return the head of a results document of `command`: GPU, date, versions, and the clock while `busy` runs."""
    gpu = gpu_facts(busy)
    return {
        "gpu": gpu.name,
        "gpu_id": gpu_id(),
        "date": datetime.datetime.now(tz=datetime.UTC).strftime("%Y-%m-%d"),
        "command": command,
        "versions": {"torch": gpu.torch, "cuda": gpu.cuda, "driver": gpu.driver, "cudnn": gpu.cudnn},
        "sm_clock_mhz": gpu.sm_clock_mhz,
        "gpusim": code_version(),
    }


def _while_busy(work: Callable[[], object]) -> tuple[str, int, int]:
    """Return what `nvidia-smi` says while the GPU runs `work` over and over: an idle GPU lowers its clocks."""
    with ThreadPoolExecutor(1) as reader:
        answer = reader.submit(_nvidia_smi, gpu_id())
        while not answer.done():
            work()
            torch.cuda.synchronize()
    return answer.result()


def _nvidia_smi(gpu: str) -> tuple[str, int, int]:
    """Return driver, SM clock and memory clock in MHz of a GPU; empty and 0 where they cannot be read.

    The GPU is named by its identifier: torch does not count GPUs that CUDA_VISIBLE_DEVICES hides, `nvidia-smi` does.
    """
    query = ["nvidia-smi", "--query-gpu=uuid,driver_version,clocks.sm,clocks.mem", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
        gpus = {name.strip(): values for name, *values in (line.split(",") for line in lines)}
        driver, sm_clock, mem_clock = gpus[gpu]
        return driver.strip(), int(sm_clock), int(mem_clock)
    except (OSError, subprocess.SubprocessError, ValueError, KeyError):
        return "", 0, 0


def set_precision(dtype: Dtype) -> None:
    """Switch TF32 on or off for a trace's dtype, and keep cuDNN to its heuristics (no autotuning)."""
    allow = dtype == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = allow
    torch.backends.cudnn.allow_tf32 = allow
    torch.backends.cudnn.benchmark = False


@contextmanager
def precision(dtype: Dtype) -> Iterator[None]:
    """Apply `set_precision` within this context."""
    before = (
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.benchmark,
    )
    set_precision(dtype)
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before[0]
        torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = before[1:]


@contextmanager
def without_autocast(device: torch.device) -> Iterator[None]:
    """Switch autocast off within this context.

    Within a `torch.autocast(enabled=False)`, one of the user's would not be the outermost: torch then keeps the weights
    that it has cast when it ends, and a later step would take these.
    """
    before = torch.is_autocast_enabled(device.type)
    torch.set_autocast_enabled(device.type, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device.type, before)


def torch_dtype(dtype: Dtype) -> torch.dtype:
    """Return the element type of parameters and activations."""
    return torch.bfloat16 if dtype == "bf16" else torch.float32


def explain_out_of_memory(function: Callable[Params, Result]) -> Callable[Params, Result]:
    """Turn torch's out-of-memory error into a one-line `GpuError` with the memory used and free."""

    @functools.wraps(function)
    def wrapped(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            cause = _out_of_memory(error)
            if cause is None:
                raise
            free, total = torch.cuda.mem_get_info()
            used = torch.cuda.max_memory_allocated()
            raise GpuError(
                f"GPU out of memory: at most {format_bytes(used)} were in use by this step, {format_bytes(free)} of "
                f"{format_bytes(total)} are free; try a smaller batch or fewer streams ({str(cause).split('.')[0]})"
            ) from cause

    return wrapped


def _out_of_memory(error: BaseException | None) -> torch.cuda.OutOfMemoryError | None:
    """Return the out-of-memory error in an error's chain, or None. Ending a failed capture raises another error over
    it.
    """
    while error is not None and not isinstance(error, torch.cuda.OutOfMemoryError):
        error = error.__cause__ or error.__context__
    return error
