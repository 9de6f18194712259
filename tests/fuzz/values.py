"""Hostile values: numbers at the edges of types, and text that breaks terminals, pages, tables and paths."""

from __future__ import annotations

import random
from typing import Any

from tests.fuzz.classes import MARKED


class Raw:
    """A piece of JSON or TOML that is written verbatim."""

    def __init__(self, text: str) -> None:
        self.text = text


#: Values one above and one below edges of types, formats and engines; 5,000 digits are more than `int` parses.
NUMBERS: tuple[Any, ...] = (
    0, -1, 1, 2, 7, 127, 128, 129, 255, 256, 1000, 1024, 1025, 65535, 65536, 10**6, 10**8, 10**9, 4 * 10**9, 8 * 10**9,
    2**31 - 1, 2**31, 2**32, 2**33, 2**53, 2**53 + 1, 10**12, 10**15, 10**18, 2**62 - 1, 2**62, 2**62 + 1, 2**63, 2**64,
    -(2**31), -(2**63), 10**25, 0.0, -0.0, 0.5, 1.5, 1e-9, 5e-324, 1e15, 1e19, 1e300, 1e308, -1e308, 0.1, 1.0, 0.999999,
    Raw("NaN"), Raw("Infinity"), Raw("-Infinity"), Raw("1e400"), Raw("-0"), Raw("1" + "0" * 4999),
    Raw("-" + "9" * 5000),
    Raw("0." + "3" * 3000), Raw("1E5"), Raw("1e-400"),
)  # fmt: skip

TEXTS: tuple[str, ...] = (
    "", " ", "\t", "\n", "a\nb", "a\r\nb", "\x00", "a\x00b", "\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "\x1b[2J",
    "\x9b31m",
    "\x07", "\x08\x08\x08", "\x7f", "\x85", "\u2028", "\u202eevil\u202c", "\u2066x\u2069", "\u200b", "\ufeff", "\ufffe",
    f"[bold]{MARKED}[/bold]", "[/red]", "[/]", "[link=http://example.org]x[/link]", "[", "]", "[[", "\\[", "[red",
    "[@click=app.quit]x[/]", "<img src=x onerror=alert(1)>", "<script>alert(1)</script>", "</script><script>alert(2)//",
    "=cmd|' /C calc'!A0", "+1+1", "@SUM(A1)", "-2+3", "=1+1\",\"x", "a,b;c\"d'e", "$(id)", "`id`", "%s%n", "{0}", "{x}",
    "../../etc/passwd", "/dev/full", "/proc/self/mem", "a/b", "C:\\x", "name.json", "*", "?", "[a-z]", "nul", "NaN",
    "None", "true", "0", "-1", "1e308", "\u0661\u0662", "\uff11", "\u00b2", "\u4e2d\u6587", "\U0001f600", "e\u0301",
    "\u0130", "A" * 201, "A" * 300, "A" * 5000, "\U0001f600" * 400, "x " * 3000, "it's so " * 500, "a\"b'c `d` " * 300,
    "[/]" * 300, "\x1b" * 300, "\x1b[2J " * 200,
    "aten.add.Tensor", "__class__", "default", "gpusim-trace/1", "gpusim-trace/2", "gpusim-trace/3",
    "float32", "normal", "kernel",
)  # fmt: skip

#: Attributes of torch's objects, and other overloads.
_ATTRIBUTES: tuple[str, ...] = tuple(
    f"aten.{name}.{attribute}"
    for name in ("add", "relu", "convolution", "_softmax")
    for attribute in (
        "__getattribute__",
        "__setattr__",
        "__getattr__",
        "__call__",
        "__class__",
        "__init__",
        "__dict__",
        "__reduce__",
        "_op",
        "_overload_names",
        "overloads",
        "op",
        "default",
        "Tensor",
        "out",
        "redispatch",
        "_schema",
        "decompose",
        "__globals__",
        "Tensor.__call__",
        "default.__class__",
        "",
        " ",
        "\x1b[31m",
        "A" * 300,
        "[/red]",
    )
)
#: Names of operators: those, unchecked ones, other namespaces, and invalid names.
OPERATORS: tuple[str, ...] = (
    *_ATTRIBUTES,
    "aten.append.t", "aten._reshape_alias.default", "aten.as_strided.default", "aten.resize_.default",
    "aten.set_.source_Storage",
    "aten._index_put_impl_.default", "aten._unsafe_index.Tensor", "aten.fill_.Scalar",
    "aten.from_file.default", "aten.save.default", "aten.item.default", "aten._cudnn_rnn.default", "prims.add.default",
    "aten.__getattribute__.default", "aten.__class__.__init__", "aten.__dir__.default", "quantized.add.default",
    "torchvision.nms.default", "torchvision.__class__.x", "os.system.default", "builtins.eval.default", "aten",
    "aten.add",
    "aten..add", ".", "..", "...", "aten.add.Tensor.x.y", "ATEN.add.Tensor", "aten.add.tensor", "aten/add/Tensor",
    "inductor.kernel.default", "triton.x.y", "aten.\x00.x", "aten.add.\u0000",
)  # fmt: skip


def number(rng: random.Random) -> Any:
    """Draw a number at an edge."""
    return rng.choice(NUMBERS)


def text(rng: random.Random) -> str:
    """Draw hostile text, sometimes two pieces joined."""
    found = rng.choice(TEXTS)
    return found + rng.choice(TEXTS) if rng.random() < 0.15 else found


def anything(rng: random.Random) -> Any:
    """Draw a value of any type."""
    return rng.choice(
        (
            lambda: number(rng),
            lambda: text(rng),
            lambda: None,
            lambda: rng.random() < 0.5,
            list,
            dict,
            lambda: [number(rng)],
            lambda: {"tensor": number(rng)},
            lambda: {text(rng): text(rng)},
            lambda: [[[]]],
        )
    )()
