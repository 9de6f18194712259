"""Nsight Compute: the CSV tables of its `raw` page (a row per kernel) and its `details` page (a row per metric).

Numbers may have thousands separators and a decimal comma; each file has one convention, which is detected first.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from typing import Final

from gpusim.formats.trace import Counters
from gpusim.importers.model import Activity, Finding, ImportFileError, Profile
from gpusim.io.file_limits import MAX_DOCUMENT_BYTES, MAX_PARTS, MAX_SMEM_BYTES, MAX_STEP_NS
from gpusim.units import MIB, format_bytes

#: Longest cell and most columns of a table.
MAX_CELL_BYTES: Final = MIB
MAX_COLUMNS: Final = 20_000
_HEADER: Final = re.compile(r'^"?ID"?[,;]')
_SIZE: Final = re.compile(r"\d+")
_TIME: Final = ("gpu__time_duration.sum", "gpu__time_duration.avg", "Duration")
#: Metric names on the `raw` page and on the `details` page.
_STATIC: Final = ("launch__shared_mem_per_block_static", "Static Shared Memory Per Block")
_DYNAMIC: Final = ("launch__shared_mem_per_block_dynamic", "Dynamic Shared Memory Per Block")
_REGISTERS: Final = ("launch__registers_per_thread", "Registers Per Thread")
#: Thousands separators of some languages.
_SPACES: Final = str.maketrans("", "", " \u00a0\u202f\u2009'\u2019")
_NS: Final = {
    "ns": 1,
    "nsecond": 1,
    "us": 1000,
    "usecond": 1000,
    "ms": 10**6,
    "msecond": 10**6,
    "s": 10**9,
    "second": 10**9,
}
_BYTES: Final = {
    "byte": 1,
    "b": 1,
    "kbyte": 1000,
    "mbyte": 10**6,
    "gbyte": 10**9,
    "byte/block": 1,
    "kbyte/block": 1000,
    "": 1,
}
_NOT_NUMBERS: Final = ("", "n/a", "nan", "(!) nan", "inf", "-")


def read_ncu(pieces: Iterator[bytes], name: str) -> Profile:
    """Read the kernels of an Nsight Compute table, in its order. Raises `ImportFileError`."""
    data = b"".join(pieces)
    if len(data) > MAX_DOCUMENT_BYTES // 8:
        raise ImportFileError(name, f"is larger than {format_bytes(MAX_DOCUMENT_BYTES // 8)}")
    lines = data.decode("utf-8-sig", "replace").replace("\0", "").splitlines()
    begin = next((i for i, line in enumerate(lines) if _HEADER.match(line)), None)
    if begin is None:
        raise ImportFileError(name, 'has no header of a table of Nsight Compute (a line that begins with "ID")')
    separator = ";" if lines[begin].count(";") > lines[begin].count(",") else ","
    csv.field_size_limit(MAX_CELL_BYTES)
    try:
        rows = list(csv.reader(io.StringIO("\n".join(lines[begin:])), delimiter=separator))
    except csv.Error as cause:
        raise ImportFileError(name, f"is not valid CSV: {cause}") from cause
    header = rows[0]
    if len(header) > MAX_COLUMNS or len(rows) > MAX_PARTS * 8:
        raise ImportFileError(name, f"has {len(rows)} rows of {len(header)} columns, more than a table of kernels has")
    place = {text: number for number, text in reversed(list(enumerate(header)))}
    if "Kernel Name" not in place:
        raise ImportFileError(name, "has no column 'Kernel Name'")
    long_form = "Metric Name" in place and "Metric Value" in place
    table, identity = _long(rows[1:], place) if long_form else _raw(rows[1:], header, place, name)
    comma = _comma_is_point(value for metrics in table.values() for value, _ in metrics.values())
    profile = Profile(file=name, format="ncu-csv", writer="Nsight Compute", has_times=False)
    unit_trouble: set[str] = set()
    end_ns = 0
    for key, metrics in table.items():
        cells = identity[key]
        duration = next((metrics[metric] for metric in _TIME if metric in metrics), None)
        number = None if duration is None else _number(duration[0], comma)
        unit = "ns" if duration is None else duration[1].strip().lower()
        if number is not None and unit not in _NS:
            unit_trouble.add(unit)
        dur_ns = (
            round(number * _NS.get(unit, 1))
            if number is not None and 0 <= number * _NS.get(unit, 1) <= MAX_STEP_NS
            else 0
        )
        static, dynamic = (
            next((size_bytes for text in some if (size_bytes := _bytes(metrics, text, comma)) is not None), None)
            for some in (_STATIC, _DYNAMIC)
        )
        registers = next((held for text in _REGISTERS if (held := _metric(metrics, text, comma)) is not None), None)
        profile.activities.append(
            Activity(
                kind="kernel",
                name=cells.get("Kernel Name", ""),
                device=_whole(cells.get("Device")),
                stream=_whole(cells.get("Stream")),
                start_ns=end_ns,
                dur_ns=dur_ns,
                grid=_dim3(cells.get("Grid Size")),
                block=_dim3(cells.get("Block Size")),
                regs_per_thread=None if registers is None else int(registers),
                smem_static_bytes=static or 0,
                smem_dynamic_bytes=dynamic or 0,
                counters=_counters(metrics, comma),
            )
        )
        end_ns += dur_ns
    if not profile.activities:
        raise ImportFileError(name, "has a header and no kernels")
    _find(profile, comma, unit_trouble)
    return profile


Table = dict[int, dict[str, tuple[str, str]]]


def _raw(
    rows: list[list[str]], header: list[str], place: dict[str, int], name: str
) -> tuple[Table, dict[int, dict[str, str]]]:
    units: list[str] = [""] * len(header)
    table: Table = {}
    identity: dict[int, dict[str, str]] = {}
    named = place["Kernel Name"]
    for number, row in enumerate(rows):
        if not any(row):
            continue
        if len(row) == len(header) and not row[place["ID"]].strip() and not table:
            units = row
            continue
        if len(row) <= named or not row[place["ID"]].strip().isdecimal():
            continue  # a line of the program's output, or the header of another table
        if len(row) != len(header):
            raise ImportFileError(name, f"row {number + 2} of the table has {len(row)} cells for {len(header)} columns")
        identity[number] = {text: row[at] for text, at in place.items() if "__" not in text}
        table[number] = {text: (row[at], units[at]) for text, at in place.items() if row[at]}
    return table, identity


def _long(rows: list[list[str]], place: dict[str, int]) -> tuple[Table, dict[int, dict[str, str]]]:
    metric, value, unit = place["Metric Name"], place["Metric Value"], place.get("Metric Unit", -1)
    table: Table = {}
    identity: dict[int, dict[str, str]] = {}
    keys: dict[tuple[str, ...], int] = {}
    for row in rows:
        if len(row) <= max(place.values()) or not row[place["ID"]].strip().isdecimal():
            continue
        key = tuple(row[place[text]] for text in ("ID", "Process ID", "Kernel Name") if text in place)
        number = keys.setdefault(key, len(keys))
        identity.setdefault(number, {text: row[at] for text, at in place.items() if not text.startswith("Metric")})
        table.setdefault(number, {})
        if row[metric]:
            table[number].setdefault(row[metric], (row[value], row[unit] if unit >= 0 else ""))
    return table, identity


def _comma_is_point(values: Iterator[str]) -> bool:
    """Whether the file's numbers have a decimal comma."""
    points = commas = 0
    for value in values:
        text = value.translate(_SPACES)
        if not re.fullmatch(r"-?[\d.,]+", text):
            continue
        if "." in text and "," in text:
            return text.rindex(",") > text.rindex(".")
        if text.count(",") > 1:
            points += 10
        elif text.count(".") > 1:
            commas += 10
        elif re.search(r",\d{1,2}$|,\d{4,}$|^0,", text):
            commas += 1
        elif re.search(r"\.\d{1,2}$|\.\d{4,}$|^0\.", text):
            points += 1
    return commas > points


