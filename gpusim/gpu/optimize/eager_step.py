"""The user's own step, run several times: its time, and whether a captured one would do the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from gpusim.errors import CaptureError, GpusimError, StepError
from gpusim.formats.trace import Dtype
from gpusim.gpu.capture.user_step import UserStep
from gpusim.gpu.capture.users_errors import users_code
from gpusim.gpu.optimize.optimizers import with_steps
from gpusim.gpu.optimize.progress import Progress
from gpusim.gpu.optimize.python_state import ModuleState, PythonState, host_draws
from gpusim.gpu.optimize.reads import Reads
from gpusim.gpu.optimize.snapshot import Snapshot, put_back
from gpusim.gpu.optimize.verify import apart, results_of_step
from gpusim.gpu.reach.search import Reach
from gpusim.gpu.reach.series import SeriesOf
from gpusim.gpu.replay.compare import VARIANT_TOLERANCE
from gpusim.text import first_line


def timed_eager(
    step: UserStep, roots: Sequence[Any], dtype: Dtype, time_ns: Callable[[Callable[[], object]], int], say: Progress
) -> int:
    """Return the time of the user's own step in ns, by `time_ns`.

    Raises `CaptureError` where it does what a captured one cannot or fails when it runs again, and `StepError` where
    its first run fails.
    """
    modules = [m for module in step.modules.values() for m in module.modules()]
    with say.stage("eager"), put_back(step, roots) as snapshot:
        say("timing the eager step")
        elsewhere = PythonState(dict.fromkeys(type(module).forward for module in modules))
        series = SeriesOf(Reach(roots, modules))
        before = Reads((*roots, *with_steps(step.optimizers)), modules)
        try:
            returned = _first_run(step)
            taken_from = series.advanced()
            if taken_from is not None:
                raise CaptureError(
                    f"the step takes values from '{taken_from}', which a captured one would not; its first is gone"
                )
            snapshot.check_objects()
            if snapshot.keep_prepared():
                _check_first(step, snapshot, returned, dtype)
            after_first, reads = ModuleState(modules), Reads((*roots, *with_steps(step.optimizers)), modules)
            drawn = host_draws(step.device)
            with _running_again():
                eager_ns = time_ns(step.run)
            if host_draws(step.device) != drawn:
                raise CaptureError("the step draws random numbers on the host, which a captured step would not")
            snapshot.check_modules()
            changed = after_first.changed() or reads.changed()
            if changed is not None:
                raise CaptureError(f"the step changes '{changed}', which a captured step would not")
            _check_arguments(step, modules)
        except BaseException:  # Ctrl-C, too
            elsewhere.restore()
            before.put_back()
            snapshot.forget_prepared()
            raise
    return eager_ns


def run_again(step: UserStep) -> Any:
    """Run a step that has run before. Raises `CaptureError` where it fails."""
    with _running_again():
        return step.run()


def _running_again() -> AbstractContextManager[None]:
    return users_code("the step fails when it runs again")


def _first_run(step: UserStep) -> Any:
    try:
        return step.run()
    except (torch.cuda.OutOfMemoryError, GpusimError):
        raise
    except Exception as cause:  # any error of the user's code
        problem = first_line(cause)
        raise StepError(f"the step fails: {type(cause).__name__}: {problem}") from cause


def _check_arguments(step: UserStep, modules: Sequence[torch.nn.Module]) -> None:
    """Raise `CaptureError` where the step has marked an argument, or a module keeps one: a captured one has copies."""
    given = {t.untyped_storage().data_ptr() for _, t in step.named.values() if t.device.type != "meta"} - {0}
    for _, tensor in step.named.values():
        if vars(tensor):
            name = next(iter(vars(tensor)))
            raise CaptureError(f"the step gives an argument an attribute, '{name}', which a captured step would not")
    for module in modules:
        attributes = {name: value for name, value in vars(module).items() if name != "_buffers"}
        for name, value in (attributes | module._buffers).items():
            held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
            for each in held:
                if isinstance(each, torch.Tensor) and _is_in(each, given):
                    raise CaptureError(
                        f"{type(module).__name__} keeps an argument of the step in '{name}', which a captured step "
                        "would not; keep a copy"
                    )


def _is_in(tensor: torch.Tensor, memory: set[int]) -> bool:
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return False
    return tensor.untyped_storage().data_ptr() in memory


def _check_first(step: UserStep, snapshot: Snapshot, returned: Any, dtype: Dtype) -> None:
    """Raise `CaptureError` where the step computes something else now that its first run has prepared something.

    Where that is a table or a note, it computes the same.
    """
    first = results_of_step(step, returned)
    snapshot.restore()
    before = results_of_step(step, None)
    again = results_of_step(step, run_again(step))
    snapshot.check_modules()  # what changes each time is named first
    if first.keys() != again.keys() or not apart(again, first, before, {})[0] <= VARIANT_TOLERANCE[dtype]:
        raise CaptureError("the first call of the step computes something else than later ones: call it once before")
