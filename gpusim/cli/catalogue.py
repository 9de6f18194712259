"""`gpusim traces`, `gpusim hardware` and `gpusim policies`: lists of what is available."""

from __future__ import annotations

import click

from gpusim.cli.common import json_option, print_json


@click.command()
@json_option
def traces(as_json: bool) -> None:
    """List the bundled traces."""
    from gpusim.api import commands
    from gpusim.report.tables import print_traces

    rows = commands.trace_entries()
    if as_json:
        print_json({"traces": rows})
    else:
        print_traces(rows)


@click.command()
@json_option
def policies(as_json: bool) -> None:
    """List the policies that --policy takes."""
    from gpusim.api import commands
    from gpusim.defaults import DEFAULT_POLICY, RECOMMENDED
    from gpusim.report.tables import print_policies

    known = commands.registered_policies()
    if as_json:
        fields = ("name", "summary", "source", "max_streams", "slow")
        rows = [{field: getattr(policy, field) for field in fields} for policy in known]
        print_json({"policies": rows, "default": DEFAULT_POLICY, "recommended": RECOMMENDED})
    else:
        print_policies(tuple(known))


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
    from gpusim.api import commands
    from gpusim.report.tables import print_hardware

    if compare is not None:
        _compare(*compare, as_json=as_json)
        return
    models = commands.hardware_models()
    if as_json:
        print_json({"hardware": models})
    else:
        print_hardware(models)


def _compare(one: str, other: str, *, as_json: bool) -> None:
    """Print every measured number of two models, and the effect of differences on predictions of bundled steps."""
    from gpusim.api import commands
    from gpusim.report.hardware_comparison import JUDGED_BY, compared_document, print_compared

    document = compared_document(one, other, commands.compare_hardware(one, other, JUDGED_BY))
    if as_json:
        print_json(document)
    else:
        print_compared(document)
