"""The user's module, model with loss and optimizer, or function, as a step on fixed inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree
from torch.utils._device import DeviceContext

from gpusim.errors import CaptureError
from gpusim.formats.trace import Dtype, Mode
from gpusim.gpu.capture.in_memory import function_step, model_phases, model_step, options_of
from gpusim.gpu.capture.options import CaptureOptions
from gpusim.gpu.capture.user_step import UserStep
from gpusim.gpu.reach.search import PLAIN, Reach, modules_in

#: Types of tensors that can be captured.
TENSORS: Final = frozenset((torch.Tensor, torch.nn.Parameter))


@dataclass(frozen=True)
class Given:
    """Arguments of `gpusim.optimize`."""

    target: Any
    """A module, or a step function."""
    loss: Callable[..., torch.Tensor] | None
    optimizer: torch.optim.Optimizer | None

    @property
    def is_module(self) -> bool:
        """Whether it is a model, not a function."""
        return isinstance(self.target, torch.nn.Module)

    @property
    def trains(self) -> bool:
        """Whether it is a model to be trained."""
        return self.is_module and (self.loss is not None or self.optimizer is not None)

    @property
    def behind(self) -> tuple[Any, ...]:
        """What a step runs of the user's."""
        return self.target, self.loss, self.optimizer

    def names(self) -> set[str]:
        """Return the names that its code uses."""
        modules = modules_in(self.target) if self.is_module else ()
        return Reach((self.target, self.loss), modules).names

    def split(self, args: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Split arguments into those of the model and of the loss: `(inputs, targets)`, each one tensor or a tuple of
        them.
        """
        if not self.trains or self.loss is None:
            return tuple(args), ()
        if len(args) < 2:
            raise CaptureError(f"a step with a loss takes (inputs, targets), not {len(args)} argument(s)")
        *inputs, targets = args
        given = inputs[0] if len(inputs) == 1 and isinstance(inputs[0], tuple) else tuple(inputs)
        return tuple(given), targets if isinstance(targets, tuple) else (targets,)

    def step(self, args: Sequence[Any], kwargs: dict[str, Any], device: torch.device) -> UserStep:
        """Return one step on these very arguments. Raises `CaptureError`."""
        if not self.is_module:
            return function_step(self.target, tuple(args), device, kwargs=kwargs)
        inputs, targets = self.split(args)
        return model_step(
            self.target, inputs, device, targets=targets, loss=self.loss, optimizer=self.optimizer, kwargs=kwargs
        )

    def eager(self, args: Sequence[Any], kwargs: dict[str, Any], device: torch.device) -> Any:
        """Run one step by the user's own code, also one that cannot be captured."""
        if not self.trains:
            return self.target(*args, **kwargs)
        inputs, targets = self.split(args)
        phases = [
            phase
            for _, phase in model_phases(
                self.target,
                inputs,
                device,
                targets=targets,
                loss=self.loss,
                optimizer=self.optimizer,
                kwargs=kwargs,
            )
        ]
        if self.optimizer is not None and _needs_closure(self.optimizer):
            forward, backward, _ = phases
            return self.optimizer.step(lambda: backward(forward(None)))
        value: Any = None
        for phase in phases:
            value = phase(value)
        return value

    def options(self, step: UserStep, seed: int, cast: torch.dtype | None = None) -> CaptureOptions:
        """Return the options of a capture; `cast` as in `casting`."""
        trains = self.trains or bool(step.optimizers)
        mode: Mode = "train" if trains else "infer"
        spec = f"{type(self.target).__module__}.{type(self.target).__qualname__}"
        dtype = dtype_of(list(step.parameters().values()), step.device) if cast is None else "bf16"
        return options_of(step, spec, mode, dtype, False, seed, False)


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer calls the model itself, as LBFGS does."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def dtype_of(tensors: Sequence[torch.Tensor], device: torch.device) -> Dtype:
    """Return the precision of products under the user's current settings."""
    kinds = {tensor.dtype for tensor in tensors}
    if torch.bfloat16 in kinds:
        return "bf16"
    return "tf32" if device.type == "cuda" and any(tf32()) else "fp32"


def autocast_of(device: torch.device) -> torch.dtype | None:
    """Return the type to which the surrounding `torch.autocast` casts, if any."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


@contextmanager
def as_outside() -> Iterator[None]:
    """Leave inference mode, whose tensors cannot be changed later, but record no gradients where it did not."""
    records = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(records):
        yield


def casting(step: UserStep, cast: torch.dtype | None) -> UserStep:
    """Return a step that runs as within `torch.autocast` of this type, if any, and casts its parameters anew at each
    run.

    A recorded step's own calls are run without it. Raises `CaptureError` for a type that needs loss scaling.
    """
    if cast not in (None, torch.bfloat16):
        raise CaptureError(f"torch.autocast to {cast}: only torch.bfloat16, which needs no loss scaling")

    def within(phase: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def cast_phase(value: Any) -> Any:
            torch.clear_autocast_cache()  # a context around this one keeps it
            try:
                with nullcontext() if cast is None else torch.autocast(step.device.type, dtype=cast):
                    return phase(value)
            finally:  # it would give the user's own code casts of the weights of a trial
                torch.clear_autocast_cache()

        return cast_phase

    return replace(step, phases=[(name, within(phase)) for name, phase in step.phases])


def tf32() -> tuple[bool, bool]:
    """Return whether products and convolutions may use TF32. Raises `CaptureError` for torch's newer settings."""
    try:
        return torch._C._get_cublas_allow_tf32(), torch._C._get_cudnn_allow_tf32()
    except RuntimeError as cause:  # torch does not answer once both kinds of settings are mixed
        raise CaptureError(
            "TF32 is set by `fp32_precision`; set torch.backends.cuda.matmul.allow_tf32 and "
            "torch.backends.cudnn.allow_tf32 instead"
        ) from cause


#: torch's other settings by which a step has other kernels or types.
_SETTINGS: Final = (
    torch.get_default_dtype,
    torch._C._get_deterministic_algorithms,
    torch._C._get_cudnn_enabled,
    torch._C._get_cudnn_deterministic,
    torch._C._get_cublas_allow_bf16_reduced_precision_reduction,
    torch._C._get_flash_sdp_enabled,
    torch._C._get_mem_efficient_sdp_enabled,
    torch._C._get_math_sdp_enabled,
    torch._C._get_cudnn_sdp_enabled,
)


#: Asks for the innermost hooks on saved tensors; torch before 2.8 cannot tell.
_hooks_on_saved: Final = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)


