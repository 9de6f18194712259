"""Kernel names as tools write them: demangled in ways of their own, or mangled (the profiler, if over 1,024 long)."""

from __future__ import annotations

import functools
import re

#: Longest kernel name in a message.
SHOWN_CHARS = 80

#: One token inside a mangled name; the group is the length of a source name that follows.
_TOKEN = re.compile(
    r"S(?:[0-9A-Z]*_|[tasbiod])|T[0-9A-Z]*_|A\d*_|Dv\d+_|[CD]\d|Ut\d*_|__\d+_|_\d|_Z|Ul|D[tT]|(\d+)|.", re.DOTALL
)
#: Tokens that open what an `E` closes.
_OPENING = frozenset({"N", "I", "X", "J", "F", "Z", "_Z", "Dt", "DT", "Ul"})
#: Names of kernels that multiply matrices: those of cuBLAS, cuDNN, CUTLASS and of fused attention. Depthwise
#: convolutions are not among them (their base names have none of these), nor are the kernels beside a product that
#: change layouts, make workspaces or add up parts.
_MULTIPLIES = re.compile(r"gemm|xmma|nvjet|convolve|[dw]grad\w*_engine|flash|fmha", re.IGNORECASE)
#: Base names that say nothing: what they do is in their template arguments.
_GENERIC = frozenset({"Kernel", "Kernel2", "kernel"})
_ANONYMOUS = ("(anonymous namespace)", "<unnamed>", "{anonymous}")


def base_name(name: str) -> str:
    """A kernel's name without result type, scope, template arguments and parameters, in which tools differ.

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
    """Whether a kernel of this name is a matrix product or a convolution, which works on tiles that it reuses."""
    base = base_name(name)
    return bool(_MULTIPLIES.search(name if base in _GENERIC else base)) and "workspace" not in base


def shown_name(name: str) -> str:
    """The base name, cut to what a message can hold."""
    base = base_name(name)
    return base if len(base) <= SHOWN_CHARS else f"{base[: SHOWN_CHARS - 3]}..."


def _without_arguments(name: str) -> str:
    """What a demangled name has before its parameters, less all between `<` and `>`."""
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
    """The last part of an Itanium-mangled name's scope; None where it is not understood.

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
    """The position behind the `E` that closes what was opened before `at`; `values`: an `L` in it begins a literal."""
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
    """The position behind a literal: its type, then a value (digits, `n` for minus), which is no length of a name."""
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
