"""What the commands print: tables for people, documents for `--json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from gpusim.hardware.model import HardwareModel
from gpusim.plan.measurement import Measurement
from gpusim.report.choices import choices_document, choices_lines
from gpusim.search.explore import Explored
from gpusim.trace.schema import Timing, Trace
from gpusim.units import format_bytes, format_ns


def console() -> Console:
    """Standard output, as wide as a table needs where it is no terminal."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=120)


def explored_document(explored: Explored) -> dict[str, Any]:
    """`explore --json`."""
    gain = explored.attribution
    return {
        "trace": explored.trace.name,
        "hardware": explored.hardware.label,
        "calibrated": explored.hardware.calibrated,
        "sequential_ns": explored.sequential_ns,
        "results": [_row(row.policy, row.streams, row.makespan_ns, row.speedup) for row in explored.rows],
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
        },
        "verdict": {
            "worth_it": explored.verdict.worth_it,
            "speedup": explored.verdict.speedup,
            "interval": [explored.verdict.low, explored.verdict.high],
            "text": explored.verdict.text,
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


def print_explored(explored: Explored) -> None:
    """The table of policies, the bounds, the attribution, the verdict."""
    out = console()
    model = explored.trace.model
    kernels = sum(len(op.kernels) for op in explored.trace.ops)
    out.print(
        f"[bold]{explored.trace.name}[/bold]: {model.network}, {model.mode}, batch {model.batch}, {model.dtype}, "
        f"{len(explored.trace.ops)} ops, {kernels} kernels; hardware [bold]{explored.hardware.label}[/bold]\n"
    )
    table = Table(show_edge=False, header_style="bold")
    for column in ("policy", "streams", "predicted", "speed-up", "memory"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for policy in dict.fromkeys(row.policy for row in explored.rows):
        row = explored.best_of(policy)
        style = "bold green" if row is explored.best else None
        cells = (str(row.streams), format_ns(row.makespan_ns), f"{row.speedup:.2f}x", format_bytes(row.peak_bytes))
        table.add_row(policy, *cells, style=style)
    out.print(table)
    searched = f"{explored.evaluations} schedules searched"
    if explored.interrupted:
        searched += ", stopped early: the best found so far"
    out.print(f"\n[dim]speed-up over the sequential CUDA graph of the same kernels; {searched}[/dim]")
    if explored.left_out:
        out.print(f"[dim]{', '.join(explored.left_out)} left out: {len(explored.trace.ops):,} ops[/dim]")
    _print_bounds(out, explored)
    _print_attribution(out, explored)
    for line in choices_lines(explored):
        out.print(line)
    mark = "[green]" if explored.verdict.worth_it else "[yellow]"
    out.print(f"\n{mark}[bold]Verdict.[/bold] {explored.verdict.text}[/]")


def _print_bounds(out: Console, explored: Explored) -> None:
    largest = explored.bounds.largest[1]
    parts = [
        f"[bold]{name} {format_ns(time)}[/bold]" if name == largest else f"{name} {format_ns(time)}"
        for time, name in explored.bounds.named
    ]
    out.print(f"\nLower bounds: {', '.join(parts)}")


def _print_attribution(out: Console, explored: Explored) -> None:
    gain = explored.attribution
    steps = []
    if gain.eager_ns is not None and gain.launch_ns is not None:
        steps.append(f"eager step {format_ns(gain.eager_ns)} (measured)")
        steps.append(f"launch overhead removed {_saved(gain.launch_ns)}")
    steps.append(f"sequential graph {format_ns(explored.sequential_ns)}")
    steps.append(f"streams {_saved(gain.concurrency_ns)}")
    if gain.kernels_ns:
        steps.append(f"other kernels {_saved(gain.kernels_ns)}")
    steps.append(f"order {_saved(gain.order_ns)}")
    steps.append(f"best {format_ns(explored.best.makespan_ns)}")
    out.print("Where the gain comes from: " + " > ".join(steps))


def _saved(time_ns: int) -> str:
    """Time saved, as a change: a gain is negative."""
    return f"-{format_ns(time_ns)}" if time_ns >= 0 else f"+{format_ns(-time_ns)}"


def print_simulated(document: Mapping[str, Any]) -> None:
    """One simulated schedule."""
    out = console()
    bound = document["bounds"]
    out.print(
        f"[bold]{document['trace']}[/bold] on {document['hardware']}: {document['policy']}, "
        f"{document['streams']} streams, launched by {document['launch']}\n"
        f"  predicted   {format_ns(document['makespan_ns'])}\n"
        f"  sequential  {format_ns(document['sequential_ns'])}  (speed-up {document['speedup']:.2f}x)\n"
        f"{_eager(document['eager'])}"
        f"  memory      {format_bytes(document['peak_bytes'])} at the peak\n"
        f"  bounds      critical path {format_ns(bound['critical_path_ns'])}, SM area {format_ns(bound['area_ns'])} "
        f"({format_ns(bound['contention_ns'])} with contention), DRAM {format_ns(bound['bandwidth_ns'])}, "
        f"front end {format_ns(bound['front_end_ns'])}"
    )


def _eager(times: Mapping[str, int]) -> str:
    """The eager step, predicted and measured, as a line; nothing for a trace that knows neither."""
    parts = [f"{format_ns(times['predicted_ns'])} predicted"] if "predicted_ns" in times else []
    parts += [f"{format_ns(times['measured_ns'])} measured at the capture"] if "measured_ns" in times else []
    return f"  eager step  {', '.join(parts)}\n" if parts else ""


def captured_document(trace: Trace, loss_error: float, gradient_error: float, file: str) -> dict[str, Any]:
    """`capture --json`."""
    truth = trace.ground_truth
    assert truth is not None
    kernels = [kernel for op in trace.ops for kernel in op.kernels]
    return {
        "trace": trace.name,
        "file": file,
        "ops": len(trace.ops),
        "kernels": len(kernels),
        "kernel_ns": sum(kernel.dur_ns for kernel in kernels),
        "eager": truth.eager,
        "graph": truth.graph,
        "attributed_frac": truth.attributed_frac,
        "variants": sum(bool(op.variants) for op in trace.ops),
        "unattributed": truth.unattributed,
        "output_error": loss_error,
        "gradient_error": gradient_error,
        "gpu": trace.provenance.gpu,
    }


def _variants(ops: int) -> str:
    """How many ops have variants, as a line; nothing where none was captured."""
    return f"  {ops} ops have other kernels to choose from\n" if ops else ""


def print_captured(document: Mapping[str, Any]) -> None:
    """What a capture gave."""
    out = console()
    gpu = document["gpu"]
    out.print(
        f"[bold]{document['trace']}[/bold] written to {document['file']}\n"
        f"  {document['ops']} ops, {document['kernels']} kernels, {format_ns(document['kernel_ns'])} of kernel time, "
        f"{document['attributed_frac']:.2%} tied to an op\n"
        f"  eager step        {_timing(document['eager'])}\n"
        f"  sequential graph  {_timing(document['graph'])}\n"
        f"  rebuilt step against the model: output {document['output_error']:.2g}, "
        f"gradients {document['gradient_error']:.2g} apart\n"
        f"{_variants(document['variants'])}"
        f"  {gpu.name}, driver {gpu.driver}, torch {gpu.torch}, SM clock {gpu.sm_clock_mhz} MHz"
    )


def print_measurement(measurement: Measurement, trace: Trace) -> None:
    """One replay: measured, predicted, checked."""
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
    predicted, predicted_alone = format_ns(measurement.predicted_ns), format_ns(measurement.predicted_sequential_ns)
    out.print(
        f"[bold]{measurement.trace}[/bold]: {measurement.policy}, {measurement.streams} streams, "
        f"{measurement.events} events{eager}\n"
        f"  sequential graph  {_timing(measurement.sequential)}  predicted {predicted_alone} "
        f"({measurement.sequential_error:+.1%})\n"
        f"  schedule          {_timing(measurement.schedule)}  predicted {predicted} "
        f"({measurement.prediction_error:+.1%}, {measurement.hardware})\n"
        f"  [bold]speed-up          {measurement.speedup:.2f}x[/bold]\n"
        f"  outputs           {same}, {outputs.compared} tensors, tolerance {outputs.tolerance:g}: "
        f"{'[green]equal[/green]' if outputs.equal else '[red]DIFFERENT[/red]'}\n"
        f"  memory            {peak} at the peak, sequential {sequential_peak}\n"
        f"  {gpu.name}, driver {gpu.driver}, torch {gpu.torch}, SM clock {gpu.sm_clock_mhz} MHz"
    )


def _timing(timing: Timing) -> str:
    return f"{format_ns(timing.median_ns)} [{format_ns(timing.lo_ns)}, {format_ns(timing.hi_ns)}]"


def print_traces(rows: Sequence[Mapping[str, Any]]) -> None:
    """The bundled traces."""
    table = Table(show_edge=False, header_style="bold")
    for column in ("trace", "ops", "kernels", "eager", "sequential graph", "GPU", "date"):
        table.add_column(column, justify="left" if column in ("trace", "GPU", "date") else "right")
    for row in rows:
        times = [format_ns(row[key]) if key in row else "" for key in ("eager_ns", "graph_ns")]
        cells = (str(row.get("ops", "")), str(row.get("kernels", "")), *times, row.get("gpu", ""), row.get("date", ""))
        table.add_row(row["name"], *cells)
    console().print(table)


def print_hardware(models: Sequence[HardwareModel]) -> None:
    """Hardware models."""
    table = Table(show_edge=False, header_style="bold")
    for column in ("name", "GPU", "SMs", "memory", "bandwidth", "gap", "front end", "calibrated"):
        table.add_column(column, justify="left" if column in ("name", "GPU", "calibrated") else "right")
    for model in models:
        table.add_row(
            model.name,
            model.gpu,
            str(model.limits.sms),
            format_bytes(model.memory.dram_bytes),
            f"{model.memory.dram_bytes_per_ns / 1000:.2f} TB/s",
            format_ns(model.graph.chain_ns),
            format_ns(model.graph.front_end_ns),
            "yes" if model.calibrated else "[yellow]no: data sheet only[/yellow]",
        )
    console().print(table)


__all__ = [
    "captured_document",
    "console",
    "explored_document",
    "print_captured",
    "print_explored",
    "print_hardware",
    "print_measurement",
    "print_simulated",
    "print_traces",
]
