"""Known defects as cases: each was a traceback, a hang, a memory bomb or a hole, and must be refused or run."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.fuzz import bases
from tests.fuzz.cases import Case
from tests.fuzz.mutate import Raw, bomb, to_json, to_toml

REFUSED, ACCEPTED = "refused", "accepted"
Edit = Callable[[Any], None]

OTHER_THAN_OVERLOADS = (
    "__getattribute__", "__setattr__", "__getattr__", "__call__", "__class__", "__init__", "__dict__", "__reduce__",
    "_op",
    "_overload_names", "overloads", "op", "_schema", "redispatch", "",
)  # fmt: skip
UNCHECKED = (
    "aten._reshape_alias.default",
    "aten.append.t",
    "aten._index_put_impl_.default",
)
MARKUPS = {
    "closing tag": "[/red]",
    "any closing tag": "[/]x",
    "style": "[bold]mk0[/bold]",
    "link": "[link=http://e.org]mk0 bold[/link]",
}
ESCAPES = {"colour": "\x1b[31mred", "title": "\x1b]0;t\x07", "C1": "\x9b31m", "NUL": "a\x00b", "direction": "\u202eabc"}


def corpus() -> list[Case]:
    """All known cases."""
    return [
        *_operators(),
        *_times(),
        *_grids(),
        *_hardware(),
        *_text(),
        *_bombs(),
        *_toml(),
        *_outputs(),
        *_stores(),
        *_refusals(),
        *_measured_zeros(),
    ]


def _trace(
    name: str, edit: Edit, argv: tuple[str, ...], expected: str = "", base: int = 0, outputs: tuple[str, ...] = ()
) -> Case:
    document = bases.fresh(bases.traces()[base])
    edit(document)
    return Case("known", argv, {"trace.json": to_json(document)}, ("trace.json",), outputs, name, expected)


def _operators() -> Iterator[Case]:
    def target(words: str) -> Edit:
        return lambda document: document["ops"][0].update(target=words)

    for name in OTHER_THAN_OVERLOADS:
        yield _trace(f"attribute {name}", target(f"aten.add.{name}"), ("@operators", "trace.json"), REFUSED, -1)
    for name in UNCHECKED:
        yield _trace(f"operator {name}", target(name), ("@operators", "trace.json"), REFUSED, -1)
    yield _trace("captured operators", lambda document: None, ("@operators", "trace.json"), ACCEPTED, -1)
    yield _trace(
        "attribute, replay",
        target("aten.add.__getattribute__"),
        ("replay", "--trace", "trace.json", "--policy", "wavefront"),
        REFUSED,
        -1,
    )


def _all_kernels(**fields: Any) -> Edit:
    def edit(document: Any) -> None:
        for op in document["ops"]:
            for kernel in op["kernels"]:
                kernel.update(fields)

    return edit


def _times() -> Iterator[Case]:
    """Steps of seconds to hours."""
    for dur_ns in (10**8, 4 * 10**9, 8 * 10**9, 10**11, 36 * 10**11):
        for engine in ("fast", "reference"):
            words = ("simulate", "trace.json", "--json", "--engine", engine)
            yield _trace(
                f"kernels of {dur_ns} ns, {engine}", _all_kernels(dur_ns=dur_ns), words, ACCEPTED, 1
            )  # 1: no measured time, to which kernels would be scaled

    def host(document: Any) -> None:
        document["ops"][0]["host_ns"] = 10**12

    yield _trace("host time of 1000 s", host, ("simulate", "trace.json", "--launch", "stream", "--json"), base=1)
    yield _trace("kernels of 2^62 ns", _all_kernels(dur_ns=2**62), ("simulate", "trace.json", "--json"), base=1)


def _grids() -> Iterator[Case]:
    for grid in ([2**31 - 1, 1, 1], [2**31, 1, 1], [2**62, 1, 1], [10**18, 1, 1], [65535, 65535, 65535], [1, 65536, 1]):
        for words in (("simulate", "trace.json", "--json"), ("limits", "trace.json", "--json")):
            yield _trace(f"grid {grid}", _all_kernels(grid=grid), words)
    yield _trace("block of 2^40 threads", _all_kernels(block=[2**40, 1, 1]), ("simulate", "trace.json"), REFUSED)


def _hardware() -> Iterator[Case]:
    for section, field, value in (
        ("stream", "chain_ns", 1e15), ("stream", "start_ns", 1e15), ("stream", "event_host_ns", 1e15), ("graph",
        "front_end_ns", 1e15),
        ("graph", "busy_ns", 1e15), ("limits", "blocks_per_sm", 10**18), ("limits", "threads_per_block", 255),
        ("limits", "sms", 2**40),
    ):  # fmt: skip
        for words in (("--json",), ("--json", "--launch", "stream")):
            document = bases.fresh(bases.hardware()[0])
            document[section][field] = value
            files = {"trace.json": to_json(bases.traces()[0]), "hw.json": to_json(document)}
            argv = ("simulate", "trace.json", "--hw", "hw.json", *words)
            yield Case("known", argv, files, ("hw.json",), (), f"{section}.{field} = {value}")


def _text() -> Iterator[Case]:
    commands: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
        (("explore", "trace.json", "--budget", "0.05", "--evaluations", "2"), ()), (("simulate", "trace.json"), ()),
        (("limits", "trace.json"), ()), (("explain", "trace.json"), ()), (("whatif", "trace.json"), ()),
        (("sweep", "--trace", "trace.json", "--policy", "wavefront", "-o", "out.sqlite"), ("out.sqlite",)),
    )  # fmt: skip

    def named(words: str) -> Edit:
        def edit(document: Any) -> None:
            document["model"]["network"] = words
            for op in document["ops"][1:2]:
                op["name"] = words

        return edit

    for what, words in (MARKUPS | ESCAPES).items():
        for argv, outputs in commands:
            yield _trace(f"{what} in names", named(words), argv, outputs=outputs)
        yield _trace(
            f"{what} in a refusal", lambda d, w=words: d["ops"][0].update({w: 1}), ("simulate", "trace.json"), REFUSED
        )  # type: ignore[misc]
    for words in ("=cmd|' /C calc'!A0", "+1+1", "@SUM(A1)", "-2+3"):
        export = ("sweep", "--trace", "trace.json", "--policy", "wavefront", "-o", "out.sqlite", "--export", "out.csv")
        yield _trace("formula", named(words), ("limits", "trace.json", "--csv", "out.csv"), outputs=("out.csv",))
        yield _trace("formula", named(words), export, outputs=("out.sqlite", "out.csv"))
    for words in ("<img src=x onerror=alert(1)>", "</script><script>alert(1)</script>"):
        yield _trace("page", named(words), ("simulate", "trace.json", "--html", "out.html"), outputs=("out.html",))


def _bombs() -> Iterator[Case]:
    for piece, mib in ((b"[],", 240), (b"\x00", 1024), (b"0,", 1000)):
        for words in (("@upload", "trace.json.gz"), ("simulate", "trace.json.gz")):
            yield Case(
                "known",
                words,
                {"trace.json.gz": bomb(piece, mib)},
                ("trace.json.gz",),
                (),
                f"{mib} MiB of {piece!r}",
                REFUSED,
            )
    measured = {"trace.json": to_json(bases.traces()[0]), "m.json.gz": bomb(b"[],", 240)}
    yield Case(
        "known", ("@measured", "m.json.gz"), measured, ("m.json.gz",), (), "240 MiB of [], as a measurement", REFUSED
    )


def _toml() -> Iterator[Case]:
    long = Raw("1" * 5000)
    for name, document in {
        "number of 5,000 digits": {"traces": ["trace.json"], "seed": long},
        "NUL in a trace": {"traces": ["a\x00b.json"]},
        "NUL in a hardware model": {"traces": ["trace.json"], "hardware": ["a\x00b.json"]},
        "long name": {"traces": ["a" * 5000 + ".json"]},
        "escape in a name": {"traces": ["\x1b[31m.json"]},
        "trace for a hardware model": {"traces": ["trace.json"], "hardware": ["trace.json"]},
    }.items():
        files = {"sweep.toml": to_toml(document), "trace.json": to_json(bases.traces()[0])}
        yield Case(
            "known", ("sweep", "sweep.toml", "-o", "out.sqlite"), files, ("sweep.toml",), ("out.sqlite",), name, REFUSED
        )
    for name, recipe in {
        "number of 5,000 digits": bases.RECIPES[0] | {"seed": long},
        "NUL in a trace": bases.RECIPES[0] | {"case": [{"trace": "a\x00b.json"}]},
        "long trace": bases.RECIPES[0] | {"case": [{"trace": "a" * 5000}]},
    }.items():
        files = {"recipe.toml": to_toml(recipe)}
        yield Case("known", ("validate", "recipe.toml", "-o", "."), files, ("recipe.toml",), (), name, REFUSED)

    def storages(document: Any) -> None:
        for storage in document["storages"]:
            storage["bytes"] = 2**62

    argv = ("sweep", "--trace", "trace.json", "--policy", "wavefront", "-o", "out.sqlite")
    yield _trace("storages of 2^62 bytes", storages, argv, outputs=("out.sqlite",))
    yield _trace("storages of 2^62 bytes", storages, ("simulate", "trace.json"))


def _outputs() -> Iterator[Case]:
    """Names too long for a file, also with a temporary file's suffix; folders; full devices."""
    trace = {"trace.json": to_json(bases.traces()[0])}
    for name in (
        "o" * 400 + ".json",
        "o" * 250 + ".json",
        "o" * 247 + ".json",
        "folder",
        "nowhere/out.json",
        "/dev/full",
    ):
        for words in (
            ("simulate", "trace.json", "--perfetto", name), ("simulate", "trace.json", "--html", name),
            ("explore", "trace.json", "--budget", "0.05", "--evaluations", "2", "-o", name), ("limits", "trace.json",
            "--csv", name),
            ("sweep", "--trace", "trace.json", "--policy", "wavefront", "-o", name),
        ):  # fmt: skip
            yield Case("known", words, trace, (), ("*",), f"output {name[:20]} of {len(name)} letters")


