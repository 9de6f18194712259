"""`gpusim sweep`: many simulations, stored in one file."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpusim.cli.common import check_output, json_option, print_json, tell
from gpusim.errors import OptionError, WorkerError
from gpusim.io.file_limits import MAX_INTEGER
from gpusim.text import short_value, visible
from gpusim.units import counted

if TYPE_CHECKING:
    from gpusim.api.sweeps import Sweep
    from gpusim.sweep.run import Progress, Swept
    from gpusim.sweep.store import Store

#: Interval between lines of progress if standard error is no terminal.
LINE_S = 10.0


def stream_counts(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> tuple[int, ...]:
    """Parse `2,4,8`; the limit on streams is checked with the other values."""
    try:
        return tuple(int(count) for value in values for count in value.split(","))
    except ValueError:
        raise OptionError(f"--streams {short_value(' '.join(values))}: not a list of numbers such as 2,4,8") from None


@click.command()
@click.argument("sweep_file", metavar="[SWEEP]", required=False)
@click.option("--trace", "traces", multiple=True, metavar="TRACE", help="Trace file, bundled name or glob; repeatable.")
@click.option("--hw", "hardware", multiple=True, metavar="NAME", help="Hardware model; as --trace, or 'all'.")
@click.option("--policy", "policies", multiple=True, metavar="P", help="Policy, glob or 'all' [default: all].")
@click.option("--streams", multiple=True, metavar="N,N,...", callback=stream_counts, help="[default: 2,4,8]")
@click.option("--engine", default=None, metavar="NAME", help="Engine [default: the fastest one].")
@click.option("--seed", type=click.IntRange(min=0, max=MAX_INTEGER), default=None, metavar="N")
@click.option("-o", "output", required=True, metavar="STORE", help="Store (SQLite); an existing one is continued.")
@click.option("--workers", type=click.IntRange(min=1), default=None, help="Local processes [default: one per CPU].")
@click.option("--scheduler", metavar="tcp://HOST:PORT", help="Use the workers of this Dask scheduler instead.")
@click.option("--retry-failed", is_flag=True, help="Compute failed points again.")
@click.option("--export", "export_file", metavar="FILE", help="Also write the whole store as .parquet or .csv.")
@json_option
def sweep(
    sweep_file: str | None,
    traces: tuple[str, ...],
    hardware: tuple[str, ...],
    policies: tuple[str, ...],
    streams: tuple[int, ...],
    engine: str | None,
    seed: int | None,
    output: str,
    workers: int | None,
    scheduler: str | None,
    retry_failed: bool,
    export_file: str | None,
    as_json: bool,
) -> None:
    """Simulate traces x hardware x policies x stream counts, from a file SWEEP (.toml) or from options.

    \b
    gpusim sweep --trace 'googlenet-*' --hw h200 --hw a100-80gb --streams 2,4,8 -o googlenet.sqlite
    gpusim sweep nightly.toml -o nightly.sqlite --scheduler tcp://10.0.0.1:8786

    Points already in the store are not computed again: the same command resumes a stopped sweep.
    Without SWEEP and --trace nothing is computed: the store is summarized, and exported on request.
    """  # noqa: D301
    from gpusim.sweep.export import check_export

    given = {"hardware": hardware, "policies": policies, "streams": streams, "engine": engine, "seed": seed}
    options = {name: value for name, value in given.items() if value not in (None, ())}
    if scheduler is not None and workers is not None:
        raise OptionError("--workers goes without --scheduler: a cluster's workers are started on the cluster")
    if sweep_file is not None and (traces or options):
        raise OptionError(
            "a sweep file goes without --trace, --hw, --policy, --streams, --engine and --seed: it has them"
        )
    if export_file is not None:
        check_export(Path(export_file))
    if sweep_file is None and not traces:
        if options or scheduler or workers or retry_failed:
            raise OptionError("give a sweep file or --trace; with neither, an existing store is only summed up")
        _sum_up(Path(output), export_file, as_json)
        return
    from gpusim.sweep.spec import read_sweep

    target = check_output(output)
    assert target is not None
    plan = read_sweep(Path(sweep_file)) if sweep_file is not None else _from_options(traces, options)
    _run(plan, target, workers, scheduler, retry_failed, export_file, as_json)


def _from_options(traces: tuple[str, ...], options: dict[str, Any]) -> Sweep:
    from gpusim.api.resolve import check_streams
    from gpusim.api.sweeps import Sweep

    for count in options.get("streams", ()):
        check_streams(count)
    return Sweep(traces=traces, **options)


def _run(
    plan: Sweep,
    target: Path,
    workers: int | None,
    scheduler: str | None,
    retry_failed: bool,
    export_file: str | None,
    as_json: bool,
) -> None:
    """Compute the missing points and print the summary."""
    from gpusim.sweep.grid import build_grid
    from gpusim.sweep.local import LocalWorkers
    from gpusim.sweep.run import Workers, run_sweep
    from gpusim.sweep.store import Store

    grid = build_grid(plan)
    with contextlib.ExitStack() as open_until_the_end:
        crew: Workers
        if scheduler is not None:
            from gpusim.sweep.cluster import ClusterWorkers

            crew = open_until_the_end.enter_context(ClusterWorkers(scheduler))
        else:
            crew = LocalWorkers(workers)
        store = open_until_the_end.enter_context(Store(target))
        try:
            with _progress() as report:
                swept = run_sweep(grid, store, crew, retry_failed=retry_failed, progress=report)
        except (KeyboardInterrupt, WorkerError):
            _say_how_to_resume(target)
            raise
        if swept.interrupted:
            tell(f"  {swept.done} of {swept.total} points are done", err=True)
            _say_how_to_resume(target)
            raise KeyboardInterrupt
        rows = store.rows(point.key for point in grid.points)
        head = _run_document(swept, target, crew.description) | {"engine": plan.engine, "seed": plan.seed}
        if not as_json:
            tell(_run_line(swept, crew.description))
        _finish(store, rows, head, export_file, as_json)


def _sum_up(path: Path, export_file: str | None, as_json: bool) -> None:
    """Print the summary of an existing store."""
    from gpusim.sweep.store import Store

    with Store(path, write=False) as store:
        rows = store.rows()
        _finish(store, rows, {"store": str(path), "points": len(rows)}, export_file, as_json)


def _finish(store: Store, rows: list[Any], head: dict[str, Any], export_file: str | None, as_json: bool) -> None:
    """Print the summary of `rows` and export the whole store."""
    from gpusim.sweep.export import export_rows
    from gpusim.sweep.summary import print_summary, summary_document

    if export_file is not None:
        export_rows(store.rows(), Path(export_file))
    if as_json:
        print_json(head | {"export": export_file} | summary_document(rows))
        return
    print_summary(rows)
    tell(f"results are in {store.path}" + (f", exported to {export_file}" if export_file is not None else ""))


def _run_document(swept: Swept, target: Path, workers: str) -> dict[str, Any]:
    return {
        "store": str(target),
        "points": swept.total,
        "before": swept.before,
        "computed": swept.computed,
        "failed": swept.failed,
        "seconds": swept.seconds,
        "points_per_s": swept.points_per_s,
        "workers": workers,
    }


def _run_line(swept: Swept, workers: str) -> str:
    text = f"{counted(swept.total, 'point')}: {swept.computed} computed in {swept.seconds:.1f} s by {workers}"
    if swept.computed:
        text += f" ({swept.points_per_s:.1f} points/s)"
    if swept.before:
        text += f", {swept.before} were in the store"
    return text + (f"; {swept.failed} failed" if swept.failed else "")


def _say_how_to_resume(target: Path) -> None:
    tell(f"  finished points are in {target}; the same command goes on from there", err=True)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[Progress], None]]:
    """Show a progress bar on standard error or, without a terminal, a line now and then."""
    if not sys.stderr.isatty():
        last = time.monotonic()

        def line(state: Progress) -> None:
            nonlocal last
            if time.monotonic() >= last + LINE_S:
                last = time.monotonic()
                tell(f"  {state.done}/{state.total} points, {_details(state)}", err=True)

        yield line
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    from gpusim.report.terminal import console

    details = TextColumn("{task.fields[details]}", markup=False)
    with Bar(
        BarColumn(), MofNCompleteColumn(), details, TimeElapsedColumn(), console=console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task("sweep", total=None, details="")

        def report(state: Progress) -> None:
            bar.update(task, total=state.total, completed=state.done, details=_details(state))

        yield report


def _details(state: Progress) -> str:
    text = f"{state.points_per_s:.1f} points/s"
    if state.failed:
        text += f", {state.failed} failed"
    if state.best is not None:
        text += f", best {state.best.speedup:.2f}x {state.best.trace} {state.best.policy} {state.best.streams}"
    return visible(text)