def settings() -> tuple[Any, ...]:
    """Return torch's settings of now that a captured step depends on. Raises `CaptureError` where something listens to
    torch's calls, or changes what they do: a captured step makes none.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise CaptureError("a transformation of torch.func is on, which does not reach into a captured step")
    if forward_ad._current_level >= 0:
        raise CaptureError("forward-mode differentiation is on, which does not reach into a captured step")
    if torch._C._len_torch_dispatch_stack():
        raise CaptureError("a TorchDispatchMode is on, which would see nothing of a captured step")
    if _hooks_on_saved(True) is not None:
        raise CaptureError("hooks on saved tensors are on, which would see nothing of a captured step")
    if torch.is_anomaly_enabled():
        raise CaptureError("anomaly detection is on, which would see nothing of a captured step")
    if parametrize._cache_enabled:
        raise CaptureError("the cache of torch.nn.utils.parametrize is on, which does not reach into a captured step")
    devices = []
    for number in range(torch._C._len_torch_function_stack()):
        mode = torch._C._get_function_stack_at(number)
        if not isinstance(mode, DeviceContext):
            raise CaptureError("a TorchFunctionMode is on, which would see nothing of a captured step")
        devices.append(mode.device)
    return (*tf32(), *[ask() for ask in _SETTINGS], *devices)


def check_arguments(leaves: Iterable[Any]) -> None:
    """Raise `CaptureError` for an argument that is no dense tensor and no plain value."""
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if leaf.layout is not torch.strided or type(leaf) not in TENSORS:
                kind = type(leaf).__name__ if leaf.layout is torch.strided else leaf.layout
                raise CaptureError(f"an argument is a tensor of type {kind}: only plain, dense ones can be captured")
        elif not isinstance(leaf, PLAIN):
            raise CaptureError(
                f"an argument is of type {type(leaf).__name__}: tensors, numbers, text, and lists, tuples and dicts of "
                "them can be captured"
            )


def attribute_problem(tensors: Iterable[Any], names: Callable[[], Container[str]]) -> str | None:
    """Return in words that code reads an attribute of an argument's own by one of these names, or None."""
    own = [key for tensor in tensors if isinstance(tensor, torch.Tensor) for key in vars(tensor)]
    if not own:
        return None
    read = names()
    key = next((key for key in own if key in read), None)
    return None if key is None else f"an argument has an attribute of its own, '{key}', which is not captured"


def which_same(tensors: Sequence[torch.Tensor]) -> tuple[int, ...] | None:
    """Return for each tensor the place of the first that is the same object; None where all are different ones."""
    ids = list(map(id, tensors))
    return None if len(set(ids)) == len(ids) else tuple(map(ids.index, ids))


def value_of(leaf: Any) -> tuple[type, str]:
    """Return a plain object's type and value, whatever a class of the user's says of it; hashable."""
    kind: Any = next((kind for kind in (bool, int, float, complex, str, bytes) if isinstance(leaf, kind)), type(leaf))
    return type(leaf), kind.__repr__(leaf)


def fixed_copies(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copy each tensor among the arguments once, to memory with a fixed place. Raises as `check_arguments`."""
    check_arguments(pytree.tree_leaves((tuple(args), dict(kwargs))))
    copies: dict[int, torch.Tensor] = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.detach().clone(memory_format=torch.preserve_format)
        return copies[id(tensor)]

    return pytree.tree_map_only(torch.Tensor, copy, (tuple(args), dict(kwargs)))