def _number(text: str, comma: bool) -> float | None:
    text = text.strip()
    if text.lower() in _NOT_NUMBERS or len(text) > 40:
        return None
    text = text.translate(_SPACES)
    text = text.replace(".", "").replace(",", ".") if comma else text.replace(",", "")
    try:
        number = float(text)
    except ValueError:
        return None
    return number if abs(number) < 2**63 else None


def _metric(metrics: dict[str, tuple[str, str]], name: str, comma: bool) -> float | None:
    cell = metrics.get(name)
    number = None if cell is None else _number(cell[0], comma)
    return number if number is None or number >= 0 else None


def _bytes(metrics: dict[str, tuple[str, str]], name: str, comma: bool) -> int | None:
    number = _metric(metrics, name, comma)
    if number is None:
        return None
    return round(number * _BYTES.get(metrics[name][1].strip().lower(), 1))


def _counters(metrics: dict[str, tuple[str, str]], comma: bool) -> Counters | None:
    dram = _bytes(metrics, "dram__bytes.sum", comma)
    if dram is None:
        for read, write in (
            ("dram__bytes_read.sum", "dram__bytes_write.sum"),
            ("dram__bytes_op_read.sum", "dram__bytes_op_write.sum"),
        ):
            parts = [_bytes(metrics, part, comma) for part in (read, write)]
            if None not in parts:
                dram = sum(part for part in parts if part is not None)
                break
    l2 = _bytes(metrics, "lts__t_bytes.sum", comma)
    instructions = _metric(metrics, "sm__inst_executed.sum", comma)
    if dram is None or l2 is None or instructions is None:
        return None
    tensor = next(
        (
            value
            for text in metrics
            if text.startswith("sm__inst_executed_pipe_tensor") and (value := _metric(metrics, text, comma)) is not None
        ),
        0,
    )
    config = _bytes(metrics, "launch__shared_mem_config_size", comma)
    limit = 2**53
    if max(dram, l2, instructions, tensor) > limit:
        return None
    return Counters(
        dram_bytes=dram,
        l2_bytes=l2,
        instructions=int(instructions),
        tensor_instructions=int(tensor),
        smem_config_bytes=config if config is not None and config <= MAX_SMEM_BYTES else None,
    )


