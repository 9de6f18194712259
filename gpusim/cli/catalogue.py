"""`gpusim traces`, `gpusim hardware` and `gpusim policies`: what there is."""

from __future__ import annotations

import click

from gpusim.cli.common import json_option, print_json
from gpusim.errors import HardwareError, PlanError


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
def policies(as_json: bool) -> None:
    """List the policies that --policy takes."""
    from gpusim.policies import DEFAULT_POLICY, RECOMMENDED
    from gpusim.policies.registry import POLICIES
    from gpusim.report.tables import print_policies

    if as_json:
        fields = ("name", "summary", "source", "max_streams", "slow")
        found = [{field: getattr(policy, field) for field in fields} for policy in POLICIES.values()]
        print_json({"policies": found, "default": DEFAULT_POLICY, "recommended": RECOMMENDED})
    else:
        print_policies(tuple(POLICIES.values()))


@click.command()
@click.option(
    "--compare",
    nargs=2,
    metavar="A B",
    default=None,
    help="Compare two calibrations of one GPU (names or files), number by number.",
)
@json_option
def hardware(compare: tuple[str, str] | None, as_json: bool) -> None:
    """List the bundled hardware models, or compare two."""
    from gpusim.hardware.model import bundled_hardware, read_hardware
    from gpusim.report.tables import print_hardware

    if compare is not None:
        _compare(*compare, as_json=as_json)
        return
    models = [read_hardware(path) for path in bundled_hardware().values()]
    if as_json:
        print_json({"hardware": models})
    else:
        print_hardware(models)


def _compare(one: str, other: str, *, as_json: bool) -> None:
    """Every measured number of two models, and what predictions of small bundled steps make of the difference."""
    from gpusim.hardware.model import load_hardware
    from gpusim.report.calibrations import JUDGED_BY, compared_document, print_compared
    from gpusim.search.calibrations import compare
    from gpusim.trace.store import load_trace

    first, second = load_hardware(one), load_hardware(other)
    try:
        found = compare(first, second, [load_trace(name) for name in JUDGED_BY])
    except (PlanError, HardwareError) as cause:
        raise HardwareError(f"{one} and {other}", f"cannot be compared: {cause}") from cause
    document = compared_document(one, other, found)
    if as_json:
        print_json(document)
    else:
        print_compared(document)
