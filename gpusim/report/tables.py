"""Output of the commands: tables, and documents for `--json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from gpusim.defaults import DEFAULT_POLICY, RECOMMENDED
from gpusim.formats.hardware import HardwareModel
from gpusim.formats.measurement import Measurement
from gpusim.formats.trace import Gpu, Timing, Trace
from gpusim.policies.registry import RegisteredPolicy
from gpusim.report.as_captured import not_as_captured
from gpusim.report.choices import choices_document, choices_lines
from gpusim.report.fit import print_table
from gpusim.report.terminal import Table, console, styled
from gpusim.search.explored import Explored
from gpusim.search.verdict import best_way
from gpusim.text import visible
from gpusim.units import GIB, counted, format_bytes, format_ns, format_peak, format_times_ns


def explored_document(explored: Explored) -> dict[str, Any]:
    """Return the document of `explore --json`."""
    gain, passed = explored.attribution, explored.passed_over
    return {
        "trace": explored.trace.name,
        "hardware": explored.hardware.label,
        "calibrated": explored.hardware.calibrated,
        "sequential_ns": explored.sequential_ns,
        "memory_limit_bytes": explored.memory_limit_bytes,
        "results": [
            {**_row(row.policy, row.streams, row.makespan_ns, row.speedup), "peak_bytes": row.peak_bytes}
            for row in explored.rows
        ],
        "best": {
            **_row(explored.best.policy, explored.best.streams, explored.best.makespan_ns, explored.best.speedup),
            "peak_bytes": explored.best.peak_bytes,
        },
        "bounds": explored.bounds.document(),
        **choices_document(explored),
        "attribution": {
            "eager_ns": gain.eager_ns,
            "launch_ns": gain.launch_ns,
            "concurrency_ns": gain.concurrency_ns,
            "kernels_ns": gain.kernels_ns,
            "order_ns": gain.order_ns,
            "memory_ns": gain.memory_ns,
        },
        "verdict": {
            "worth_it": explored.verdict.worth_it,
            "speedup": explored.verdict.speedup,
            "interval": [explored.verdict.low, explored.verdict.high],
            "text": explored.verdict.text,
            "rows": [
                {
                    "what": row.what,
                    "label": row.label,
                    "time_ns": row.time_ns,
                    "measured": row.measured,
                    "streams": row.streams,
                    "speedup_over_eager": row.speedup_over_eager,
                    "advice": row.advice,
                }
                for row in explored.verdict.rows
            ],
            "passed_over": None
            if passed is None
            else _row(passed.policy, passed.streams, passed.makespan_ns, passed.speedup),
        },
        "search": {
            "evaluations": explored.evaluations,
            "seed": explored.seed,
            "interrupted": explored.interrupted,
            "left_out": list(explored.left_out),
        },
    }


def _row(policy: str, streams: int, makespan_ns: int, speedup: float) -> dict[str, Any]:
    return {"policy": policy, "streams": streams, "makespan_ns": makespan_ns, "speedup": speedup}


def print_explored(explored: Explored, tried: bool = False) -> None:
    """Print policies, bounds, attribution and verdict; `tried` is True if a trial on the GPU chose the schedule."""
    out = console()
    settings = f"{explored.trace.settings}, " if explored.trace.settings else ""
    kernels = sum(len(op.kernels) for op in explored.trace.ops)
    out.print(
        styled(
            (visible(explored.trace.name), "bold"),
            f": {visible(explored.trace.model.network)}, {settings}"
            f"{counted(len(explored.trace.ops), 'op')}, {counted(kernels, 'kernel')}; hardware ",
            (visible(explored.hardware.label), "bold"),
            "\n",
        )
    )
    table = Table(show_edge=False, header_style="bold")
    for column in ("policy", "streams", "predicted", "speed-up", "memory"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    rows = [explored.best_of(policy) for policy in dict.fromkeys(row.policy for row in explored.rows)]
    for row, time in zip(rows, format_times_ns(row.makespan_ns for row in rows), strict=True):
        style = "bold green" if row is explored.best else None
        cells = (str(row.streams), time, f"{row.speedup:.2f}x", format_peak(row.peak_bytes))
        table.add_row(row.policy, *cells, style=style)
    print_table(out, table)
    searched = f"{counted(explored.evaluations, 'simulation')} in the search"
    if explored.interrupted:
        searched += ", stopped early: the best found so far"
    out.print(f"\nspeed-up over the sequential CUDA graph of the same kernels; {searched}", style="dim")
    if over := [row.policy for row in rows if row not in explored.allowed]:
        limit = format_bytes(explored.memory_limit_bytes or 0)
        out.print(f"memory limit {limit}: not kept by {', '.join(over)}, so not recommended", style="dim")
    if explored.left_out:
        out.print(f"{', '.join(explored.left_out)} left out: {len(explored.trace.ops):,} ops", style="dim")
    _print_bounds(out, explored)
    _print_attribution(out, explored)
    for line in choices_lines(explored):
        out.print(visible(line))
    trusted = explored.verdict.worth_it and explored.hardware.calibrated
    colour = "green" if trusted else "yellow"
    out.print(styled("\n", ("Verdict.", f"bold {colour}"), (f" {visible(explored.verdict.text)}\n", colour)))
    _print_verdict_rows(out, explored)
    passed = explored.passed_over
    if passed is not None and not tried:
        out.print(
            f"\n{passed.policy} found {passed.speedup:.2f}x, not recommended: {explored.passed_over_reason}; "
            "try it with --measure"
        )


def _print_verdict_rows(out: Console, explored: Explored) -> None:
    """Print the times of eager, one CUDA graph, streams in the graph, and streams without a graph."""
    rows = explored.verdict.rows
    best = best_way(rows)
    table = Table(show_edge=False, header_style="bold")
    for column in ("way to run the step", "time", "over eager", "", "what to do"):
        table.add_column(column, justify="right" if column in ("time", "over eager") else "left")
    for row, time in zip(rows, format_times_ns(row.time_ns for row in rows), strict=True):
        ratio = "" if row.speedup_over_eager is None else f"{row.speedup_over_eager:.2f}x"
        source = "measured" if row.measured else "predicted"
        style = "bold" if row is best else None
        table.add_row(row.label, time, ratio, source, row.advice, style=style)
    print_table(out, table)


def _print_bounds(out: Console, explored: Explored) -> None:
    largest = explored.bounds.largest[1]
    parts: list[str | tuple[str, str]] = []
    for time, name in explored.bounds.named:
        parts += [
            ", " if parts else "\nLower bounds: ",
            (f"{name} {format_ns(time)}", "bold" if name == largest else ""),
        ]
    out.print(styled(*parts, "\n"))


def _print_attribution(out: Console, explored: Explored) -> None:
    """Print where the gain comes from: each change and the remaining time."""
    gain = explored.attribution
    time_ns = explored.sequential_ns
    steps: list[tuple[str, int | None, int]] = []
    if gain.eager_ns is not None and gain.launch_ns is not None:
        steps += [("eager step, measured", None, gain.eager_ns), ("launch overhead removed", -gain.launch_ns, time_ns)]
    else:
        steps.append(("sequential graph", None, time_ns))
    for name, saved_ns in (
        ("streams", gain.concurrency_ns),
        ("other kernels", gain.kernels_ns),
        ("order", gain.order_ns),
        ("memory actions", gain.memory_ns),
    ):
        if saved_ns:
            time_ns -= saved_ns
            steps.append((name, -saved_ns, time_ns))
    times = format_times_ns(time for _, _, time in steps)
    changes = format_times_ns(
        [*(change or 0 for _, change, _ in steps), max(time for _, _, time in steps)], signed=True
    )
    table = Table(show_edge=False, header_style="bold")
    for column in ("where the gain comes from", "change", "time"):
        table.add_column(column, justify="left" if column.startswith("where") else "right")
    for (name, change, _), changed, time in zip(steps, changes[:-1], times, strict=True):
        table.add_row(name, "" if change is None else changed, time)
    print_table(out, table)


def print_simulated(document: Mapping[str, Any]) -> None:
    """Print one simulated schedule."""
    out = console()
    bound = document["bounds"]
    predicted, sequential = format_times_ns((document["makespan_ns"], document["sequential_ns"]))
    out.print(
        styled((visible(document["trace"]), "bold")),
        f"on {visible(document['hardware'])}: {visible(document['policy'])}, {counted(document['streams'], 'stream')}, "
        f"launched by {document['launch']}\n"
        f"  predicted   {predicted}\n"
        f"  sequential  {sequential}  (speed-up {document['speedup']:.2f}x)\n"
        f"{_measured(document.get('measured'))}"
        f"{_eager(document['eager'], document['captured_on'])}"
        f"  memory      {format_peak(document['peak_bytes'])} at the peak\n"
        f"  bounds      critical path {format_ns(bound['critical_path_ns'])}, SM area {format_ns(bound['area_ns'])} "
        f"({format_ns(bound['contention_ns'])} with contention), DRAM {format_ns(bound['bandwidth_ns'])}, "
        f"front end {format_ns(bound['front_end_ns'])}",
    )


def _measured(measured: Mapping[str, Any] | None) -> str:
    """Return a line on the measured run: its time with the error of the prediction, or why they cannot be compared."""
    if measured is None:
        return ""
    error = measured["error"]
    words = f"not compared: {measured['not_compared']}" if error is None else f"{error:+.1%} against measured"
    return f"  measured    {format_ns(measured['time_ns'])}  ({words})\n"


def _eager(times: Mapping[str, int], gpu: str) -> str:
    """Return a line on the eager step, predicted and measured (on `gpu`); empty if both are unknown."""
    gpu = f" on {visible(gpu)}" if gpu else ""
    parts = [f"{format_ns(times['predicted_ns'])} predicted"] if "predicted_ns" in times else []
    parts += [f"{format_ns(times['measured_ns'])} measured at the capture{gpu}"] if "measured_ns" in times else []
    return f"  eager step  {', '.join(parts)}\n" if parts else ""


def captured_document(trace: Trace, loss_error: float, gradient_error: float, file: str) -> dict[str, Any]:
    """Return the document of `capture --json`; values not measured for an estimated step are null."""
    truth = trace.ground_truth
    kernels = [kernel for op in trace.ops for kernel in op.kernels]
    return {
        "trace": trace.name,
        "file": file,
        "ops": len(trace.ops),
        "kernels": len(kernels),
        "kernel_ns": sum(kernel.dur_ns for kernel in kernels),
        "estimated": trace.provenance.estimated,
        "eager": truth and truth.eager,
        "graph": truth and truth.graph,
        "attributed_frac": truth and truth.attributed_frac,
        "variants": sum(bool(op.variants) for op in trace.ops),
        "unattributed": truth.unattributed if truth else (),
        "output_error": loss_error,
        "gradient_error": gradient_error,
        "gpu": trace.provenance.gpu,
    }


def _variants(ops: int) -> str:
    """Return a line on the number of ops with variants; empty if there are none."""
    return f"  {ops} ops have other kernels to choose from\n" if ops else ""


def print_captured(document: Mapping[str, Any]) -> None:
    """Print the result of a capture."""
    out = console()
    gpu = document["gpu"]
    if document["estimated"]:
        out.print(
            styled((visible(document["trace"]), "bold")),
            f"written to {visible(document['file'])}\n"
            f"  {counted(document['ops'], 'op')}, {format_ns(document['kernel_ns'])} of kernel time, estimated from "
            f"{visible(document['estimated'])}; nothing ran on a GPU",
        )
        return
    out.print(
        styled((visible(document["trace"]), "bold")),
        f"written to {visible(document['file'])}\n"
        f"  {counted(document['ops'], 'op')}, {counted(document['kernels'], 'kernel')}, "
        f"{format_ns(document['kernel_ns'])} of kernel time, {document['attributed_frac']:.2%} tied to an op\n"
        f"  eager step        {_timing(document['eager'])}\n"
        f"  sequential graph  {_timing(document['graph'])}\n"
        f"  rebuilt step against the model: output {document['output_error']:.2g}, "
        f"gradients {document['gradient_error']:.2g} apart\n"
        f"{_variants(document['variants'])}"
        f"  {_gpu(gpu)}",
    )


def print_measurement(measurement: Measurement, trace: Trace) -> None:
    """Print one replay: measured and predicted times, and the output check."""
    out = console()
    outputs, gpu = measurement.outputs, measurement.gpu
    truth = trace.ground_truth
    same = "equal bit for bit" if outputs.bit_equal else f"{outputs.worst_error:.2g} apart at most"
    if not outputs.sequential_repeats:
        same += f" (two sequential runs are {outputs.sequential_error:.2g} apart: some kernels add in any order)"
    if outputs.fp32_error is not None:
        same += (
            f", from a run in FP32 {outputs.fp32_error:.2g} (the captured kernels {outputs.sequential_fp32_error:.2g})"
        )
    if not outputs.sensitive:
        same += ", but they are for any input: that shows nothing"
    eager = f"\n  eager step        {_timing(truth.eager)}  (with the capture)" if truth else ""
    peak, sequential_peak = format_bytes(measurement.peak_bytes), format_bytes(measurement.sequential_peak_bytes)
    note = not_as_captured(measurement, trace)
    note = f"\n  note              {note}" if note else ""
    predicted, predicted_alone = format_ns(measurement.predicted_ns), format_ns(measurement.predicted_sequential_ns)
    verdict = ("equal", "green") if outputs.equal else ("DIFFERENT", "red")
    text = styled(
        (visible(measurement.trace), "bold"),
        f": {visible(measurement.policy)}, {counted(measurement.streams, 'stream')}, "
        f"{counted(measurement.events, 'event')}{eager}\n"
        f"  sequential graph  {_timing(measurement.sequential)}  predicted {predicted_alone} "
        f"({measurement.sequential_error:+.1%})\n"
        f"  schedule          {_timing(measurement.schedule)}  predicted {predicted} "
        f"({measurement.prediction_error:+.1%}, {visible(measurement.hardware)}){note}\n  ",
        (f"speed-up          {measurement.speedup:.2f}x", "bold"),
        f"\n  outputs           {same}, {outputs.compared} tensors, tolerance {outputs.tolerance:g}: ",
        verdict,
        f"\n  memory            {peak} at the peak, sequential {sequential_peak}\n  {_gpu(gpu)}",
    )
    out.print(text)


def _gpu(gpu: Gpu) -> str:
    names = f"{visible(gpu.name)}, driver {visible(gpu.driver)}, torch {visible(gpu.torch)}"
    return f"{names}, SM clock {gpu.sm_clock_mhz} MHz"


def _timing(timing: Timing) -> str:
    return f"{format_ns(timing.median_ns)} [{format_ns(timing.lo_ns)}, {format_ns(timing.hi_ns)}]"


def print_traces(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the bundled traces."""
    table = Table(show_edge=False, header_style="bold")
    for column in ("trace", "ops", "kernels", "eager", "sequential graph", "GPU", "date"):
        table.add_column(column, justify="left" if column in ("trace", "GPU", "date") else "right")
    columns = [format_times_ns(row.get(key, 0) for row in rows) for key in ("eager_ns", "graph_ns")]
    for row, *formatted in zip(rows, *columns, strict=True):
        times = [time if key in row else "" for key, time in zip(("eager_ns", "graph_ns"), formatted, strict=True)]
        cells = (str(row.get("ops", "")), str(row.get("kernels", "")), *times, row.get("gpu", ""), row.get("date", ""))
        table.add_row(row["name"], *cells)
    print_table(console(), table, drop=("date", "GPU"))


