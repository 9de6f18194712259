"""Families for the checks of replay before a GPU is needed: names of operators, and their arguments."""

from __future__ import annotations

import random

from tests.fuzz import bases
from tests.fuzz.cases import Case
from tests.fuzz.mutate import change, to_json
from tests.fuzz.values import OPERATORS, text
from tests.support.operator_steps import changed_step, operator_steps


def operators_case(rng: random.Random) -> Case:
    """Make names and arguments of a trace's operators, looked up as in replay."""
    document = bases.fresh(rng.choice(bases.traces()[-2:]))
    said = []
    for _ in range(rng.choice((1, 1, 2))):
        o = rng.choice(document["ops"])
        if rng.random() < 0.7:
            namespace, name, overload = (
                o["target"].split(".", 2) if o["target"].count(".") >= 2 else ("aten", "add", "x")
            )
            made = f"{namespace}.{name}.{rng.choice(OPERATORS).rpartition('.')[2]}"
            o["target"] = rng.choice((rng.choice(OPERATORS), made, made, o["target"] + "." + overload, text(rng)))
            said.append(f"target {o['target'][:60]!r}")
        else:
            said.append(change(o, rng.choice(document["ops"]), rng))
    command = (
        ("@operators", "trace.json")
        if rng.random() < 0.8
        else ("replay", "--trace", "trace.json", "--policy", "wavefront")
    )
    return Case("operators", command, {"trace.json": to_json(document)}, ("trace.json",), (), "; ".join(said))


def arguments_case(rng: random.Random) -> Case:
    """Make a small step around an op of any operator in the project's traces, mutated where replay checks."""
    steps = operator_steps()
    document, what = changed_step(rng.choice(steps[rng.choice([*steps])]), rng)
    command = ("@arguments",) if rng.random() < 0.8 else ("replay", "--policy", "sequential", "--trace")
    return Case("arguments", (*command, "trace.json"), {"trace.json": to_json(document)}, ("trace.json",), (), what)
