"""Compare blind sets with the predictions committed before: python research/prototypes/check_blind.py.

For each set of other kinds: for how many steps the commit with the predictions comes before the first one with a
measurement, how many cases have the same prediction and interval in both, and whether the hash of the predicting code
is that of a commit up to the predictions. Needs the repository's history.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

#: Set -> commits with its predictions, and its results file.
SETS = {
    "kinds": (("02f5184", "bac44ff"), "kinds_h200_20261123"),
    "blind_kinds": (("3010061",), "blind_kinds_h200_20261124"),
    "blind_intervals": (("1450b22",), "blind_intervals_h200_20261126"),
}
SUFFIX = ".predicted.json.gz"
#: Commits before the predictions whose code is tried.
TRIED = 60


def git(*arguments: str) -> bytes:
    """Return what git prints."""
    return subprocess.run(["git", *arguments], capture_output=True, check=True).stdout


def predictions(commit: str, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the predictions of a set in a commit, by step; a set was a folder first, then a zip file."""
    files = git("ls-tree", "-r", "--name-only", commit, "validate/traces").decode().split()
    for file in files:
        if file == f"validate/traces/{name}.zip":
            packed = zipfile.ZipFile(io.BytesIO(git("show", f"{commit}:{file}")))
            for each in packed.namelist():
                if each.endswith(SUFFIX):
                    yield each.removesuffix(SUFFIX), json.loads(gzip.decompress(packed.read(each)))
        elif file.startswith(f"validate/traces/{name}/") and file.endswith(SUFFIX):
            step = file.rpartition("/")[2].removesuffix(SUFFIX)
            yield step, json.loads(gzip.decompress(git("show", f"{commit}:{file}")))


def code_hash(commit: str) -> str:
    """Return the hash of the package's code, as `gpusim.version` computes it."""
    with tarfile.open(fileobj=io.BytesIO(git("archive", commit, "gpusim"))) as tar:
        members = [each for each in tar if each.isfile() and each.name.endswith(".py")]
        files = {each.name.removeprefix("gpusim/"): tar.extractfile(each).read() for each in members}
    digest = hashlib.sha256()
    for name in sorted(files, key=PurePosixPath):
        digest.update(f"{name}\0".encode())
        digest.update(files[name].replace(b"\r\n", b"\n"))
    return digest.hexdigest()[:8]


def first_measured(name: str) -> dict[str, str]:
    """Return the first commit with a measurement of each step of a set."""
    first: dict[str, str] = {}
    for commit in git("log", "--reverse", "--format=%h", "--", f"validate/results/{name}_h200_*").decode().split():
        for file in git("ls-tree", "-r", "--name-only", commit, "validate/results").decode().split():
            if re.fullmatch(rf"validate/results/{name}_h200_\d+\.json", file):
                for case in json.loads(git("show", f"{commit}:{file}"))["cases"]:
                    first.setdefault(case["trace"], commit)
    return first


def is_before(one: str, other: str) -> bool:
    """Return whether a commit is an ancestor of another one."""
    return one != other and not subprocess.run(["git", "merge-base", "--is-ancestor", one, other]).returncode


def main() -> int:
    """Print two lines per set; the exit status is 1 where a prediction differs or came later."""
    wrong = 0
    for name, (commits, results) in SETS.items():
        documents: dict[str, tuple[str, dict[str, Any]]] = {}
        for commit in commits:
            for step, document in predictions(commit, name):
                documents.setdefault(step, (commit, document))
        measured = first_measured(name)
        before = sum(is_before(documents[step][0], commit) for step, commit in measured.items())
        cases = json.loads(git("show", f"HEAD:validate/results/{results}.json"))["cases"]
        known = {
            (step, each["policy"], each["predicted_ns"], *interval)
            for step, (_, document) in documents.items()
            for each, interval in zip(document["schedules"], document["intervals_ns"], strict=True)
        }
        rows = [(c["trace"], c["policy"], c["predicted_ns"], *c["predicted_interval_ns"]) for c in cases]
        equal = sum(row in known for row in rows)
        wrong += len(measured) - before + len(rows) - equal
        print(f"{name}: {before} of {len(measured)} steps predicted in a commit before the measurement;")
        print(f"  {equal} of {len(rows)} predictions and intervals equal")
        history = [code_hash(each) for each in git("log", f"-{TRIED}", "--format=%h", commits[-1]).decode().split()]
        for code in sorted({document["code"].partition("+")[2] for _, document in documents.values()}):
            of_code = sum(document["code"].endswith(code) for _, document in documents.values())
            where = "is that of a commit" if code in history else "is that of no commit"
            print(f"  code {code} ({of_code} steps) {where}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