def print_policies(policies: Sequence[RegisteredPolicy]) -> None:
    """Print the policies, and the name of the recommended schedule."""
    table = Table(show_edge=False, header_style="bold")
    for column in ("policy", "what it does", "source", "streams"):
        table.add_column(column)
    for policy in policies:
        most = "any" if policy.max_streams is None else f"at most {policy.max_streams}"
        default = " The default." if policy.name == DEFAULT_POLICY else ""
        slow = " Slow: explore leaves it out." if policy.slow else ""
        table.add_row(policy.name, f"{policy.summary}{default}{slow}", policy.source, most)
    table.add_row(RECOMMENDED, "What explore recommends, after its search.", "gpusim", "any")
    print_table(console(), table, drop=("source", "streams"))


def print_hardware(models: Sequence[HardwareModel]) -> None:
    """Print hardware models."""
    table = Table(show_edge=False, header_style="bold")
    for column in ("name", "GPU", "SMs", "memory", "bandwidth", "gap", "front end", "calibrated"):
        table.add_column(column, justify="left" if column in ("name", "GPU", "calibrated") else "right")
    for model in models:
        table.add_row(
            model.name,
            model.gpu,
            str(model.limits.sms),
            f"{model.memory.dram_bytes / GIB:.1f} GiB",
            f"{model.memory.dram_bytes_per_ns / 1000:.2f} TB/s",
            format_ns(model.graph.chain_ns),
            format_ns(model.graph.front_end_ns),
            "yes" if model.calibrated else styled(("no: data sheet only", "yellow")),
        )
    print_table(console(), table, drop=("GPU", "front end", "gap"))


__all__ = [
    "captured_document",
    "console",
    "explored_document",
    "print_captured",
    "print_explored",
    "print_hardware",
    "print_measurement",
    "print_policies",
    "print_simulated",
    "print_traces",
]
