"""Common formats that gpusim's commands do not read, recognised by their first bytes, with advice for the user.

Used only after a reader has refused a file. At most `LOOKED_AT_BYTES` of it are read, and nothing in it is run.
"""

from __future__ import annotations

import re
from typing import Final

LOOKED_AT_BYTES: Final = 64 * 1024
#: Maximum program output above a table of Nsight Compute.
SEARCHED_BYTES: Final = 4 * 1024 * 1024
#: Byte order marks of UTF-16.
UTF16_STARTS: Final = b"\xff\xfe", b"\xfe\xff"

#: Formats of other tools that become traces, in words.
IMPORTED: Final = "Kineto JSON, nsys SQLite, ncu CSV, execution traces, Chakra .et, dumps of CUDA graphs"
#: Advice for a file that ends early.
AGAIN: Final = "copy or write it again"

_CAPTURE = "capture the step with `gpusim capture` on its GPU"
#: The command that reads the file as it is comes first; a capture has what a profile lacks.
_IMPORT = f"`gpusim import FILE -o TRACE` reads it; for its data dependencies, {_CAPTURE}"
#: A text or a structural character of JSON.
_TOKEN = re.compile(rb'"((?:[^"\\]|\\.)*)"|[\[\]{}:,]')
#: gpusim's own documents by the name in `schema`: description, and the option that takes it.
_OWN: Final = {
    "gpusim-trace": ("a trace", "give it as TRACE, such as `gpusim explore FILE`"),
    "gpusim-schedule": ("a schedule", "give it with `gpusim simulate TRACE --schedule FILE`"),
    "gpusim-measurement": ("a measurement", "give it with `gpusim simulate TRACE --measured FILE`"),
    "gpusim-hardware": ("a hardware model", "give it with `gpusim explore TRACE --hw FILE`"),
    "gpusim-results": (
        "a file of results",
        "predict it again with `gpusim validate FILE --again`, or draw it with `gpusim figure fidelity FILE`",
    ),
    "gpusim-replayed": ("a file of replayed schedules", "it belongs to its results: `gpusim figure fidelity FILE`"),
    "gpusim-pairs": ("a file of measured pairs of kernels", "no command reads it"),
    "gpusim-predictions": ("a file of predicted schedules", "`gpusim validate` reads it with its trace"),
    "gpusim-trials": ("a file of trials", "`gpusim validate` reads it with its recipe"),
    "gpusim-stages": ("a file of stage latencies for IOS", "`gpusim validate` reads it with its trace"),
    "gpusim-memory-plan": ("a memory plan", "give it with `gpusim replay TRACE --memory-plan FILE`"),
    "gpusim-memory-predictions": ("a file of predicted memory plans", "`gpusim validate` reads it with its trace"),
    "gpusim-replayed-memory": ("a file of replayed memory plans", "it belongs to its results"),
    "gpusim-rules": ("a check of the engines' rules", "it is read with its hardware model"),
    "gpusim-hyper-q": ("a measurement of hardware queues", "no command reads it"),
}
_NSYS: Final = (
    "a report of Nsight Systems",
    f"write it as SQLite with `nsys export --type sqlite FILE`, and give that; for its data dependencies, {_CAPTURE}",
)
_PERFETTO: Final = "a binary trace of Perfetto", "write it as JSON with `traceconv json FILE OUT`, and give that"
_DRAWN: Final = "it has no numbers of a step; give the file that it was made from"
_UNPACK: Final = "unpack it, and give the file in it"
#: Beginnings of files of any origin: what a wrong click or a failed download gives.
_STARTS: Final = (
    (rb"\x89PNG\r\n", "a picture (PNG)", _DRAWN),
    (rb"\xff\xd8\xff", "a picture (JPEG)", _DRAWN),
    (rb"GIF8|RIFF....WEBP", "a picture", _DRAWN),
    (rb"%PDF-", "a PDF document", _DRAWN),
    (rb"\x28\xb5\x2f\xfd", "a file packed with zstd", f"{_UNPACK} (`zstd -d FILE`)"),
    (rb"\xfd7zXZ\0", "a file packed with xz", f"{_UNPACK} (`xz -d FILE`)"),
    (rb"BZh[1-9]1AY&SY", "a file packed with bzip2", f"{_UNPACK} (`bzip2 -d FILE`)"),
    (rb"7z\xbc\xaf\x27\x1c|Rar!", "an archive (7z or RAR)", _UNPACK),
    (rb"\x7fELF", "a program", "it has no numbers of a step"),
    (rb"version https://git-lfs", "a pointer of Git LFS", "fetch the file that it stands for with `git lfs pull`"),
    (
        rb"\s*(?:<!--.{0,999}?-->\s*)?<(?i:!doctype\s+html|html|head|body)\b",
        "a web page (HTML)",
        "download the file that the page shows or links to, such as the raw file",
    ),
    (rb"\s*<(?:\?xml|svg)\b", "an XML document", _DRAWN),
)
_ENDS: Final = {
    ".nsys-rep": _NSYS,
    ".qdrep": _NSYS,
    ".qdstrm": _NSYS,
    ".pftrace": _PERFETTO,
    ".perfetto-trace": _PERFETTO,
    ".ncu-rep": (
        "a report of Nsight Compute",
        "write its table with `ncu --import FILE --csv --page raw`, and give that to `gpusim import` with its profile",
    ),
    ".onnx": ("an ONNX model", f"it has no measured kernels; {_CAPTURE}"),
    ".et": ("a Chakra execution trace", _IMPORT),
    ".py": ("a Python file", "`gpusim capture FILE:FUNCTION` captures a step of its model"),
    ".toml": ("a TOML file", "`gpusim validate` takes recipes, `gpusim sweep FILE` sweeps"),
}
_KINETO = "a trace of torch.profiler (Kineto)"
#: A name in the pickle of `torch.cuda.memory._dump_snapshot`, which is at its beginning.
_SNAPSHOT = re.compile(rb"\A\x80[\x02-\x05].{0,4000}?(?:segments|device_traces|segment_type)", re.DOTALL)
#: First member of what `torch.save` writes.
_TORCH_SAVE = re.compile(rb"\APK\x03\x04.{26}[^/\0]{1,200}/(?:data\.pkl|\.format_version|version|byteorder)", re.DOTALL)
#: Header of a table of Nsight Compute, which follows lines of its own and of the program.
_NCU_START = re.compile(rb'^(?:\xef\xbb\xbf)?"?ID"?[,;]"?(?:Process ID|Kernel Name)"?[,;]', re.MULTILINE)
#: Kind of an event in a list of events.
_PHASE = re.compile(rb'[{,]\s*"ph"\s*:\s*"')
_CHAKRA_SCHEMA = re.compile(rb"\A[\x08-\x7f]\x12[\x08-\x7f]\x0a\x06schema")
_CHAKRA_ET = re.compile(rb"\A.\x0a[\x01-\x20]\d+\.\d+\.\d+", re.DOTALL)


