"""`gpusim traces` and `gpusim hardware`: what is bundled."""

from __future__ import annotations

import click

from gpusim.cli.common import json_option, print_json


@click.command()
@json_option
def traces(as_json: bool) -> None:
    """List the bundled traces."""
    from gpusim.report.tables import print_traces
    from gpusim.trace.store import bundled_traces, read_manifest

    entries = {entry["name"]: entry for entry in read_manifest()}
    rows = [entries.get(name, {"name": name}) for name in bundled_traces()]
    if as_json:
        print_json({"traces": rows})
    else:
        print_traces(rows)


@click.command()
@json_option
def hardware(as_json: bool) -> None:
    """List the bundled hardware models."""
    from gpusim.hardware.model import bundled_hardware, read_hardware
    from gpusim.report.tables import print_hardware

    models = [read_hardware(path) for path in bundled_hardware().values()]
    if as_json:
        print_json({"hardware": models})
    else:
        print_hardware(models)
