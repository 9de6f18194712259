"""Sweeps on a real Dask scheduler with real workers, on this machine, with and without dying processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpusim.errors import OptionError, WorkerError
from gpusim.formats.sweep import Sweep
from gpusim.sweep.grid import Grid, build_grid, code_version
from gpusim.sweep.local import LocalWorkers
from gpusim.sweep.run import Progress, run_sweep
from gpusim.sweep.store import PointRow, Store
from tests.support.sweeping import ENGINE, ROOT, Spy, finished, gpusim, numbers, wait_until, write_traces

pytestmark = pytest.mark.cluster

POLICIES = ("sequential", "wavefront", "round_robin", "critical_path")


class Cluster:
    """A scheduler and its workers, each in a process of its own; without nannies, so that dead ones stay dead."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.logs: dict[subprocess.Popen[bytes], Path] = {}
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.address = f"tcp://127.0.0.1:{port}"
        # A task is blamed at its first dead worker, not at the fourth: the tests have few workers to lose.
        blame = {"DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "0"}
        words = ("--host", "127.0.0.1", "--port", str(port), "--no-dashboard")
        self.scheduler = self._start("distributed.cli.dask_scheduler", words, blame)
        self._wait_for(self.scheduler, b"Scheduler at")

    def add_workers(self, count: int, environment: dict[str, str]) -> list[subprocess.Popen[bytes]]:
        """Start workers of one thread."""
        words = (self.address, "--nthreads", "1", "--no-nanny", "--no-dashboard", "--host", "127.0.0.1")
        workers = [self._start("distributed.cli.dask_worker", words, environment) for _ in range(count)]
        for worker in workers:
            self._wait_for(worker, b"Registered to")
        return workers

    def end_workers(self) -> None:
        """Kill all workers, and wait until the scheduler has noticed."""
        for process in [process for process in self.logs if process is not self.scheduler]:
            process.kill()
            process.wait()
            del self.logs[process]

    def end(self) -> None:
        for process in self.logs:
            process.kill()
            process.wait()

    def _start(self, module: str, words: tuple[str, ...], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        path = self.folder / f"{time.monotonic_ns()}.log"
        with path.open("wb") as log:
            command = [sys.executable, "-m", module, *words]
            process = subprocess.Popen(command, env=os.environ | environment, cwd=self.folder, stdout=log, stderr=log)
        self.logs[process] = path
        return process

    def _wait_for(self, process: subprocess.Popen[bytes], words: bytes) -> None:
        def there() -> bool:
            log = self.logs[process].read_bytes()
            if process.poll() is not None:
                pytest.fail(f"a process of the cluster has ended: {log.decode()[-2000:]}")
            return words in log

        wait_until(there, f"{words.decode()!r} in {self.logs[process]}")


@pytest.fixture
def spy(tmp_path: Path) -> Spy:
    folder = tmp_path / "spy"
    folder.mkdir()
    return Spy(folder)


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One scheduler for all tests that leave it alive."""
    started = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        yield started
    finally:
        started.end()


@pytest.fixture
def cluster(scheduler: Cluster) -> Iterator[Cluster]:
    """The scheduler, without workers."""
    yield scheduler
    scheduler.end_workers()


def small_grid(folder: Path, **fields: Any) -> Grid:
    """2 traces x (1 + 3 x 3) = 20 points."""
    lists = {"policies": POLICIES, "streams": (2, 3, 4), "hardware": ("h200",)}
    given = lists | {"engine": ENGINE} | fields
    return build_grid(Sweep(traces=tuple(map(str, write_traces(folder))), **given))


def local_rows(grid: Grid, folder: Path) -> list[PointRow]:
    with Store(folder / "local.sqlite") as store:
        run_sweep(grid, store, LocalWorkers(1))
        return store.rows()


def test_killed_worker_costs_the_point_it_was_computing_and_the_results_are_those_of_local_workers(
    cluster: Cluster, spy: Spy, tmp_path: Path
) -> None:
    from gpusim.sweep.cluster import ClusterWorkers

    victim, _ = cluster.add_workers(2, spy.environment | {"SPY_SLEEP": "0.1"})
    grid = small_grid(tmp_path)
    lost: list[str] = []
    kept: set[str] = set()
    with ClusterWorkers(cluster.address) as workers, Store(tmp_path / "s.sqlite") as store:
        assert workers.description == f"2 workers of the cluster at {cluster.address}"

        def kill_one(progress: Progress) -> None:
            if progress.done >= 5 and not lost:
                victim.send_signal(signal.SIGSTOP)  # or it could begin another point before the kill
                lost.append(spy.latest(victim.pid))
                kept.update(store.finished())
                victim.kill()
                spy.hurry()

        swept = run_sweep(grid, store, workers, progress=kill_one)
        found = store.rows()
    assert (swept.computed, swept.failed) == (20, 0)
    assert victim.pid in spy.workers()
    assert len(spy.workers()) == 2
    again = {key for key, count in spy.starts().items() if count > 1}
    assert again.isdisjoint(kept)
    assert len(again - set(lost)) <= 1  # besides, one of the same task, or whose result was on its way
    assert set(spy.ends()) == {point.key for point in grid.points}
    assert numbers(found) == numbers(local_rows(grid, tmp_path))


def test_sweep_killed_in_the_middle_goes_on_from_the_command_line(cluster: Cluster, spy: Spy, tmp_path: Path) -> None:
    cluster.add_workers(1, spy.environment | {"SPY_SLEEP": "0.2"})
    grid = small_grid(tmp_path)
    words = [word for path in sorted(tmp_path.glob("wide*.json")) for word in ("--trace", path)]
    words += [word for name in POLICIES for word in ("--policy", name)]
    command = ("sweep", *words, "--engine", ENGINE, "--streams", "2,3,4", "-o", tmp_path / "s.sqlite", "--json")
    with gpusim(*command, "--scheduler", cluster.address, environment=spy.environment):
        spy.wait(4)
    with Store(tmp_path / "s.sqlite", write=False) as store:
        kept = set(store.finished())
    spy.hurry()
    code, out, err = finished(*command, "--scheduler", cluster.address, environment=spy.environment)
    assert (code, err) == (0, "")
    assert (json.loads(out)["before"], json.loads(out)["computed"]) == (len(kept), 20 - len(kept))
    assert 2 <= len(kept) < 20
    assert {spy.starts()[key] for key in kept} == {1}
    with Store(tmp_path / "s.sqlite") as store:
        assert numbers(store.rows()) == numbers(local_rows(grid, tmp_path))


def test_point_that_kills_its_workers_is_recorded_as_failed_and_its_neighbours_are_not(
    cluster: Cluster, spy: Spy, tmp_path: Path
) -> None:
    """One point kills; the scheduler also blames what its worker held. Alone, only the killer dies again."""
    from gpusim.sweep.cluster import ClusterWorkers

    cluster.add_workers(3, spy.environment | {"SPY_KILLER": "round_robin"})
    paths = write_traces(tmp_path, (3,))
    grid = build_grid(Sweep(traces=(str(paths[0]),), policies=POLICIES, streams=(2,), engine=ENGINE))
    with ClusterWorkers(cluster.address) as workers, Store(tmp_path / "s.sqlite") as store:
        swept = run_sweep(grid, store, workers)
        rows = store.rows()
    assert (swept.computed, swept.failed) == (4, 1)
    errors = {row.policy: row.error for row in rows}
    assert errors.pop("round_robin") == "its worker died 1 times"
    assert set(errors.values()) == {None}
    (killer,) = (row.key for row in rows if row.error)
    assert spy.starts()[killer] == 2


def test_lost_scheduler_is_one_line_and_keeps_what_is_finished(spy: Spy, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    try:
        check_lost_scheduler(cluster, spy, tmp_path)
    finally:
        cluster.end()


def check_lost_scheduler(cluster: Cluster, spy: Spy, tmp_path: Path) -> None:
    cluster.add_workers(1, spy.environment | {"SPY_SLEEP": "0.2"})
    words = [word for path in write_traces(tmp_path) for word in ("--trace", path)]
    command = ("sweep", *words, "--engine", ENGINE, "--scheduler", cluster.address, "-o", tmp_path / "s.sqlite")
    with gpusim(*command, environment=spy.environment) as process:
        spy.wait(4)
        cluster.scheduler.kill()
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, ""), err
    assert err.splitlines() == [
        f"  finished points are in {tmp_path / 's.sqlite'}; the same command goes on from there",
        f"gpusim: lost the Dask scheduler at '{cluster.address}'",
    ]
    with Store(tmp_path / "s.sqlite", write=False) as store:
        assert len(store.rows()) > 0


def test_cluster_without_workers_or_whose_workers_have_gone_is_one_line(
    cluster: Cluster, spy: Spy, tmp_path: Path
) -> None:
    from gpusim.sweep.cluster import ClusterWorkers

    with pytest.raises(WorkerError, match=f"has no workers: dask worker {cluster.address}"):
        ClusterWorkers(cluster.address, no_workers_s=0.5)
    (worker,) = cluster.add_workers(1, spy.environment | {"SPY_SLEEP": "0.1"})
    with ClusterWorkers(cluster.address, no_workers_s=0.5) as workers, Store(tmp_path / "s.sqlite") as store:
        with pytest.raises(WorkerError, match="has no workers left"):
            run_sweep(small_grid(tmp_path), store, workers, progress=lambda state: worker.kill())
        assert len(store.rows()) < 20


def test_result_that_died_with_the_last_worker_is_not_waited_for(cluster: Cluster, spy: Spy, tmp_path: Path) -> None:
    """The scheduler reported a task as finished; its result was only on the worker, and no worker is left."""
    from gpusim.sweep.cluster import ClusterWorkers

    (worker,) = cluster.add_workers(1, spy.environment)

    def kill(progress: Progress) -> None:
        if progress.done and worker.poll() is None:
            patience = time.monotonic() + 5
            while spy.ends().total() <= progress.done:
                if time.monotonic() > patience:
                    return  # the scheduler told of all points that were under way at once: wait for the next ones
                time.sleep(0.02)
            time.sleep(0.3)  # the scheduler's report on the ended task reaches this process
            worker.kill()
            worker.wait()

    with ClusterWorkers(cluster.address, no_workers_s=0.5) as workers, Store(tmp_path / "s.sqlite") as store:
        with pytest.raises(WorkerError, match="has no workers left"):
            run_sweep(small_grid(tmp_path), store, workers, progress=kill)
        assert 0 < len(store.rows()) < 20


def test_worker_with_another_gpusim_or_none_is_named(cluster: Cluster, tmp_path: Path) -> None:
    from gpusim.sweep.cluster import ClusterWorkers

    other = tmp_path / "other"
    shutil.copytree(ROOT / "gpusim", other / "gpusim", ignore=shutil.ignore_patterns("__pycache__"))
    with (other / "gpusim" / "policies" / "wavefront.py").open("a") as code:
        code.write("# changed\n")
    (tmp_path / "none" / "gpusim").mkdir(parents=True)
    (tmp_path / "none" / "gpusim" / "__init__.py").write_text("raise ImportError('no gpusim here')")
    for folder, found in ((other, r"gpusim \d"), (tmp_path / "none", r"no gpusim \(no gpusim here\)")):
        cluster.add_workers(1, {"PYTHONPATH": str(folder)})
        text = (
            rf"worker tcp://\S+ has {found}.*, this process gpusim {code_version().replace('+', '.')}: install the same"
        )
        with pytest.raises(WorkerError, match=text):
            ClusterWorkers(cluster.address)
        cluster.end_workers()


@pytest.mark.parametrize(
    "address", ["", "127.0.0.1:8786", "tcp://127.0.0.1", "http://h:1", "tcp://h:99999", "tcp://[::1:3"]
)
def test_address_that_is_none_is_one_line(address: str) -> None:
    from gpusim.sweep.cluster import ClusterWorkers

    with pytest.raises(OptionError, match="looks like tcp://HOST:PORT"):
        ClusterWorkers(address)


def test_address_where_no_scheduler_answers_is_one_line(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpusim.sweep import cluster as module

    monkeypatch.setattr(module, "CONNECT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(WorkerError, match=f"no Dask scheduler at 'tcp://127.0.0.1:{port}': no answer in "):
            module.ClusterWorkers(f"tcp://127.0.0.1:{port}")
    with pytest.raises(WorkerError, match=f"no Dask scheduler at 'tcp://127.0.0.1:{port}': Connection refused"):
        module.ClusterWorkers(f"tcp://127.0.0.1:{port}")


def test_without_dask_the_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpusim.sweep.cluster import ClusterWorkers

    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(WorkerError, match=r"pip install 'gpusim\[sweep\]'"):
        ClusterWorkers("tcp://127.0.0.1:1")