def _dim3(text: str | None) -> tuple[int, int, int] | None:
    parts = [int(part) for part in _SIZE.findall((text or "")[:80]) if len(part) < 12]
    if not 1 <= len(parts) <= 3 or min(parts) < 1:
        return None
    parts += [1] * (3 - len(parts))
    return parts[0], parts[1], parts[2]


def _whole(text: str | None) -> int:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 12 else 0


def _find(profile: Profile, comma: bool, units: set[str]) -> None:
    add = profile.findings.append
    add(
        Finding(
            "no-times",
            "a table of Nsight Compute has kernels one at a time: no starts, no concurrency, no launches",
            "give it together with a profile of the same run: `gpusim import PROFILE TABLE.csv`",
        )
    )
    add(Finding("no-gpu-properties", "the table does not name the GPU", "name it with --gpu"))
    add(
        Finding(
            "clocks",
            "Nsight Compute locks the clock to its base by default: durations are longer than in a run",
            "take durations from a profile, or run ncu with --clock-control none",
        )
    )
    if comma:
        add(
            Finding(
                "locale",
                "numbers have a decimal comma, and are read as such",
                "write the table with --print-units base --print-fp",
            )
        )
    if units:
        add(
            Finding(
                "units", f"durations are in unknown units: {', '.join(sorted(units))[:80]}", "use --print-units base"
            )
        )
    without = sum(not activity.dur_ns for activity in profile.activities)
    if without:
        add(
            Finding(
                "no-durations",
                f"{without} of {len(profile.activities)} kernels have no duration",
                "collect gpu__time_duration.sum",
            )
        )
