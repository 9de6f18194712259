"""Compare blind sets with the predictions committed before: python research/prototypes/check_blind.py.

For each set that was predicted in a commit of its own: for how many steps that commit comes before the first one with a
measurement, how many cases have the same prediction and interval in both, how many replayed schedules are the
predicted ones, op for op, for how many steps the trace is still that of the predictions, and whether the hash of the
predicting code is that of a commit up to the predictions. Needs the repository's history.
"""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
import zipfile
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from code_of_results import first_of_each_code, git

#: Set -> commits with its predictions, its results file, and the sets that have its traces.
SETS = {
    "kinds": (("02f5184", "bac44ff"), "kinds_h200_20261123", ("kinds",)),
    "blind_kinds": (("3010061",), "blind_kinds_h200_20261124", ("blind_kinds",)),
    "blind_intervals": (("1450b22",), "blind_intervals_h200_20261126", ("blind_intervals",)),
    "blind_last": (("2ff1783", "5e4f4b3"), "blind_last_h200_20261129", ("blind_last",)),
    "blind_next": (("09daa20",), "blind_next_h200_20261129", ("blind_next",)),
    "blind_products": (("9de4936",), "blind_products_h200_20261130", ("blind_products",)),
    "blind_turnover": (("de6c4e6",), "blind_turnover_h200_20261130", ("blind_turnover",)),
    "blind_recommended": (("62b0641",), "blind_recommended_h200_20261130", ("blind_recommended",)),
    "blind_convolutional": (("bb73ae5",), "blind_convolutional_h200_20261130", ("blind_convolutional",)),
    "neighbours": (
        ("382bc5f", "89111b9", "f4b5e27", "15b75e6"),
        "neighbours_h200_20261124",
        ("search_inference", "search_training", "search_training_32", "search_training_large", "kinds"),
    ),
    "neighbours_few": (("eb3e0a4",), "neighbours_few_h200_20261129", ("search_inference",)),
    "neighbours_more": (("6e145fe",), "neighbours_more_h200_20261129", ("search_inference",)),
    "fair": (
        ("5b5fac0",),
        "fair_h200_20261128",
        ("search_inference", "search_training", "search_training_32", "search_training_large"),
    ),
}
SUFFIX = ".predicted.json.gz"


def unpacked(commit: str, file: str) -> dict[str, Any]:
    """Return a file of a commit."""
    document: dict[str, Any] = json.loads(gzip.decompress(git("show", f"{commit}:{file}")))
    return document


def traces_of(commit: str, sets: Iterable[str], steps: Collection[str]) -> dict[str, dict[str, Any]]:
    """Return the traces of steps in a commit, by step."""
    files = (each for name in sets for each in files_of(commit, name))
    return {step: trace for file, trace in files if (step := file.removesuffix(".json.gz")) in steps}


def files_of(commit: str, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the traces and predictions of a set in a commit, by file; a set was a folder first, then a zip file."""
    files = git("ls-tree", "-r", "--name-only", commit, "validate/traces").decode().split()
    for file in files:
        if file == f"validate/traces/{name}.zip":
            packed = zipfile.ZipFile(io.BytesIO(git("show", f"{commit}:{file}")))
            for each in packed.namelist():
                yield each, json.loads(gzip.decompress(packed.read(each)))
        elif file.startswith(f"validate/traces/{name}/"):
            yield file.rpartition("/")[2], unpacked(commit, file)


def placed(document: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return op, stream and variant of a predicted schedule's placements, in launch order."""
    return [(each["op"], each.get("stream", 0), each.get("variant", "")) for each in document["placements"]]


def replayed(document: dict[str, Any], ops: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return the same of a replayed schedule, whose ops are numbers, and its variants numbers from 1."""
    streams, variants = document["stream_of"], document.get("variants") or [0] * len(ops)
    names = [["", *(each["name"] for each in op.get("variants", ()))] for op in ops]
    return [(ops[op]["name"], streams[op], names[op][variants[op]]) for op in document["order"]]


def first_measured(results: str) -> dict[str, str]:
    """Return the first commit with a measurement of each step of a results file."""
    first: dict[str, str] = {}
    file = f"validate/results/{results}.json"
    for commit in git("log", "--reverse", "--format=%h", "--diff-filter=AM", "--", file).decode().split():
        for case in json.loads(git("show", f"{commit}:{file}"))["cases"]:
            first.setdefault(case["trace"], commit)
    return first


def is_before(one: str, other: str) -> bool:
    """Return whether a commit is an ancestor of another one."""
    return one != other and not subprocess.run(["git", "merge-base", "--is-ancestor", one, other]).returncode


def main() -> int:
    """Print two lines per set; the exit status is 1 where a prediction differs or came later."""
    wrong, known_codes = 0, first_of_each_code()
    for name, (commits, results, sets) in SETS.items():
        documents: dict[str, tuple[str, dict[str, Any]]] = {}
        for commit in commits:
            for file, document in files_of(commit, name):
                if file.endswith(SUFFIX):
                    documents.setdefault(file.removesuffix(SUFFIX), (commit, document))
        measured = first_measured(results)
        before = sum(is_before(documents[step][0], commit) for step, commit in measured.items())
        cases = json.loads(git("show", f"HEAD:validate/results/{results}.json"))["cases"]
        known = {
            (step, each["policy"], each["predicted_ns"], *interval)
            for step, (_, document) in documents.items()
            for each, interval in zip(document["schedules"], document["intervals_ns"], strict=True)
        }
        rows = [(c["trace"], c["policy"], c["predicted_ns"], *c["predicted_interval_ns"]) for c in cases]
        equal = sum(row in known for row in rows)
        traces = traces_of(commits[-1], sets, measured)
        ops = {step: trace["ops"] for step, trace in traces.items()}
        ran = unpacked("HEAD", f"validate/results/{results}.schedules.json.gz")["schedules"]
        as_predicted = sum(
            any(
                each["policy"] == one["policy"] and placed(each) == replayed(one, ops[one["trace"]])
                for each in documents[one["trace"]][1]["schedules"]
            )
            for one in ran
        )
        now = traces_of("HEAD", sets, measured)
        kept = sum(now[step] == traces[step] for step in measured)
        wrong += len(measured) - before + len(rows) - equal + len(ran) - as_predicted + len(measured) - kept
        print(f"{name}: {before} of {len(measured)} steps predicted in a commit before the measurement;")
        print(
            f"  {equal} of {len(rows)} predictions and intervals equal; {as_predicted} of {len(ran)} schedules replayed"
        )
        print(f"  as predicted; {kept} of {len(measured)} traces are those of the predictions")
        for code in sorted({document["code"].partition("+")[2] for _, document in documents.values()}):
            of_code = sum(document["code"].endswith(code) for _, document in documents.values())
            commit = known_codes.get(code)
            is_known = commit is not None and (commit == commits[-1] or is_before(commit, commits[-1]))
            where = f"is that of {commit}" if is_known else "is that of no commit"
            print(f"  code {code} ({of_code} steps) {where}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
