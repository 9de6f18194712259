"""Kernel names from different tools: demangled differently, or mangled (by the profiler, over 1,024 characters)."""

from __future__ import annotations

import functools
import re

#: Maximum length of a kernel name in a message.
SHOWN_CHARS = 80

#: A token of a mangled name; the group is the length of a source name that follows.
_TOKEN = re.compile(
    r"S(?:[0-9A-Z]*_|[tasbiod])|T[0-9A-Z]*_|A\d*_|Dv\d+_|[CD]\d|Ut\d*_|__\d+_|_\d|_Z|Ul|D[tT]|(\d+)|.", re.DOTALL
)
#: Tokens closed by an `E`.
_OPENING = frozenset({"N", "I", "X", "J", "F", "Z", "_Z", "Dt", "DT", "Ul"})
#: Names of GEMM-like kernels: those of cuBLAS, cuDNN, CUTLASS and of fused attention. Depthwise convolutions do not
#: match (their base names have none of these), nor do the auxiliary kernels of a product that change layouts, prepare
#: workspaces or sum parts.
_MULTIPLIES = re.compile(r"gemm|xmma|nvjet|convolve|[dw]grad\w*_engine|flash|fmha", re.IGNORECASE)
#: Operators and kernels of convolutions; cuDNN's `gemm` kernels for them name a pass, as its attention does.
_CONVOLVES = re.compile(r"conv(?!ert)|(?<!flash_)fprop|[dw]grad", re.IGNORECASE)
#: Uninformative base names; the template arguments tell what these kernels do.
_GENERIC = frozenset({"Kernel", "Kernel2", "kernel"})
_ANONYMOUS = ("(anonymous namespace)", "<unnamed>", "{anonymous}")


def base_name(name: str) -> str:
    """Return a kernel's name without result type, scope, template arguments and parameters, in which tools differ.

    `void ns::(anonymous namespace)::gemm<float, 4>(float*)`, `ns::<unnamed>::gemm<float, (int)4>` and
    `_ZN2ns12_GLOBAL__N_14gemmIfLi4EEEvPf` are all `gemm`.
    """
    if name.startswith("_Z"):
        return _mangled_base(name) or name
    for anonymous in _ANONYMOUS:
        name = name.replace(anonymous, "")
    name = _without_arguments(name).strip()
    return name.split()[-1].rsplit("::", 1)[-1] if name else ""


@functools.lru_cache(maxsize=4096)
def multiplies_matrices(name: str) -> bool:
    """Return True for the name of a GEMM-like kernel, which reuses tiles: matrix product, convolution or attention."""
    base = base_name(name)
    return bool(_MULTIPLIES.search(name if base in _GENERIC else base)) and "workspace" not in base


@functools.lru_cache(maxsize=4096)
def convolves(name: str) -> bool:
    """Return True for the name of a convolution, of an operator or of a kernel."""
    return bool(_CONVOLVES.search(name))


def shown_name(name: str) -> str:
    """Return the base name, shortened for messages."""
    base = base_name(name)
    return base if len(base) <= SHOWN_CHARS else f"{base[: SHOWN_CHARS - 3]}..."


def _without_arguments(name: str) -> str:
    """Return the part of a demangled name before its parameters, without template arguments."""
    kept, templates, parentheses = [], 0, 0
    for char in name:
        if parentheses:  # within template arguments: `(int)4`, `(a > b)`
            parentheses += (char == "(") - (char == ")")
        elif templates:
            templates += (char == "<") - (char == ">")
            parentheses += char == "("
        elif char == "(":
            break
        elif char == "<":
            templates = 1
        else:
            kept.append(char)
    return "".join(kept)


def _mangled_base(name: str) -> str | None:
    """Return the last part of an Itanium-mangled name's scope, or None if it cannot be parsed.

    Itanium C++ ABI, 5.1: names are a length and as many characters, `N ... E` is a scope, `I ... E` template arguments.
    """
    try:
        at, base = 2, None
        nested = name[at] == "N"
        at += nested
        while True:
            token = _TOKEN.match(name, at)
            if token is None or token[0] == "E" or (base is not None and not nested):
                return base
            at = token.end()
            if token[1]:
                base, at = name[at : at + int(token[1])], at + int(token[1])
            elif token[0] == "I":
                at = _behind(name, at)
    except (IndexError, ValueError):
        return None


def _behind(name: str, at: int, values: bool = True) -> int:
    """Return the position after the `E` that closes the token before `at`; with `values`, an `L` begins a literal."""
    while True:
        matched = _TOKEN.match(name, at)
        if matched is None:
            raise ValueError(name)
        token, at = matched[0], matched.end()
        if token == "E":
            return at
        if matched[1]:
            at += int(matched[1])
        elif token == "L" and values:
            at = _behind_literal(name, at)
        elif token in _OPENING:
            at = _behind(name, at, values=token != "N")
            if token == "Ul":  # a lambda's number
                at = name.index("_", at) + 1


def _behind_literal(name: str, at: int) -> int:
    """Return the position after a literal: its type, then a value (digits, `n` for minus) that is no name length."""
    matched = _TOKEN.match(name, at)
    if matched is None:
        raise ValueError(name)
    token, at = matched[0], matched.end()
    if matched[1]:
        at += int(matched[1])
    elif token == "_Z":
        return _behind(name, at)
    elif token == "N":
        at = _behind(name, at, values=False)
    if name.startswith("I", at):
        at = _behind(name, at + 1)
    return name.index("E", at) + 1
