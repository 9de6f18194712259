"""The functions of `import gpusim` that run on a GPU: capture, replay and calibrate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpusim.api import AnyStep, Say, check_schedule_arguments, check_seed, ignore, is_policy, resolve_schedule
from gpusim.defaults import DEFAULT_HARDWARE, DEFAULT_SEED, DEFAULT_STREAMS
from gpusim.errors import GpuError
from gpusim.hardware.model import HardwareModel, load_hardware
from gpusim.step import Step, as_step, load
from gpusim.trace.schema import Dtype, Mode

if TYPE_CHECKING:
    import torch

    from gpusim.plan.measurement import Measurement
    from gpusim.plan.schedule import Schedule

MISSING_TORCH: Final = (
    "no GPU: torch is not installed, and this command runs kernels on a CUDA GPU (pip install 'gpusim[gpu]')"
)


def capture(
    model: torch.nn.Module,
    inputs: Any,
    *,
    targets: Any = (),
    loss: Callable[..., torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    kwargs: Mapping[str, Any] | None = None,
    dtype: Dtype | None = None,
    autocast: torch.dtype | bool | None = None,
    clip_grad_norm: float | None = None,
    clip_grad_value: float | None = None,
    variants: bool = False,
    name: str | None = None,
    seed: int = DEFAULT_SEED,
    hw: str | Path | HardwareModel | None = None,
    say: Say | None = None,
) -> Step:
    """Capture one step of a model in memory on this machine's GPU: inference, or with `loss` or `optimizer` training.

    `inputs` and `targets` are tuples of example tensors: the step is `loss(model(*inputs, **kwargs), *targets)`, its
    gradients, clipped where asked for, and the optimizer's update. Without `loss`, a model that is trained returns its
    loss. `dtype` says how products are computed: `fp32`, `tf32` (the default for 32-bit parameters) or `bf16`.
    `autocast` is `torch.bfloat16` or True. With `variants`, other kernels of each op are measured, too. Model,
    optimizer and random numbers are as before afterwards. `hw` is as for `load`.
    Raises `GpuError` without a GPU, and `CaptureError`, with the line of your code, for what cannot be captured.
    """
    seed = check_seed(seed)
    with needs_torch():
        from gpusim.runtime.front import capture as run
    trace = run(
        model,
        inputs,
        targets=targets,
        loss=loss,
        optimizer=optimizer,
        kwargs=kwargs,
        dtype=dtype,
        autocast=autocast,
        clip_grad_norm=clip_grad_norm,
        clip_grad_value=clip_grad_value,
        variants=variants,
        name=name,
        seed=seed,
        say=say or ignore,
    )
    return load(trace, hw)


def capture_step(
    function: Callable[..., Any],
    inputs: Any = (),
    *,
    kwargs: Mapping[str, Any] | None = None,
    dtype: Dtype | None = None,
    mode: Mode | None = None,
    variants: bool = False,
    name: str | None = None,
    seed: int = DEFAULT_SEED,
    hw: str | Path | HardwareModel | None = None,
    say: Say | None = None,
) -> Step:
    """Capture what a step function of your own does on this machine's GPU: forward, backward, optimizer, in its way.

    `function(*inputs, **kwargs)` is called several times and must make the same calls each time. Modules and optimizers
    are found through its closure, globals and arguments; what it changes of them is put back. `mode` is `train` where
    it reaches an optimizer. The other arguments and the errors are those of `capture`.
    """
    seed = check_seed(seed)
    with needs_torch():
        from gpusim.runtime.front import capture_step as run
    trace = run(
        function,
        inputs,
        kwargs=kwargs,
        dtype=dtype,
        mode=mode,
        variants=variants,
        name=name,
        seed=seed,
        say=say or ignore,
    )
    return load(trace, hw)


def replay(
    step: AnyStep,
    schedule: str | Path | Schedule,
    *,
    streams: int = DEFAULT_STREAMS,
    seed: int = DEFAULT_SEED,
    trust_code: bool = False,
    check_outputs: bool = True,
    command: str = "",
    say: Say | None = None,
) -> Measurement:
    """Run a schedule on this machine's GPU from its trace alone, compare its outputs and time it.

    Both the schedule and the sequential CUDA graph are timed, in turns, on random inputs. `trust_code` lets code that
    the trace brings along run. Raises `GpuError` without a GPU, `ReplayError` where outputs differ and
    `check_outputs`, `TrustError`, `OperatorError`, `ScheduleError`.
    """
    streams = check_schedule_arguments(schedule, streams)
    seed = check_seed(seed)
    step = as_step(step)
    if is_policy(schedule):  # making a schedule may take long
        check_gpu(step, trust_code)
    else:
        check_replay(step, trust_code)
    chosen = resolve_schedule(step, schedule, streams)
    with needs_torch():
        from gpusim.runtime.replay import replay as run
        from gpusim.runtime.replay import require_equal

    (measurement,) = run(
        step.graph,
        [chosen],
        command=command or "gpusim.replay",
        seed=seed,
        say=say or ignore,
        trust_code=trust_code,
    )
    if check_outputs:
        require_equal(measurement)
    return measurement


def calibrate(
    base: str | Path | HardwareModel = DEFAULT_HARDWARE, *, command: str = "", say: Say | None = None
) -> HardwareModel:
    """Measure the hardware model of this machine's GPU; takes minutes.

    `base` has the data-sheet limits, which cannot be measured. Raises `GpuError` without a GPU, or where `base` is a
    model of another GPU.
    """
    model = base if isinstance(base, HardwareModel) else load_hardware(str(base))
    with needs_torch():
        from gpusim.runtime.calibrate import calibrate as run
    return run(model, command or "gpusim.calibrate", say or ignore)


def check_replay(step: Step, trust_code: bool) -> None:
    """Refuse what replay would not run: code that is not trusted, an operator not allowed. Needs no torch.

    Raises `TrustError`, `OperatorError`.
    """
    from gpusim.runtime.allowlist import check_operators
    from gpusim.trace.trust import check_trace_code

    check_trace_code(step.trace, step.file, trust_code)
    check_operators(step.trace, step.file)


def check_gpu(step: Step, trust_code: bool) -> None:
    """Refuse a replay before long work: as `check_replay`, then no torch or no GPU. Raises `GpusimError`."""
    check_replay(step, trust_code)
    with needs_torch():
        from gpusim.runtime.device import require_gpu
    require_gpu()


@contextmanager
def needs_torch() -> Iterator[None]:
    """Turn a missing torch into one line. Raises `GpuError`."""
    try:
        yield
    except ModuleNotFoundError as cause:
        if cause.name is None or cause.name.partition(".")[0] != "torch":
            raise
        raise GpuError(MISSING_TORCH) from cause
