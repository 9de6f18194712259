"""Find the commit of the code that predicted each results file: python research/prototypes/code_of_results.py.

Prints, for each code hash in `validate/results`, the first commit of the history with that code, or that there is none,
and the number of cases with it in each file; then the files whose cases have no hash. Needs the repository's history.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections import Counter, defaultdict
from pathlib import Path, PurePosixPath


def git(*arguments: str) -> bytes:
    """Return what git prints."""
    return subprocess.run(["git", *arguments], capture_output=True, check=True).stdout


def first_of_each_code() -> dict[str, str]:
    """Return the first commit with each hash of the package's code, as `gpusim.version` computes it."""
    first: dict[str, str] = {}
    blobs: dict[str, bytes] = {}
    seen: set[tuple[tuple[str, str], ...]] = set()
    for commit in git("rev-list", "--reverse", "--abbrev-commit", "HEAD", "--", "gpusim").decode().split():
        rows = [row.split(None, 3) for row in git("ls-tree", "-r", commit, "gpusim").decode().splitlines()]
        files = tuple((name.removeprefix("gpusim/"), blob) for _, _, blob, name in rows if name.endswith(".py"))
        if files in seen:
            continue
        seen.add(files)
        digest = hashlib.sha256()
        for name, blob in sorted(files, key=lambda each: PurePosixPath(each[0])):
            if blob not in blobs:
                blobs[blob] = git("cat-file", "blob", blob).replace(b"\r\n", b"\n")
            digest.update(f"{name}\0".encode())
            digest.update(blobs[blob])
        first.setdefault(digest.hexdigest()[:8], commit)
    return first


def main() -> None:
    """Print a line for each code hash, and one for files without."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    without: Counter[str] = Counter()
    for file in sorted(Path("validate/results").glob("*.json")):
        document = json.loads(file.read_text(encoding="utf-8"))
        for case in document["cases"]:
            code = (case.get("commit") or document.get("gpusim") or "").partition("+")[2]
            if code:
                found[code][file.stem] += 1
            else:
                without[file.stem] += 1
    commits = first_of_each_code()
    for code, files in sorted(found.items(), key=lambda each: each[1].most_common(1)):
        named = ", ".join(f"{file} ({count})" for file, count in files.items())
        print(f"{code} {commits.get(code, 'is that of no commit')}: {named}")
    known = sum(count for code, files in found.items() if code in commits for count in files.values())
    print(f"{known} of {sum(map(Counter.total, found.values()))} cases with a hash have that of a commit;")
    print(f"{without.total()} cases have none: {', '.join(without)}")


if __name__ == "__main__":
    main()
