"""Commands killed with SIGKILL at random moments: nothing is lost, half written or left over after the next run.

`scripts/kill_test --kills 100` does the same for longer. The first tests are of the harness: it sees what is broken.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.killing import ROOT, Job, Killer, Tally, jobs, table
from tests.sweep.test_sweep_cluster import Cluster

SEED, KILLS = 18, 2
LOCAL = tuple(job.name for job in jobs())


#: Programs that write `out.json`, each with one fault; `.x` marks that they are writing.
BROKEN = {
    "half_written": """
file = open("out.json", "w")
file.write("{")
file.flush()
open(".x", "w").close()
time.sleep(0.3)
file.write("}")
os.unlink(".x")
""",
    "left_over": """
open(f".out.json.{os.getpid()}", "w").close()
time.sleep(0.3)
open("out.json", "w").write("{}")
""",
    "lost": """
first = not os.path.exists(".x")
open(".x", "w").close()
time.sleep(0.3)
open("out.json", "w").write("[1]" if first else "[2]")
""",
    "orphans": """
subprocess.Popen(["sleep", "60"])
open(".x", "w").close()
time.sleep(0.3)
open("out.json", "w").write("{}")
os.unlink(".x")
""",
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_command_is_seen(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.killing.ORPHANS_S", 0.2)
    program = f"import os, subprocess, time{BROKEN[what]}"
    job = Job(
        "broken", (sys.executable, "-c", program), ("out.json",), lambda folder: (folder / "out.json").read_text()
    )
    killer = Killer(job, tmp_path, SEED)
    for number in range(4):
        killer.kill(number)
    assert getattr(killer.tally, what), killer.tally


def test_table_has_a_row_for_each_command() -> None:
    text = table({"a": Tally(kills=3, lost=["x"]), "b": Tally(kills=2)})
    assert text.splitlines()[2:] == ["| a | 3 | 0 | 0 | 1 | 0 | 0 | 0 |", "| b | 2 | 0 | 0 | 0 | 0 | 0 | 0 |"]


@pytest.mark.parametrize("name", LOCAL)
def test_killed_command_loses_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    (job,) = (job for job in jobs() if job.name == name)
    _kill(job, tmp_path)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    folder = tmp_path / "cluster"
    folder.mkdir()
    started = Cluster(folder)
    try:
        started.add_workers(1, {"PYTHONPATH": str(ROOT)})
        yield started
    finally:
        started.end()


@pytest.mark.cluster
def test_killed_sweep_on_a_cluster_loses_and_leaves_nothing(cluster: Cluster, tmp_path: Path) -> None:
    (job,) = (job for job in jobs(cluster.address) if job.name == "sweep, Dask")
    _kill(job, tmp_path)


def _kill(job: Job, folder: Path) -> None:
    killer = Killer(job, folder / "runs", SEED)
    for number in range(KILLS):
        killer.kill(number)
    assert killer.tally.kills == KILLS
    assert not killer.tally.problems, "\n".join(killer.tally.problems)