def _stores() -> Iterator[Case]:
    statements = {
        "no table": ("DROP TABLE points",),
        "one column": ("DROP TABLE points", "CREATE TABLE points(key text)", "INSERT INTO points VALUES ('1')"),
        "text for numbers": ("UPDATE points SET makespan_ns = 'abc', speedup = 'x'",),
        "markup and escapes": ("UPDATE points SET trace = '[/red]' || char(27) || '[2J', policy = '=1+1'",),
        "markup in an error": ("UPDATE points SET error = '[/red]' || char(27)",),
        "blobs": ("UPDATE points SET trace = x'00ff', worker = x'ff'",),
        "infinite": ("UPDATE points SET speedup = 9e999, makespan_ns = -1",),
        "a write-ahead log": ("PRAGMA journal_mode = WAL",),
        "a statement that is no text": (
            "PRAGMA writable_schema = ON",
            "UPDATE sqlite_master SET sql = CAST('CREATE TABLE points (key ' || x'd2' || ')' AS TEXT)",
        ),
    }
    for name, each in statements.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "s"
            path.write_bytes(bases.store())
            connection = sqlite3.connect(path, isolation_level=None)
            for statement in each:
                connection.execute(statement)
            connection.close()
            files = {"store.sqlite": path.read_bytes(), "trace.json": to_json(bases.traces()[0])}
        read = Case("known", ("sweep", "-o", "store.sqlite"), files, ("store.sqlite",), (), name)
        yield read
        yield replace(read, argv=(*read.argv, "--json"))
        yield replace(read, argv=(*read.argv, "--export", "out.csv"), outputs=("out.csv",))
        more = ("--trace", "trace.json", "--hw", "h200", "--policy", "wavefront", "--streams", "2")
        yield replace(read, argv=("sweep", *more, "-o", "store.sqlite"))


