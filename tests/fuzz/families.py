"""The families: for each format a generator of cases, and one of command lines. Same seed and number, same case."""

from __future__ import annotations

import json
import pickle
import random
import sqlite3
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from tests.fuzz import bases
from tests.fuzz.cases import Case
from tests.fuzz.mutate import change_bytes, changed, named, to_json, to_toml
from tests.fuzz.operators import arguments_case, operators_case
from tests.fuzz.plans import layers_case, parallel_plan_case, topology_case
from tests.fuzz.profiles import profiles_case
from tests.fuzz.stages import (
    again_case,
    memory_again_case,
    memory_predictions_case,
    predictions_case,
    recipe_stage_case,
    stage_times_case,
    trials_case,
)
from tests.fuzz.values import NUMBERS, TEXTS, Raw, text


def _commands_on_a_trace(name: str, rng: random.Random) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return a command that reads a trace, and the files that it writes."""
    policy = rng.choice(("critical_path", "wavefront", "round_robin", "sequential"))
    return rng.choice(
        (
            (("simulate", name, "--json"), ()),
            (("simulate", name, "--json"), ()),
            (("simulate", name, "--json", "--engine", "reference"), ()),
            (("simulate", name, "--policy", policy, "--streams", "3", "--launch", "stream", "--json"), ()),
            (("simulate", name), ()),
            (("simulate", name, "--perfetto", "out.json"), ("out.json",)),
            (("simulate", name, "--perfetto", "out.json.gz"), ("out.json.gz",)),
            (("simulate", name, "--html", "out.html"), ("out.html",)),
            (("explore", name, "--budget", "0.05", "--evaluations", "2", "-o", "out.json"), ("out.json",)),
            (("explore", name, "--budget", "0.05", "--evaluations", "2", "--json", "--hw", "a100-80gb"), ()),
            (("explain", name), ()),
            (("explain", name, "--json"), ()),
            (("limits", name, "--csv", "out.csv"), ("out.csv",)),
            (("limits", name, "--json"), ()),
            (("whatif", name), ()),
            (("whatif", name, "--json", "--bandwidth", "2", "--sms", "64"), ()),
            (("sweep", "--trace", name, "--hw", "k40", "--policy", policy, "--streams", "2", "-o", "out.sqlite",
            "--export", "out.csv"),
             ("out.sqlite", "out.csv")),
            (("replay", "--trace", name, "--policy", policy), ()),
            (("figure", "breakdown", name, "--html", "out.html"), ("out.html",)),
            (("memory", name), ()),
            (("memory", name, "--json"), ()),
            (("memory", name, "--policy", "vdnn_all", "-o", "out.json", "--html", "out.html"),
             ("out.json", "out.html")),
            (("memory", name, "--policy", "keep_all", "--snapshot", "out.pickle"), ("out.pickle",)),
            (("parallel", name, "--gpus", "2", "--json"), ()),
            (("parallel", name, "--gpus", "2", "--hw", "a100-80gb"), ()),
            (("transfer", name, "--hw", "h200,k40", "--evaluations", "2", "--json"), ()),
            (("export", name, "--policy", policy, "--table", "out.csv"), ("out.csv",)),
            (("export", name, "--policy", policy, "--python", "out.py"), ("out.py",)),
            (("export", name, "--policy", policy, "--chakra", "out.et"), ("out.et",)),
            (("@upload", name), ()),
        )
    )  # fmt: skip


def trace_case(rng: random.Random) -> Case:
    data, what = changed(rng.choice(bases.traces()), rng.choice(bases.traces()), rng)
    name, data = named("trace", data, rng)
    argv, outputs = _commands_on_a_trace(name, rng)
    return Case("trace", argv, {name: data}, (name,), outputs, what)


def schedule_case(rng: random.Random) -> Case:
    trace, schedule = rng.choice(bases.schedules())
    data, what = changed(schedule, rng.choice(bases.schedules())[1], rng)
    name, data = named("schedule", data, rng)
    argv, outputs = rng.choice(
        (
            (("simulate", "trace.json", "--schedule", name, "--json"), ()),
            (("simulate", "trace.json", "--schedule", name, "--launch", "stream", "--json"), ()),
            (("simulate", "trace.json", "--schedule", name, "--perfetto", "out.json"), ("out.json",)),
            (("explain", "trace.json", "--schedule", name), ()),
            (("replay", "--trace", "trace.json", "--schedule", name), ()),
        )
    )
    if argv[0] == "replay":  # synthetic operators are refused before the schedule is read
        trace, schedule = rng.choice(bases.schedules()[-6:])
        data, what = changed(schedule, rng.choice(bases.schedules())[1], rng)
        name, data = "schedule.json", data
        argv = (*argv[:-1], name)
    return Case("schedule", argv, {"trace.json": to_json(trace), name: data}, (name,), outputs, what)


def memory_plan_case(rng: random.Random) -> Case:
    trace, plan = rng.choice(bases.memory_plans())
    data, what = changed(plan, rng.choice(bases.memory_plans())[1], rng)
    name, data = named("plan", data, rng)
    argv, outputs = rng.choice(
        (
            (("simulate", "trace.json", "--schedule", name, "--json"), ()),
            (("simulate", "trace.json", "--schedule", name, "--engine", "reference", "--json"), ()),
            (("simulate", "trace.json", "--schedule", name, "--perfetto", "out.json"), ("out.json",)),
            (("export", "trace.json", "--schedule", name, "--table", "out.csv"), ("out.csv",)),
            (("explain", "trace.json", "--schedule", name), ()),
            (("@memory_plan", name), ()),
        )
    )
    return Case("memory plan", argv, {"trace.json": to_json(trace), name: data}, (name,), outputs, what)


def hardware_case(rng: random.Random) -> Case:
    model = rng.choice(bases.hardware())
    data, what = changed(model, rng.choice(bases.hardware()), rng)
    argv, outputs = rng.choice(
        (
            (("simulate", "trace.json", "--hw", "hw.json", "--json"), ()),
            (("simulate", "trace.json", "--hw", "hw.json", "--launch", "stream", "--json"), ()),
            (("simulate", "trace.json", "--hw", "hw.json", "--engine", "reference", "--json"), ()),
            (("explore", "trace.json", "--hw", "hw.json", "--budget", "0.05", "--evaluations", "2"), ()),
            (("limits", "trace.json", "--hw", "hw.json"), ()),
            (("explain", "trace.json", "--hw", "hw.json"), ()),
            (("whatif", "trace.json", "--hw", "hw.json"), ()),
            (("hardware", "--compare", "hw.json", model["name"]), ()),
            (("memory", "trace.json", "--hw", "hw.json", "--json"), ()),
            (("parallel", "trace.json", "--gpus", "2", "--hw", "hw.json", "--json"), ()),
            (("transfer", "trace.json", "--hw", "h200,hw.json", "--evaluations", "2", "--json"), ()),
            (("sweep", "--trace", "trace.json", "--hw", "hw.json", "--policy", "wavefront", "-o", "out.sqlite"),
            ("out.sqlite",)),
        )
    )  # fmt: skip
    trace = to_json(rng.choice(bases.traces()[:4]))
    return Case("hardware", argv, {"trace.json": trace, "hw.json": data}, ("hw.json",), outputs, what)


def measurement_case(rng: random.Random) -> Case:
    trace, measurement = rng.choice(bases.measurements())
    data, what = changed(measurement, rng.choice(bases.measurements())[1], rng)
    return _measured_case("measurement", trace, data, what, rng)


def timeline_case(rng: random.Random) -> Case:
    trace, timeline = rng.choice(bases.timelines())
    data, what = changed(timeline, rng.choice(bases.timelines())[1], rng)
    return _measured_case("timeline", trace, data, what, rng)


def _measured_case(family: str, trace: Any, data: bytes, what: str, rng: random.Random) -> Case:
    name, data = named("measured", data, rng)
    files = {"trace.json": to_json(trace), name: data}
    draw = rng.random()
    if draw < 0.2:
        return Case(family, ("@measured_upload", name), files, (name,), (), what)
    if draw < 0.5:
        argv = ("simulate", "trace.json", "--html", "out.html", "--measured", name)
        return Case(family, argv, files, (name,), ("out.html",), what)
    return Case(family, ("@measured", name), files, (name,), (), what)


def _document_case(
    family: str, stem: str, documents: Callable[[], tuple[Any, ...]], commands: tuple[tuple[str, ...], ...]
) -> Callable[..., Case]:
    def make(rng: random.Random) -> Case:
        data, what = changed(rng.choice(documents()), rng.choice(documents()), rng)
        name = f"{stem}.json"
        if family == "replayed":
            name, data = named(stem, data, rng)
        argv = tuple(name if word == "FILE" else word for word in rng.choice(commands))
        outputs = tuple(word for word in argv if word.startswith("out."))
        return Case(family, argv, {name: data}, (name,), outputs, what)

    return make


def recipe_case(rng: random.Random) -> Case:
    data, what = changed(rng.choice(bases.RECIPES), rng.choice(bases.RECIPES), rng, to_toml)
    files = {"recipe.toml": data, "trace.json": to_json(bases.traces()[-2])}
    # The trace, too: a recipe may request data that it lacks.
    return Case("recipe", ("validate", "recipe.toml", "-o", "."), files, ("recipe.toml", "trace.json"), (), what)


def sweep_case(rng: random.Random) -> Case:
    data, what = changed(rng.choice(bases.SWEEPS), rng.choice(bases.SWEEPS), rng, to_toml)
    files = {"sweep.toml": data, "trace.json": to_json(bases.traces()[0])}
    words = ("sweep", "sweep.toml", "-o", "out.sqlite", *(("--json",) if rng.random() < 0.5 else ()))
    return Case("sweep", words, files, ("sweep.toml",), ("out.sqlite",), what)


def store_case(rng: random.Random) -> Case:
    """A sweep's store with wrong values, columns and tables, or broken bytes."""
    data, said = bases.store(), []
    if rng.random() < 0.75:
        for _ in range(rng.choice((1, 1, 2, 3))):
            data, what = _changed_store(data, rng)
            said.append(what)
    else:
        data, what = change_bytes(data, "", rng)
        said.append(what)
    sum_up = ("sweep", "-o", "store.sqlite")
    argv, outputs = rng.choice(
        (
            (sum_up, ()),
            ((*sum_up, "--json"), ()),
            ((*sum_up, "--export", "out.csv"), ("out.csv",)),
            (("sweep", "--trace", "trace.json", "--hw", "h200", "--policy", "wavefront", "--streams", "2", "-o",
            "store.sqlite"), ()),
        )
    )  # fmt: skip
    files = {"store.sqlite": data, "trace.json": to_json(bases.traces()[0])}
    return Case("store", argv, files, ("store.sqlite",), outputs, "; ".join(said))


