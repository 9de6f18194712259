"""Comparison of two calibrations, as a table and as a document."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from gpusim.analysis.hardware_comparison import TOLERANCE, Difference
from gpusim.report.fit import print_table
from gpusim.report.terminal import Table, console, styled

#: Bundled steps for judging the effect of a number: small and large, inference and training.
JUDGED_BY: Final = ("googlenet-infer-b1", "googlenet-train-b8", "inception_v3-infer-b1")


def compared_document(first: str, second: str, differences: Sequence[Difference]) -> dict[str, Any]:
    """Return the document of `gpusim hardware --compare --json`."""
    return {
        "first": first,
        "second": second,
        "tolerance": TOLERANCE,
        "judged_by": list(JUDGED_BY),
        "agree": sum(difference.agrees() for difference in differences),
        "parameters": [
            {
                "parameter": difference.parameter,
                "first": difference.first,
                "second": difference.second,
                "relative": difference.relative if math.isfinite(difference.relative) else None,
                "agrees": difference.agrees(),
                "effect": difference.effect,
            }
            for difference in differences
        ],
    }


def print_compared(document: Mapping[str, Any]) -> None:
    """Print each number of both models and whether they agree."""
    out = console()
    table = Table(show_edge=False, header_style="bold")
    for column in ("parameter", "first", "second", "difference", "agree", "changes a prediction by up to"):
        table.add_column(column, justify="left" if column in ("parameter", "agree") else "right")
    for row in document["parameters"]:
        agrees = "yes" if row["agrees"] else styled(("no", "red"))
        table.add_row(
            row["parameter"], f"{row['first']:.5g}", f"{row['second']:.5g}", _difference(row), agrees, _effect(row)
        )
    print_table(out, table)
    names = [row["parameter"] for row in document["parameters"] if not row["agrees"]]
    total = len(document["parameters"])
    out.print(
        f"\n{document['agree']} of {total} numbers agree within {document['tolerance']:.0%}"
        + (f"; not: {', '.join(names)}" if names else "")
    )


def compared_markdown(document: Mapping[str, Any]) -> str:
    """Return the comparison as a Markdown table for docs."""
    lines = [
        "| parameter | first | second | difference | within 5 % | changes a prediction by up to |",
        "|---|--:|--:|--:|---|--:|",
    ]
    for row in document["parameters"]:
        lines.append(
            f"| `{row['parameter']}` | {row['first']:.5g} | {row['second']:.5g} | {_difference(row)} | "
            f"{'yes' if row['agrees'] else '**no**'} | {_effect(row)} |"
        )
    return "\n".join(lines) + "\n"


def _difference(row: Mapping[str, Any]) -> str:
    return "from 0" if row["relative"] is None else f"{row['relative']:+.1%}"


def _effect(row: Mapping[str, Any]) -> str:
    return "" if row["effect"] is None else f"{row['effect']:.2%}"
