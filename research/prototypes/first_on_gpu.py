"""Run the short experiments that wait for a GPU, one after the other, each with a limit of time.

    python research/prototypes/first_on_gpu.py FOLDER

FOLDER gets NAME.json and NAME.log of each. Results are written after each case: one that is stopped has those before.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Final

HERE: Final = Path(__file__).parent
NAMES: Final = ("graph_states", "idle_forks", "copies_in_graph")
#: Limit of each in s: the three are done within ten minutes.
LIMIT_S: Final = 180.0


def run(name: str, folder: Path, limit_s: float) -> str:
    """Run one experiment; return how it ended."""
    result = folder / f"{name}.json"
    command = [sys.executable, "-u", str(HERE / f"{name}.py"), str(result)]
    with (folder / f"{name}.log").open("w", encoding="utf-8") as log:
        try:
            code = subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, timeout=limit_s, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return "stopped at its limit" + ("" if result.exists() else ", without a result")
    return "done" if not code else f"exit code {code}"


def main() -> None:
    """Run all, or those named; the exit code is 1 where one was not done."""
    arguments = argparse.ArgumentParser(description="Run the short experiments that wait for a GPU.")
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--only", choices=NAMES, action="append", help="may be given several times")
    arguments.add_argument("--seconds", type=float, default=LIMIT_S, help="limit of each experiment (%(default).0f)")
    given = arguments.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    ends = []
    for name in given.only or NAMES:
        begin = perf_counter()
        ends.append(run(name, given.folder, given.seconds))
        print(f"{name}: {ends[-1]}, {perf_counter() - begin:.0f} s", flush=True)
    sys.exit(any(end != "done" for end in ends))


if __name__ == "__main__":
    main()