def _changed_store(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    def plain_number() -> Any:
        return rng.choice([n for n in NUMBERS if not isinstance(n, Raw) and (isinstance(n, float) or abs(n) < 2**63)])

    def plain_text() -> str:
        return rng.choice(TEXTS).encode("utf-8", "replace").decode()

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s"
        path.write_bytes(data)
        connection = sqlite3.connect(path, isolation_level=None)
        try:
            columns = [row[1] for row in connection.execute("PRAGMA table_info(points)")]
            column = rng.choice(columns) if columns else "key"
            value = rng.choice((plain_number, plain_text, lambda: None, lambda: b"\x00\xff", lambda: b"text"))()
            statement, values = rng.choice(
                (
                    *[(f"UPDATE points SET {column} = ?", (value,))] * 4,
                    *[(f"UPDATE points SET {column} = ? WHERE rowid = 1", (value,))] * 4,
                    ("UPDATE points SET makespan_ns = ?", (plain_number(),)),
                    ("UPDATE points SET speedup = ?", (plain_number(),)),
                    ("UPDATE points SET trace = ?, policy = ?", (plain_text(), plain_text())),
                    ("UPDATE points SET error = ?", (plain_text(),)),
                    (f"ALTER TABLE points DROP COLUMN {column}", ()),
                    (f"ALTER TABLE points RENAME COLUMN {column} TO other", ()),
                    ("ALTER TABLE points ADD COLUMN more TEXT", ()),
                    ("ALTER TABLE points RENAME TO other", ()),
                    ("DROP TABLE points", ()),
                    ("DELETE FROM points", ()),
                    ("CREATE TRIGGER t AFTER INSERT ON points BEGIN DELETE FROM points; END", ()),
                    ("CREATE VIEW v AS SELECT * FROM points", ()),
                    ("PRAGMA user_version = 2", ()),
                    ("PRAGMA user_version = -1", ()),
                    ("PRAGMA application_id = 1", ()),
                    ("PRAGMA encoding = 'UTF-16'", ()),
                    ("PRAGMA journal_mode = WAL", ()),
                )
            )
            try:
                connection.execute(statement, values)
            except (sqlite3.DatabaseError, UnicodeEncodeError):
                statement += ": not possible"
        finally:
            connection.close()
        return path.read_bytes(), f"{statement} {values!r}"[:200]


def _to_pickle(document: Any) -> bytes:
    """Pickle the values of a JSON document; bytes that are not a pickle where that fails."""
    encoded = to_json(document)
    try:
        return pickle.dumps(json.loads(encoded))
    except (ValueError, RecursionError):
        return encoded


def snapshot_case(rng: random.Random) -> Case:
    """Make a memory snapshot of PyTorch, which is a pickle."""
    data, what = changed(bases.memory_snapshot(), bases.memory_snapshot(), rng, _to_pickle)
    words = ("memory", "trace.json", "--policy", "keep_all", "--measured", "run.pickle")
    argv, outputs = rng.choice((((*words, "--json"), ()), (words, ()), ((*words, "-o", "out.json"), ("out.json",))))
    files = {"trace.json": to_json(bases.training_trace()), "run.pickle": data}
    return Case("snapshot", argv, files, ("run.pickle",), outputs, what)


# --- Command lines ---

#: Valid words of each command; mutations change one of the options, or a word.
COMMANDS: dict[str, tuple[str, ...]] = {
    "simulate": ("trace.json", "--streams", "3", "--json"),
    "explore": ("trace.json", "--budget", "0.05", "--evaluations", "2", "--json"),
    "limits": ("trace.json",),
    "explain": ("trace.json",),
    "whatif": ("trace.json",),
    "figure": ("memory", "trace.json", "--html", "out.html"),
    "sweep": ("--trace", "trace.json", "--hw", "h200", "--policy", "wavefront", "--streams", "2", "-o", "out.sqlite"),
    "replay": ("--trace", "trace.json", "--policy", "wavefront"),
    "validate": ("recipe.toml", "-o", "."),
    "calibrate": ("-o", "out.json"),
    "capture": ("m.py:f", "--mode", "infer", "--batch", "1", "-o", "out.json"),
    "traces": (),
    "hardware": ("--compare", "h200", "h200"),
    "bench": ("--trace", "trace.json", "--seconds", "0.001"),
}
#: Options left out: they need a browser, other machines, or the requested time.
NOT_CHANGED = {"--png", "--scheduler", "--seconds", "--help", "--workers"}
PLAIN_VALUES = (
    "0", "-1", "1", "2", "3", "128", "129", "1000", "2147483648", "9007199254740993", "4611686018427387904", "1e308",
    "1e-308",
    "1e400", "nan", "-nan", "inf", "-inf", "-0.0", "0.5", "9" * 5000, "-" + "9" * 400, "\u0661", "\uff12", "\u00b2",
    "\u0967", "1_000",
    "0x10", "1e3", " 3", "3 ", "+3", "3.0", "3,", "1,2,3", ",", "2,2", "64+68", "64+", "+", "auto", "0+132",
    "-1+133", "66+66+66",
    "100us:200us", "1:2", "0ns:1ns", "9" * 400 + "us:" + "9" * 401 + "us", "1.7976931348623157e308ns:2ns",
    "\u0661us:\u0662ms",
    "a,b", "stem,join", "stem,stem", "0,1", "-1,0", "99,100", "h200", "k40", "h201", "trace.json", "recipe.toml",
    "nothing.json",
    "nothing.json.gz", ".", "..", "/", "-", "--", "@trace.json", "~", "~root", "$HOME", "x/y/z.json", "folder",
    "folder/out.json",
    "/dev/full", "/dev/null", "/proc/self/mem", "/proc/self/environ", "trace.json/x", "out.json", "out.json.gz",
    "out.csv",
    "out.parquet", "out.html", "o" * 252, "o" * 250 + ".json", "o" * 300, "o" * 5000, "o/" * 300,
    "\udcff\udcfe.json", "*", "*.json",
    "[", "fast", "reference", "graph", "stream", "wavefront", "all", "\u0130" * 100, "tcp://1.2.3.4:5",
)  # fmt: skip


def options_case(rng: random.Random) -> Case:
    """Make a command with odd values, repeated, missing or foreign options."""
    name = rng.choice(tuple(COMMANDS))
    words = list(COMMANDS[name])
    said = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        said.append(_changed_words(name, words, rng))
    recipe = to_toml(bases.RECIPES[0])
    files = {
        "trace.json": to_json(rng.choice(bases.traces())),
        "recipe.toml": recipe,
        "schedule.json": to_json(bases.schedules()[0][1]),
    }
    words = [word.replace("\x00", "") for word in words]
    return Case("options", (name, *words), files, (), ("*",), "; ".join(said))


def _changed_words(name: str, words: list[str], rng: random.Random) -> str:
    parameters = [p for p in _parameters(name) if not NOT_CHANGED.intersection(p.opts)]
    value = rng.choice(PLAIN_VALUES) if rng.random() < 0.75 else text(rng)
    how = rng.random()
    if how < 0.7 and parameters:
        parameter = rng.choice(parameters)
        if isinstance(parameter, click.Argument):
            if words and not words[0].startswith("-"):
                words[0] = value
            else:
                words.insert(0, value)
            return f"argument {value[:40]!r}"
        option = rng.choice(parameter.opts)
        if isinstance(parameter, click.Option) and parameter.is_flag:
            words.append(option)
            return option
        while option in words:  # once, unless repetition is intended
            at = words.index(option)
            del words[at : at + 1 + parameter.nargs]
            if rng.random() < 0.2:
                words += [option, *[value] * parameter.nargs]
        words += (
            [f"{option}={value}"]
            if parameter.nargs == 1 and rng.random() < 0.2
            else [option, *[value] * parameter.nargs]
        )
        return f"{option} {value[:40]!r}"
    if how < 0.85 and words:
        at = rng.randrange(len(words))
        if words[at] in NOT_CHANGED or (at and words[at - 1] in NOT_CHANGED) or name == "bench":
            return "nothing"
        words[at] = value
        return f"word {at} {value[:40]!r}"
    if how < 0.92 and words and name not in ("bench", "explore"):  # without their limits they run as long as they may
        return f"without {words.pop(rng.randrange(len(words)))!r}"
    words.append(value)
    return f"and {value[:40]!r}"


def _parameters(name: str) -> list[click.Parameter]:
    from gpusim.cli import cli

    return [p for p in cli.commands[name].params if p.expose_value or p.opts]


FAMILIES: dict[str, Callable[[random.Random], Case]] = {
    "trace": trace_case,
    "schedule": schedule_case,
    "memory plan": memory_plan_case,
    "hardware": hardware_case,
    "measurement": measurement_case,
    "timeline": timeline_case,
    "results": _document_case(
        "results",
        "results",
        bases.results,
        (("@results", "FILE"), ("@results", "FILE"), ("figure", "fidelity", "FILE", "--html", "out.html")),
    ),
    "pairs": _document_case("pairs", "pairs", bases.pairs, (("@pairs", "FILE"),)),
    "rules": _document_case("rules", "rules", bases.rules, (("@rules", "FILE"),)),
    "replayed": _document_case("replayed", "replayed", bases.replayed, (("@replayed", "FILE"),)),
    "recipe": recipe_case,
    "sweep": sweep_case,
    "store": store_case,
    "options": options_case,
    "operators": operators_case,
    "arguments": arguments_case,
    "profiles": profiles_case,
    "snapshot": snapshot_case,
    "hyper_q": _document_case("hyper_q", "hyper_q", bases.hyper_q, (("@hyper_q", "FILE"),)),
    "layers": layers_case,
    "topology": topology_case,
    "parallel_plan": parallel_plan_case,
    "predictions": predictions_case,
    "memory_predictions": memory_predictions_case,
    "recipe_stage": recipe_stage_case,
    "stage_times": stage_times_case,
    "trials": trials_case,
    "again": again_case,
    "memory_again": memory_again_case,
}
#: Relative frequency of each family.
SHARES: dict[str, int] = {
    "trace": 40, "schedule": 10, "memory plan": 6, "hardware": 12, "measurement": 4, "timeline": 5, "results": 2,
    "pairs": 1, "rules": 1, "replayed": 1,
    "recipe": 4, "sweep": 5, "store": 5, "options": 8, "operators": 5, "arguments": 7, "profiles": 25, "snapshot": 4,
    "hyper_q": 1, "layers": 6, "topology": 4, "parallel_plan": 5, "predictions": 3,
    "memory_predictions": 3, "stage_times": 2, "recipe_stage": 3, "trials": 1, "again": 4, "memory_again": 4,
}  # fmt: skip


def make_case(family: str, seed: int, index: int) -> Case:
    """Make case `index` of a family."""
    return FAMILIES[family](random.Random(f"{seed}/{family}/{index}"))


def split(cases: int, families: tuple[str, ...]) -> dict[str, int]:
    """Return the number of cases of each family, at least one each."""
    whole = sum(SHARES[name] for name in families)
    counts = {name: max(1, cases * SHARES[name] // whole) for name in families}
    counts[families[0]] += max(0, cases - sum(counts.values()))
    return counts
