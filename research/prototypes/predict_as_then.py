"""Predict schedules again with the code of the commit that has their predictions: python predict_as_then.py SET COMMIT.

For steps whose code hash is that of no commit. Unpacks the commit's package to a temporary folder, runs it on its
traces and schedules, and prints how many predicted times are the committed ones. Needs the history.
"""

from __future__ import annotations

import gzip
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

#: Folders that a prediction reads.
FOLDERS = ("gpusim", "hwmodels")


def main() -> int:
    """Print a line for each step; the exit status is 1 where a time differs."""
    from check_blind import SETS, SUFFIX, files_of, traces_of
    from code_of_results import first_of_each_code, git

    name, commit = sys.argv[1:]
    known = first_of_each_code()
    with tempfile.TemporaryDirectory() as folder:
        unpacked = Path(folder)
        subprocess.run(["tar", "x", "-C", folder], input=git("archive", commit, *FOLDERS), check=True)
        documents = {}
        for file, document in files_of(commit, name):
            if file.endswith(SUFFIX) and document["code"].partition("+")[2] not in known:
                documents[file.removesuffix(SUFFIX)] = document
        for step, trace in traces_of(commit, SETS[name][2], documents).items():
            (unpacked / f"{step}.json.gz").write_bytes(gzip.compress(json.dumps(trace).encode()))
            (unpacked / f"{step}.predicted.json").write_text(json.dumps(documents[step]))
        environment = {**os.environ, "PYTHONPATH": folder}
        words = [sys.executable, str(Path(__file__).resolve()), "--inside", folder]
        return subprocess.run(words, cwd=folder, env=environment, check=False).returncode


def inside(folder: Path) -> int:
    """Predict in the unpacked commit."""
    from gpusim.engine.fast import FastEngine
    from gpusim.plan.graph import OpGraph
    from gpusim.trace.store import read_trace

    package = Path(importlib.import_module("gpusim").__file__ or "")
    assert package.is_relative_to(folder), package
    name = "gpusim.validation.chosen" if (folder / "gpusim" / "validation").exists() else "gpusim.recipes.chosen"
    engine, equal = FastEngine(), Counter[bool]()
    for file in sorted(folder.glob("*.predicted.json")):
        document = json.loads(file.read_text())
        trace = read_trace(file.with_name(file.name.replace(".predicted.json", ".json.gz")))
        graph = OpGraph.build(trace, importlib.import_module(name).hardware_of(trace))
        found = [
            engine.run(plan_of(each, trace, graph), graph.hardware).makespan_ns == each["predicted_ns"]
            for each in document["schedules"]
        ]
        equal.update(found)
        print(f"{document['trace']}: {sum(found)} of {len(found)}")
    print(f"{equal[True]} of {equal.total()} schedules are predicted as then, to the nanosecond")
    return int(equal[False] > 0)


def plan_of(document: dict[str, Any], trace: Any, graph: Any) -> Any:
    """Lower a schedule's document, by the function of the commit's day."""
    import msgspec

    schedules = importlib.import_module("gpusim.plan.schedule")
    if hasattr(schedules, "lower_schedule"):
        return schedules.lower_schedule(msgspec.convert(document, schedules.Schedule), graph)
    index = {op.name: number for number, op in enumerate(trace.ops)}
    order = tuple(index[each["op"]] for each in document["placements"])
    streams, variants = [0] * len(order), [0] * len(order)
    for op, each in zip(order, document["placements"], strict=True):
        streams[op], variants[op] = each.get("stream", 0), each.get("variant", 0)
    schedule = schedules.Schedule(order, tuple(streams), tuple(variants) if any(variants) else ())
    return importlib.import_module("gpusim.plan.lower").lower(graph, schedule)


if __name__ == "__main__":
    sys.exit(inside(Path(sys.argv[2])) if sys.argv[1] == "--inside" else main())
