"""Models to capture: `torchvision:NAME`, `timm:NAME`, `path/to/file.py:function`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from gpusim.defaults import DEFAULT_SEED
from gpusim.errors import CaptureError, GpuError, UnknownNameError
from gpusim.formats.trace import Dtype, MemoryFormat, Mode
from gpusim.gpu.capture.users_errors import users_code
from gpusim.gpu.device import torch_dtype
from gpusim.trace.trust import wrong_name

LossFunction = Callable[[Any, torch.Tensor | None], torch.Tensor]

#: Weight of each output beyond the first in the default loss: the auxiliary classifiers of GoogLeNet
#: (Szegedy et al., "Going deeper with convolutions", section 5).
AUXILIARY_WEIGHT = 0.3
DEFAULT_IMAGE_SIZE = 224


@dataclass(frozen=True)
class ModelStep:
    """A model with its inputs, ready for one step; `loss` is None for inference."""

    network: str
    module: nn.Module
    inputs: tuple[Any, ...]
    target: torch.Tensor | None
    loss: LossFunction | None

    @property
    def optimizer_name(self) -> str | None:
        """Optimizer name in the trace."""
        return "sgd_momentum" if self.loss is not None else None


def load_step(
    spec: str,
    *,
    mode: Mode,
    batch: int,
    dtype: Dtype,
    memory_format: MemoryFormat,
    device: torch.device,
    seed: int = DEFAULT_SEED,
) -> ModelStep:
    """Build the model of `spec` with random weights and one batch of random inputs on `device`.

    bf16 means parameters and inputs in bfloat16. Raises `CaptureError`, `UnknownNameError`, `GpuError` (no
    torchvision).
    """
    torch.manual_seed(seed)
    kind, _, name = spec.partition(":")
    wrong = wrong_name(spec)
    if wrong:
        raise CaptureError(f"model '{spec}': {wrong}")
    loss: LossFunction | None = None
    if kind == "torchvision" and name:
        network, (module, inputs) = name, _torchvision(name, batch)
    elif kind == "timm" and name:
        network, (module, inputs) = name, _timm(name, batch)
    elif kind.endswith(".py") and name:
        network, (module, inputs, loss) = name, _from_file(Path(kind), name, batch)
    else:
        raise CaptureError(f"model '{spec}': give torchvision:NAME, timm:NAME or path/to/file.py:function")
    _check_module(module, spec)
    module = _moved(module, device, torch_dtype(dtype)).train(mode == "train")
    inputs = pytree.tree_map_only(torch.Tensor, lambda t: _cast(t, dtype).to(device), inputs)
    if memory_format == "channels_last":
        module = module.to(memory_format=torch.channels_last)
        inputs = pytree.tree_map_only(torch.Tensor, _channels_last, inputs)
    if mode == "infer":
        return ModelStep(network, module.requires_grad_(False), inputs, None, None)
    if not any(p.requires_grad for p in module.parameters()):
        raise CaptureError(f"model '{spec}' has no trainable parameter; capture it in mode infer")
    target = None
    if loss is None:
        try:
            loss, target = default_loss, _target_for(module, inputs)
        except CaptureError as cause:
            if device.type != "meta":
                raise
            # Recording refuses a step that depends on data, with its line, before torch's error about meta tensors.
            loss = _raising(cause)
    return ModelStep(network, module, inputs, target, loss)


def _check_module(module: nn.Module, spec: str) -> None:
    """Raise `CaptureError` for a module whose parameters cannot be replaced, or do not exist yet."""
    for part in module.modules():
        if isinstance(part, torch.jit.ScriptModule | nn.DataParallel):
            kind = "torch.jit" if isinstance(part, torch.jit.ScriptModule) else "DataParallel"
            raise CaptureError(f"model '{spec}' has a module of {kind}; return the module that it was made from")
    if any(nn.parameter.is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
        raise CaptureError(f"model '{spec}' has a lazy module, whose parameters have no shape; run it once before")


def _moved(module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Move a module. Parameters that several modules share stay one: torch makes several on the device `meta`."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((owner, name))
    module = module.to(device=device, dtype=dtype)
    for (first, own), *others in places.values():
        for owner, name in others:
            owner._parameters[name] = first._parameters[own]
    return module


def default_loss(output: Any, target: torch.Tensor | None) -> torch.Tensor:
    """Return the cross-entropy of each [batch, classes] output against one target, outputs after the first weighted
    0.3.

    Without a target (outputs are not class scores): the mean square of all floating-point outputs.
    """
    tensors = _float_tensors(output)
    if target is None:
        return sum((t.float().square().mean() for t in tensors), start=torch.zeros((), device=tensors[0].device))
    total = None
    for index, scores in enumerate(t for t in tensors if t.dim() == 2):
        part = nn.functional.cross_entropy(scores, target) * (1.0 if index == 0 else AUXILIARY_WEIGHT)
        total = part if total is None else total + part
    assert total is not None
    return total


def _raising(cause: CaptureError) -> LossFunction:
    """Return a loss function that raises."""

    def loss(_output: Any, _target: torch.Tensor | None) -> torch.Tensor:
        raise cause

    return loss


def _float_tensors(output: Any) -> list[torch.Tensor]:
    tensors = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor) and t.is_floating_point()]
    if not tensors:
        raise CaptureError("the model returns no floating-point tensor to build a loss from; give a loss function")
    return tensors


def _target_for(module: nn.Module, inputs: tuple[Any, ...]) -> torch.Tensor | None:
    with torch.no_grad():
        state = {name: buffer.clone() for name, buffer in module.named_buffers()}
        try:
            scores = _float_tensors(module(*inputs))[0]
        except (RuntimeError, TypeError, ValueError) as cause:
            if isinstance(cause, torch.cuda.OutOfMemoryError):
                raise
            raise CaptureError(f"the model's forward failed: {str(cause).partition(chr(10))[0]}") from cause
        for name, buffer in module.named_buffers():
            buffer.copy_(state[name])
    if scores.dim() != 2:
        return None
    return torch.randint(0, scores.shape[1], (scores.shape[0],), device=scores.device)


def _torchvision(name: str, batch: int) -> tuple[nn.Module, tuple[Any, ...]]:
    models = _library("torchvision.models", "torchvision")
    if name not in models.list_models():
        raise UnknownNameError("torchvision model", name, models.list_models())
    size = DEFAULT_IMAGE_SIZE
    crop = getattr(models.get_model_weights(name).DEFAULT.transforms(), "crop_size", None)
    if crop:
        size = crop[0] if isinstance(crop, list | tuple) else crop
    keywords = {"weights_backbone": None} if "." not in name and _takes(models, name, "weights_backbone") else {}
    return models.get_model(name, weights=None, **keywords), (torch.randn(batch, 3, size, size),)


def _takes(models: Any, name: str, parameter: str) -> bool:
    import inspect

    return parameter in inspect.signature(models.get_model_builder(name)).parameters


def _timm(name: str, batch: int) -> tuple[nn.Module, tuple[Any, ...]]:
    timm = _library("timm", "timm")
    if not timm.is_model(name):
        raise UnknownNameError("timm model", name, timm.list_models())
    model: nn.Module = timm.create_model(name, pretrained=False)
    channels, height, width = model.default_cfg["input_size"]
    return model, (torch.randn(batch, channels, height, width),)


def _library(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as cause:
        raise GpuError(f"{package} is not installed; it is needed for {package}:NAME models") from cause


def _from_file(path: Path, function: str, batch: int) -> tuple[nn.Module, tuple[Any, ...], LossFunction | None]:
    """Load `file.py:function`; this runs the user's file, which the command line names explicitly."""
    if not os.path.isfile(path):
        raise CaptureError(f"{path}: no such file")
    name = f"gpusim_spec_{path.stem}"  # `json.py` must not replace Python's json
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    with users_code(file=path):
        module_spec.loader.exec_module(module)
    make = getattr(module, function, None)
    if not callable(make):
        raise UnknownNameError(f"function in {path}", function, [n for n in vars(module) if callable(vars(module)[n])])
    with users_code(file=path):
        returned = make(batch)
    problem = f"{path}:{function}(batch) must return (module, inputs) or (module, inputs, loss function)"
    if not isinstance(returned, tuple) or len(returned) not in (2, 3) or not isinstance(returned[0], nn.Module):
        raise CaptureError(problem)
    inputs = returned[1] if isinstance(returned[1], tuple) else (returned[1],)
    if len(returned) == 2:
        return returned[0], inputs, None
    user_loss = returned[2]
    return returned[0], inputs, lambda output, target: user_loss(output)


def _cast(tensor: torch.Tensor, dtype: Dtype) -> torch.Tensor:
    return tensor.to(torch_dtype(dtype)) if tensor.is_floating_point() else tensor


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor
