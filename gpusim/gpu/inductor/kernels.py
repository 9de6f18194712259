"""Kernels compiled from their code, and the functions that an Inductor trace's ops call.

This module runs code from a trace: the caller has asked `gpusim.trace.trust` first, or has just captured.
"""

from __future__ import annotations

import gc
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import torch

from gpusim.errors import OperatorError
from gpusim.formats.trace import KERNEL, Source, Trace
from gpusim.gpu.inductor import versions
from gpusim.text import first_line

#: Inductor's own functions that are not operators: target of an op -> name among its `extern_kernels`.
OWN_FUNCTIONS: Final = {"inductor.bias_addmm": "bias_addmm", "inductor.mm_plus_mm": "_mm_plus_mm"}


#: Begin of the text of a kernel that torch's processes compile.
_IN_PROCESSES: Final = "async_compile.triton("
#: Extension of kernels' texts in torch's cache, and the form of its keys there.
_TEXT: Final = "gpusim"
_KEY: Final = re.compile(r"[a-z0-9]{20,100}")


def functions_of(trace: Trace, compiling: Compiling | None = None) -> list[Callable[..., Any]]:
    """Return the function of each op of an Inductor trace. Compiles the trace's code unless `compiling` does.

    Raises `OperatorError` for an operator that this torch lacks, and for code that does not compile.
    """
    versions.require_supported()
    kernels = (compiling or Compiling(trace.sources)).kernels()
    function_of: dict[str, Callable[..., Any]] = {}
    for index, op in enumerate(trace.ops):
        key = op.source or op.target
        if key not in function_of:
            function_of[key] = kernels[op.source] if op.target == KERNEL else _function(op.target, index, trace.name)
    return [function_of[op.source or op.target] for op in trace.ops]


def start_compiling(device: torch.device) -> None:
    """Start torch's processes that compile kernels for a GPU, since they take seconds to get ready."""
    if device.type == "cuda":
        from torch._inductor.async_compile import AsyncCompile

        AsyncCompile.use_process_pool()


def start_kernel(text: str) -> None:
    """Let torch's processes compile one kernel now, if they are ready; `Compiling` of the same text takes it over."""
    from torch._inductor.async_compile import AsyncCompile

    compiler = AsyncCompile()
    if _IN_PROCESSES in text and compiler.use_process_pool():
        with suppress(Exception):  # a head start only: `Compiling` meets the same error, and reports it
            eval(compile(text, "<kernel>", "eval"), {"async_compile": compiler})


def stop_compiling() -> None:
    """End torch's processes that compile, whatever they compile; later kernels get new ones.

    torch itself waits for them at the end of a process, up to minutes.
    """
    from torch._inductor import async_compile

    pools = async_compile.AsyncCompile.process_pool
    if pools.cache_info().currsize:
        process = getattr(pools(), "process", None)
        if isinstance(process, subprocess.Popen):
            process.kill()
            process.wait()
    async_compile.after_fork()


class Compiling:
    """Kernels that torch's processes compile concurrently. Raises as `kernels`."""

    def __init__(self, sources: Sequence[Source]) -> None:
        from torch._inductor.async_compile import AsyncCompile

        self._compiler = AsyncCompile()
        self._names = {source.sha256: f"kernel_{number}" for number, source in enumerate(sources)}
        self._scope: dict[str, Any] = {}
        with _refusals():
            # While torch's processes are not ready, which takes seconds, kernels are compiled here, one by one: those
            # of Triton's cache, as at a second start, are loaded long before that.
            for source in sources:
                code = compile(source.text, f"<kernel {source.sha256[:12]}>", "eval")
                self._scope[self._names[source.sha256]] = eval(code, {"async_compile": self._compiler})

    def kernels(self) -> dict[str, Callable[..., None]]:
        """Return hash -> a function that launches the kernel on the current stream, for its arguments in order.

        Waits until all are compiled. Raises `OperatorError` for code that does not compile.
        """
        with _refusals():
            self._compiler.wait(self._scope)
        return {sha256: _launcher(self._scope[name]) for sha256, name in self._names.items()}


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as cause:
        problem = first_line(cause)
        raise OperatorError(f"a kernel of the trace does not compile: {problem[:200]}") from cause


def _launcher(kernel: Any) -> Callable[..., None]:
    """Return a function that launches a kernel."""
    if getattr(kernel, "run", None) is None:
        return lambda *args: kernel(*args)
    return _TritonKernel(kernel)


class _TritonKernel:
    """Launcher of a Triton kernel on the stream that is current at the call."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __call__(self, *args: Any) -> None:
        device = torch.cuda.current_device()
        self.kernel.run(*args, stream=torch._C._cuda_getCurrentRawStream(device))


def store_text(text: str) -> str:
    """Write the text of a kernel into torch's cache on disk, and return its key there."""
    from torch._inductor.codecache import write

    key, _ = write(text, _TEXT)
    return str(key)


def stored_text(key: str) -> str | None:
    """Return a kernel's text from torch's cache, or None where it has none under this key."""
    from torch._inductor.codecache import get_path

    if not _KEY.fullmatch(key):
        return None
    try:
        return Path(get_path(key, _TEXT)[2]).read_text(encoding="utf-8")
    except (OSError, UnicodeError):
        return None


def loaded_code(functions: Iterable[Callable[..., Any]]) -> list[Any]:
    """Return objects to keep while a CUDA graph uses these kernels: torch unloads code without references.

    A kernel may get other code when it is tuned or loaded again; this is the current code.
    """
    kernels = {id(each): each.kernel for each in functions if isinstance(each, _TritonKernel)}
    return [_code(kernel) for kernel in kernels.values()]


def all_loaded_code() -> list[Any]:
    """Return the same for all kernels of torch.compile in this process, for a CUDA graph of a compiled function."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    return [_code(each) for each in gc.get_objects() if issubclass(type(each), CachingAutotuner)]


def _code(kernel: Any) -> list[Any]:
    return [kernel, *(list(getattr(kernel, part, ())) for part in ("launchers", "compile_results"))]


def _function(target: str, index: int, name: str) -> Callable[..., Any]:
    if target in OWN_FUNCTIONS:
        from torch._inductor.kernel import mm, mm_plus_mm  # noqa: F401  (they register their functions)
        from torch._inductor.select_algorithm import extern_kernels

        function: Callable[..., Any] = getattr(extern_kernels, OWN_FUNCTIONS[target])
        return function
    namespace, _, rest = target.partition(".")
    packet_name, _, overload = rest.partition(".")
    if namespace == "torchvision":
        import torchvision  # noqa: F401  (registers its operators)
    packet = getattr(getattr(torch.ops, namespace), packet_name, None)
    if isinstance(packet, torch._ops.OpOverloadPacket) and overload in packet.overloads():
        return getattr(packet, overload)
    raise OperatorError(f"{name}: $.ops[{index}].target: torch {torch.__version__} has no operator '{target[:80]}'")
