"""Results of the experiments on the engines' rules, as tables."""

from __future__ import annotations

from gpusim.formats.hardware import HardwareModel
from gpusim.formats.rules import Rule, Rules
from gpusim.report.fit import print_table
from gpusim.report.terminal import Table, console, styled
from gpusim.validation.hyper_q import hyper_q_markdown, predict_hyper_q

VERDICTS = {True: "holds", False: "does not hold", None: "measured"}


def print_rules(report: Rules, hardware: HardwareModel) -> None:
    """Print each rule with verdict and observation."""
    out = console()
    table = Table(show_edge=False, header_style="bold")
    for column in ("rule", "", "found"):
        table.add_column(column)
    for rule in report.rules:
        verdict = VERDICTS[rule.holds]
        table.add_row(rule.name, styled((verdict, "red")) if rule.holds is False else verdict, rule.found)
    print_table(out, table)
    if report.hyper_q is not None:
        errors = [abs(cell.error) for cell in predict_hyper_q(report.hyper_q, hardware)]
        within = sum(error <= 0.05 for error in errors)
        out.print(f"\nlaunches into streams: {within} of {len(errors)} cases predicted within 5 %")


def rules_markdown(report: Rules, hardware: HardwareModel, source: str) -> str:
    """Return the report for docs: rules, the table of launches into streams, and all numbers."""
    lines = [
        f"# Rules of the dispatcher on {report.gpu.name}",
        "",
        f"Generated from `{source}`. {report.date}, driver {report.gpu.driver}, torch {report.gpu.torch}, SM clock "
        f"{report.gpu.sm_clock_mhz} MHz. Command: `{report.command}`",
        "",
        "| rule | what the engines take to be so | | what was seen |",
        "|---|---|---|---|",
    ]
    lines += [f"| {rule.name} | {rule.rule} | {VERDICTS[rule.holds]} | {rule.found} |" for rule in report.rules]
    if report.hyper_q is not None:
        cells = predict_hyper_q(report.hyper_q, hardware)
        lines += ["", "## Launches into many streams", "", hyper_q_markdown(report.hyper_q, cells).rstrip()]
    for rule in report.rules:
        lines += _numbers(rule)
    return "\n".join(lines) + "\n"


def _numbers(rule: Rule) -> list[str]:
    if len(rule.numbers) < 4:
        return []
    rows = [f"| {name} | {value:.4g} |" for name, value in rule.numbers.items()]
    return ["", f"## {rule.name[0].upper()}{rule.name[1:]}", "", "| | |", "|---|--:|", *rows]