def _refusals() -> Iterator[Case]:
    """Values are cut in messages."""
    long = "A" * 5000
    compared = bases.fresh(bases.hardware()[0])
    compared["limits"]["threads_per_sm"] = 2
    files = {"hw.json": to_json(compared)}
    yield Case("known", ("hardware", "--compare", "hw.json", "h200"), files, ("hw.json",), (), "no room", REFUSED)
    other_gpu = bases.fresh(bases.hardware()[0])
    other_gpu["gpu"] = "another"
    files = {"hw.json": to_json(other_gpu)}
    yield Case("known", ("hardware", "--compare", "hw.json", "h200"), files, ("hw.json",), (), "other GPU", REFUSED)
    spaced = "x " * 2500
    faster = ("whatif", "trace.json", "--op", "9" * 5000, "2")
    yield _trace("op of 5,000 digits", lambda d: None, faster)
    yield _trace(
        "long field with spaces", lambda d: d["ops"][0].update({spaced: 1}), ("simulate", "trace.json"), REFUSED
    )
    recipe = {"recipe.toml": to_toml(bases.RECIPES[0] | {"case": [{"trace": "a" * 5000}]})}
    for words in (
        ("simulate", f"{spaced}.json"), ("validate", f"{spaced}.toml", "-o", "."),
        ("validate", "recipe.toml", "-o", long),
        ("validate", "recipe.toml", "-o", ".", "--stage", "predict"),
        ("validate", "recipe.toml", "--again", "--traces", long), ("figure", "fidelity", long, "--html", "out.html"),
    ):  # fmt: skip
        yield Case("known", words, recipe, (), (), "names too long", REFUSED)
    for what, value in (("texts", ["a"] * 3000), ("lists", Raw("[" * 900 + "]" * 900)), ("keys", {long: 1, "a": 2})):
        yield _trace(
            f"{what} for a tensor",
            lambda d, v=value: d["ops"][0].update(args=[{"tensor": v}, v]),  # type: ignore[misc]
            ("simulate", "trace.json"),
            REFUSED,
        )
    yield _trace("long phase", lambda d: d["ops"][0].update(phase=long), ("simulate", "trace.json"), REFUSED)
    yield _trace("long dtype", lambda d: d["tensors"][0].update(dtype=long), ("simulate", "trace.json"), REFUSED)
    yield _trace("long field", lambda d: d["ops"][0].update({long: 1}), ("simulate", "trace.json"), REFUSED)
    yield _trace(
        "number of 5,000 digits",
        lambda d: d["ops"][0].update(host_ns=Raw("9" * 5000)),
        ("simulate", "trace.json"),
        REFUSED,
    )
    yield _trace(
        "lists 100,000 deep",
        lambda d: d["ops"][0].update(args=Raw("[" * 10**5 + "]" * 10**5)),
        ("simulate", "trace.json"),
        REFUSED,
    )
    for option, value in (
        ("--policy", long),
        ("--hw", long),
        ("--streams", "9" * 5000),
        ("--launch", "[/red]"),
        ("--engine", "\x1b[31m"),
    ):
        trace = {"trace.json": to_json(bases.traces()[0])}
        yield Case("known", ("simulate", "trace.json", option, value), trace, (), (), f"{option} {value[:20]}", REFUSED)


def _measured_zeros() -> Iterator[Case]:
    """Measured times must be above 0: others are divided by them."""
    places: tuple[tuple[str, Any, str, str], ...] = (
        ("@results", bases.results()[0], "cases", "measured_ns"),
        ("@results", bases.results()[0], "cases", "sequential_ns"),
        ("@results", bases.results()[0], "cases", "predicted_ns"),
        ("@pairs", bases.pairs()[0], "cases", "together_ns"),
    )
    for reader, base, rows, field in places:
        document = bases.fresh(base)
        document[rows][0][field] = 0
        files = {"file.json": to_json(document)}
        yield Case("known", (reader, "file.json"), files, ("file.json",), (), f"{field} = 0", REFUSED)
    document = bases.fresh(bases.pairs()[0])
    document["cases"][0]["alone_ns"] = []
    files = {"file.json": to_json(document)}
    yield Case("known", ("@pairs", "file.json"), files, ("file.json",), (), "no kernels", REFUSED)
    files = {"file.json": to_json(bases.fresh(bases.pairs()[0]) | {"cases": []})}
    yield Case("known", ("@pairs", "file.json"), files, ("file.json",), (), "no pairs", REFUSED)