def known_format(data: bytes, name: str, wanted: str) -> str:
    """Return description and advice for a refused file, to follow its name in a message; empty if unknown.

    `data` is the file's content or its beginning, `wanted` the schema that the reader expects (`gpusim-trace/2`).
    """
    recognised = _format(data[:LOOKED_AT_BYTES], name.lower(), wanted.partition("/")[0])
    if recognised is None:
        return ""
    description, advice = recognised
    return f"is {description}, and {_read_here(wanted)}: {advice}"


def unknown_format(wanted: str) -> str:
    """Return what is read in place of an unrecognised file, to follow the problem in a message."""
    own = wanted.partition("/")[0]
    imported = f"; `gpusim import` makes one of {IMPORTED}" if own == "gpusim-trace" else ""
    return f"{_read_here(wanted)}{imported}"


def not_gzip(data: bytes) -> str:
    """Return why a file named .gz that is not gzip is refused, to follow its name in a message."""
    if data.lstrip()[:1] in (b"{", b"["):
        return "is named .gz but is not gzip: give it a name without .gz"
    recognised = _format(data[:LOOKED_AT_BYTES], "", "")
    if recognised is None:
        return f"is named .gz but is not gzip (it starts with {data[:4]!r})"
    return f"is named .gz but is {recognised[0]}: {recognised[1]}"


def _read_here(wanted: str) -> str:
    name = _OWN.get(wanted.partition("/")[0], ("",))[0]
    return f"{name} ({wanted}) is read here" if name else f"{wanted} is read here"


def profile_format(data: bytes, name: str) -> str:
    """Return the name of the import format of a file, from its beginning; empty for any other file."""
    if data.startswith(UTF16_STARTS):
        data = data[:LOOKED_AT_BYTES].decode("utf-16", "replace").encode("utf-8", "replace")
    if data.startswith(b"SQLite format 3\0"):
        return "nsys-sqlite"
    if _NCU_START.search(data[:SEARCHED_BYTES]):  # below the output of the program
        return "ncu-csv"
    data = data[:LOOKED_AT_BYTES]
    if _CHAKRA_ET.match(data) or _CHAKRA_SCHEMA.match(data):
        return "chakra-et"
    text = data.removeprefix(b"\xef\xbb\xbf").lstrip()
    if re.match(rb"\[\s*\{", text) and _PHASE.search(text):
        return "kineto"
    if not text.startswith(b"{"):
        return "chakra-et" if name.lower().endswith(".et") else ""
    names = _top_level(text)
    schema = names.get("schema", "")
    if schema.startswith("gpusim-trace/"):
        return "gpusim-trace"
    if "traceEvents" in names or {"schemaVersion", "deviceProperties"} <= set(names):
        return "kineto"
    if "workload_graph" in names:
        return "chakra-json"
    if "nodes" in names and re.match(r"\d+\.\d+", schema):
        return "execution-trace"
    if schema.startswith("gpusim-cuda-graph/") or {"exec_graph_id", "nodes"} <= set(names):
        return "cuda-graph"
    return ""


