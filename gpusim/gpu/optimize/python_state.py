"""Python objects that a step can reach, except modules, optimizers and tensors: detection of changes.

A captured step repeats GPU work only. A counter, a list of losses or a schedule of rates inside the step would stand
still, so a step that changes one is refused, and changes by its trial run are undone.
"""

from __future__ import annotations

import functools
import pickle
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch.optim import Optimizer

from gpusim.gpu.reach.raw import owner_of
from gpusim.gpu.reach.search import MOST_BYTES, MOST_PARTS, NEAR

#: Types compared by value; other objects are compared by identity.
_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None))
_SKIPPED: Final = (torch.Tensor, torch.nn.Module, Optimizer, type, types.ModuleType, *_PLAIN)
_EMPTY: Final = object()
#: The generator behind functions of Python's `random`, which `host_draws` looks at.
_SHARED: Final = owner_of(random.random)
#: Attributes of torch's own in each module, its parameters, buffers and hooks among them.
_OF_MODULES: Final = frozenset(vars(torch.nn.Module()))


@dataclass(frozen=True)
class _Kept:
    """Contents of an object that is no list, tuple or dict of few values: `before` is what `read` has returned."""

    name: str
    read: Callable[[], Any]
    before: Any
    put_back: Callable[[], object]


class PythonState:
    """Current contents of the objects reachable from `roots`. Of long lists and dicts the length only."""

    def __init__(self, roots: Iterable[Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self._seen: set[int] = set()
        self._cells: list[tuple[str, types.CellType, Any]] = []
        self._names: list[tuple[str, dict[str, Any], Any]] = []
        self._lists: list[tuple[str, Any, list[Any]]] = []
        self._dicts: list[tuple[str, dict[Any, Any], dict[Any, Any]]] = []
        self._others: list[_Kept] = []
        self.generators: list[torch.Generator] = []
        for root in roots:
            self._look(root, "", 0)

    def changed(self) -> str | None:
        """Return the name of a changed value, or None."""
        for name, cell, before in self._cells:
            if not _same(_contents(cell), before):
                return name
        for name, names, before in self._names:
            if not _same(names.get(name, _EMPTY), before):
                return name
        for name, items, former in self._lists:
            if len(items) != len(former) or not all(map(_same, items, former)):
                return name
        for name, values, earlier in self._dicts:
            for key in earlier.keys() | values.keys():
                if not _same(values.get(key, _EMPTY), earlier.get(key, _EMPTY)):
                    return f"{name}.{key}" if name else str(key)
        return next((kept.name for kept in self._others if kept.read() != kept.before), None)

    def restore(self) -> None:
        """Restore all contents."""
        for _, cell, before in self._cells:
            if before is not _EMPTY and not _same(_contents(cell), before):
                cell.cell_contents = before
        for name, names, before in self._names:
            if not _same(names.get(name, _EMPTY), before):
                names[name] = before
        for _, items, former in self._lists:
            if isinstance(items, list):
                items[:] = former
        for _, values, earlier in self._dicts:
            for key in values.keys() - earlier.keys():
                del values[key]
            values.update(earlier)
        for kept in self._others:
            if kept.read() != kept.before:
                kept.put_back()

    def _look(self, value: Any, name: str, depth: int) -> None:
        value = owner_of(value)
        if isinstance(value, torch.Tensor) and id(value) not in self._seen:
            self._seen.add(id(value))
            self.tensors.append(value)
        if isinstance(value, _SKIPPED) or id(value) in self._seen or depth > NEAR:
            return
        self._seen.add(id(value))
        if isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self._look(part, name, depth + 1)
        elif isinstance(value, types.MethodType):
            self._look(value.__self__, name, depth)
            self._look(value.__func__, name, depth)
        elif isinstance(value, types.FunctionType):
            self._look_at_function(value, depth)
        elif isinstance(value, list | tuple):
            if len(value) <= MOST_PARTS:
                self._lists.append((name, value, list(value)))
                for place, part in enumerate(value):
                    self._look(part, f"{name}[{place}]", depth + 1)
            elif isinstance(value, list):
                self._keep_other(name, partial(len, value), partial(_cut, value, len(value)))
        elif isinstance(value, dict):
            if len(value) <= MOST_PARTS:
                self._keep(name, value, depth)
            else:
                self._keep_other(name, partial(len, value), partial(_drop, value, len(value)))
        elif isinstance(value, set):
            self._keep_other(name, value.copy, partial(_refill, value, value.update, value.copy()))
        elif isinstance(value, deque):
            self._keep_other(name, partial(_ids, value), partial(_refill, value, value.extend, list(value)))
        elif isinstance(value, np.ndarray):
            if value.size <= MOST_PARTS and not value.dtype.hasobject and value.flags.writeable:
                self._keep_other(name, value.tobytes, partial(np.copyto, value, value.copy()))
        elif isinstance(value, torch.Generator):
            self.generators.append(value)
        elif isinstance(value, random.Random) and value is not _SHARED:
            self._keep_other(name, value.getstate, partial(value.setstate, value.getstate()))
        elif isinstance(value, bytearray):
            if len(value) <= MOST_BYTES:
                self._keep_other(name, partial(bytes, value), partial(_rewrite, value, bytes(value)))
        elif isinstance(value, np.random.RandomState):
            read = partial(value.get_state, legacy=False)
            self._keep_other(name, lambda: pickle.dumps(read()), partial(value.set_state, read()))
        elif isinstance(value, np.random.Generator):
            bits = value.bit_generator
            self._keep_other(name, lambda: pickle.dumps(bits.state), partial(setattr, bits, "state", bits.state))
        elif hasattr(value, "__dict__"):
            self._keep(name, vars(value), depth)

    def _keep_other(self, name: str, read: Callable[[], Any], put_back: Callable[[], object]) -> None:
        self._others.append(_Kept(name, read, read(), put_back))

    def _keep(self, name: str, values: dict[Any, Any], depth: int) -> None:
        self._dicts.append((name, values, dict(values)))
        for key, part in list(values.items()):
            self._look(part, f"{name}.{key}" if name else str(key), depth + 1)

    def _look_at_function(self, function: types.FunctionType, depth: int) -> None:
        if (function.__module__ or "").partition(".")[0] == "torch":
            return
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            before = _contents(cell)
            self._cells.append((name, cell, before))
            self._look(before, name, depth + 1)
        for name in function.__code__.co_names:
            if name in function.__globals__:
                before = function.__globals__[name]
                self._names.append((name, function.__globals__, before))
                self._look(before, name, depth + 1)


class ModuleState:
    """Current attributes of modules that are no plain values, parameters or buffers, and the contents of containers."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._attributes = [(module, _attributes(module)) for module in modules]
        self._inside = PythonState(())
        for module, values in self._attributes:
            for key, value in values.items():
                self._inside._look(value, f"{type(module).__name__}.{key}", 0)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Tensors among them that are neither parameters nor buffers."""
        return self._inside.tensors

    @property
    def generators(self) -> list[torch.Generator]:
        """Generators of torch's among them."""
        return self._inside.generators

    def changed(self) -> str | None:
        """Return the name of a changed attribute, or None."""
        for module, before in self._attributes:
            now = _attributes(module)
            for key in before.keys() | now.keys():
                if not _same(now.get(key, _EMPTY), before.get(key, _EMPTY)):
                    return f"{type(module).__name__}.{key}"
        return self._inside.changed()

    def restore(self) -> None:
        """Restore all attributes and contents."""
        for module, before in self._attributes:
            for key in _attributes(module).keys() - before.keys():
                del vars(module)[key]
            vars(module).update(before)
        self._inside.restore()


def host_draws(device: torch.device) -> tuple[Any, ...]:
    """Return the states of the generators of the host: Python's, numpy's, and torch's where the step is on a GPU."""
    numpy = sys.modules.get("numpy")
    numpys = None if numpy is None else pickle.dumps(numpy.random.get_state(legacy=False))
    torchs = None if device.type == "cpu" else torch.get_rng_state().tolist()
    return random.getstate(), numpys, torchs


def _attributes(module: torch.nn.Module) -> dict[str, Any]:
    own = vars(module)
    return {key: own[key] for key in own.keys() - _OF_MODULES if not isinstance(own[key], _PLAIN)}


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _EMPTY


def _cut(items: list[Any], length: int) -> None:
    del items[length:]


def _rewrite(memory: bytearray, contents: bytes) -> None:
    memory[:] = contents


def _drop(values: dict[Any, Any], length: int) -> None:
    """Remove the youngest entries."""
    for key in list(values)[length:]:
        del values[key]


def _refill(container: Any, fill: Callable[[Any], object], contents: Any) -> None:
    container.clear()
    fill(contents)


def _ids(items: Iterable[Any]) -> list[int]:
    return list(map(id, items))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, _PLAIN) and isinstance(other, _PLAIN):
        return type(one) is type(other) and (one == other or (one != one and other != other))
    return one is other