def _format(data: bytes, name: str, wanted: str) -> tuple[str, str] | None:
    """Return description and advice for a file, or None."""
    if data.startswith(b"SQLite format 3\0"):
        return "an SQLite file, such as Nsight Systems exports", _IMPORT
    if data.startswith(b"NVR\0"):
        return _ENDS[".ncu-rep"]
    if re.search(rb'^"?Kernel Name"?,"?Invocations"?', data, re.MULTILINE):
        return "a summary of Nsight Compute", "write a row a kernel: `ncu --import FILE --csv --page raw`"
    if _NCU_START.search(data):
        return "an output of Nsight Compute", f"{_IMPORT}; --counters adds what ncu counts"
    if data.startswith((b"==PROF==", b"==WARNING==", b"==ERROR==")):
        return "an output of Nsight Compute without a table", "write one: `ncu --import FILE --csv --page raw`"
    if _TORCH_SAVE.match(data):
        return "a file of torch.save (a zip archive)", f"it has weights and no measured kernels; {_CAPTURE}"
    if data.startswith(b"PK\x03\x04"):
        return "a zip archive without a trace or a profile", _UNPACK
    if re.match(rb".{5}\x00{3}\{\s*\"", data, re.DOTALL):  # the size of a header of less than 1 TB, then the header
        return "a safetensors file", f"it has weights and no measured kernels; {_CAPTURE}"
    if _SNAPSHOT.match(data):
        return (
            "a memory snapshot of torch (a pickle)",
            f"`gpusim memory TRACE --measured FILE` compares it with the predicted memory; for TRACE, {_CAPTURE}",
        )
    if re.match(rb"\x80[\x02-\x05]", data):
        return "a Python pickle, which gpusim never loads", _CAPTURE
    if re.match(rb"\x08[\x01-\x20]\x12[\x01-\x40](?:pytorch|onnx|tf2onnx|keras)", data):
        return _ENDS[".onnx"]
    if _CHAKRA_ET.match(data):
        return _ENDS[".et"]
    for start, description, advice in _STARTS:
        if re.match(start, data, re.DOTALL):
            return description, advice
    if (text := data.lstrip())[:1] in (b"{", b"["):
        return _json_format(text, wanted)
    return next((known for end, known in _ENDS.items() if name.endswith(end)), None)


def _json_format(data: bytes, wanted: str) -> tuple[str, str] | None:
    profile = _KINETO, f"{_IMPORT}, or compare it with a prediction by "
    measured = "`gpusim simulate TRACE --measured FILE --html OUT`"
    if re.match(rb'\[\s*\{[^{}]{0,2000}"ph"\s*:', data):
        return profile[0], profile[1] + measured
    if re.match(rb"\[\s*\[\s*-?\d+\s*,\s*\d", data):
        return "a memory timeline of torch", f"it has sizes of memory and no kernels; {_CAPTURE}"
    names = _top_level(data)
    schema = names.get("schema", "")
    own = schema.partition("/")[0]
    if own == wanted:
        return None  # another version, or damaged: the reader has a better message
    if own in _OWN:
        return _OWN[own]
    if wanted == "gpusim-measurement" and "traceEvents" in names:
        return None  # a damaged profile: the reader has a better message
    if "traceEvents" in names and b'"producer":"gpusim"' in data:
        return "a timeline of gpusim's", f"open it at ui.perfetto.dev, or give it with {measured}"
    if "traceEvents" in names or {"schemaVersion", "deviceProperties"} <= set(names):
        return profile[0], profile[1] + measured
    if "nodes" in names and re.match(r"\d+\.\d+", schema):
        return "an execution trace of PyTorch", f"give it to `gpusim import` with its profile; {_CAPTURE}"
    return None


def _top_level(data: bytes) -> dict[str, str]:
    """Return the names at the top level of a JSON object, with their values if these are texts."""
    values: dict[str, str] = {}
    depth, name, last, after_colon = 0, "", "", False
    for token in _TOKEN.finditer(data):
        mark = token[0]
        if mark in (b"{", b"["):
            depth += 1
        elif mark in (b"}", b"]"):
            depth -= 1
        elif depth != 1:
            continue
        elif mark == b":":
            name, after_colon = last, True
            values[name] = ""
        elif mark == b",":
            after_colon = False
        elif after_colon:
            values[name] = token[1].decode("utf-8", "replace")
        else:
            last = token[1].decode("utf-8", "replace")
    return values
