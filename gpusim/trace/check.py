"""Checks of a trace beyond its types: references, order and sizes. Each error has its JSON path."""

from __future__ import annotations

import hashlib
from math import prod

from gpusim.errors import TraceError
from gpusim.formats.arguments import TENSOR, count_values, problem_with
from gpusim.formats.trace import KERNEL, Kernel, Op, Trace
from gpusim.io.file_limits import (
    MAX_ARGUMENTS,
    MAX_BLOCK_THREADS,
    MAX_ELEMENTS,
    MAX_GRID_BLOCKS,
    MAX_PARTS,
    MAX_STEP_NS,
)
from gpusim.text import shortened
from gpusim.trace.dependencies import dependencies, handles
from gpusim.trace.element_sizes import DTYPE_BYTES
from gpusim.trace.fusion import MAX_LOOKED_AT, MAX_OPS, TOO_LONG, CoverRules
from gpusim.trace.merging import is_merge, plain_variants


def check_trace(trace: Trace, file: str) -> None:
    """Raise `TraceError` at the first dangling reference, tensor outside its storage, or op out of order."""
    if not trace.ops:
        raise TraceError(file, "has no ops", place="$.ops")
    if not any(op.kernels for op in trace.ops):
        raise TraceError(file, "has no kernels in any op", place="$.ops")
    if not any(kernel.dur_ns for op in trace.ops for kernel in op.kernels):
        raise TraceError(file, "has no kernel that takes any time", place="$.ops")
    _check_amounts(trace, file)
    _check_tensors(trace, file)
    _check_sources(trace, file)
    _check_names(trace, file)
    n_tensors = len(trace.tensors)
    known = bytearray(tensor.init is not None for tensor in trace.tensors)
    in_order, variants = True, False
    for index, op in enumerate(trace.ops):
        if not _plainly_right(op, known):
            _check_arguments(op, n_tensors, file, f"$.ops[{index}]")
            in_order = in_order and all(known[tensor] for tensor in handles(op).union(op.reads))
        for tensor in op.writes:
            known[tensor] = 1
        for result in op.outputs:
            if result is not None:
                known[result] = 1
        if op.after:
            for number, edge in enumerate(op.after):
                if edge.op >= index:
                    problem = f"op {edge.op} is not an earlier one"
                    raise TraceError(file, problem, place=f"$.ops[{index}].after[{number}].op")
        if op.variants:
            variants = True
            _check_variants(op, file, f"$.ops[{index}]")
    if not in_order:
        _check_order(trace, file)
    if variants:
        _check_covers(trace, file)


def _check_amounts(trace: Trace, file: str) -> None:
    """Check the totals of a step against the limits: kernels, arguments, GPU time and host time."""
    kernels = arguments = step_ns = host_ns = 0
    right: set[tuple[tuple[int, int, int], tuple[int, int, int]]] = set()
    for index, op in enumerate(trace.ops):
        longest_ns = 0
        ways = (op.kernels, *(variant.kernels for variant in op.variants)) if op.variants else (op.kernels,)
        for number, launches in enumerate(ways):
            launches_ns = 0
            for place, kernel in enumerate(launches):
                launches_ns += kernel.dur_ns
                launch = (kernel.grid, kernel.block)
                if launch in right:
                    continue
                wrong = _wrong_launch(kernel)
                if wrong:
                    field, problem = wrong
                    where = f"$.ops[{index}].variants[{number - 1}]" if number else f"$.ops[{index}]"
                    raise TraceError(file, problem, place=f"{where}.kernels[{place}].{field}")
                right.add(launch)
            kernels += len(launches)
            longest_ns = max(longest_ns, launches_ns)
        step_ns += longest_ns
        host_ns += op.host_ns
        arguments += count_values(op.args)
        if op.kwargs:
            arguments += count_values(op.kwargs)
        if kernels > MAX_PARTS or arguments > MAX_ARGUMENTS or step_ns > MAX_STEP_NS or host_ns > MAX_STEP_NS:
            totals = (
                ("kernels, with those of variants,", kernels, MAX_PARTS),
                ("values in arguments", arguments, MAX_ARGUMENTS),
                ("ns of kernels", step_ns, MAX_STEP_NS),
                ("ns on the host", host_ns, MAX_STEP_NS),
            )
            what, total, limit = next(row for row in totals if row[1] > row[2])
            problem = f"the ops up to this one have {total} {what} in all; the limit is {limit}"
            raise TraceError(file, problem, place=f"$.ops[{index}]")


def _wrong_launch(kernel: Kernel) -> tuple[str, str] | None:
    """Return field and problem of an impossible launch, or None."""
    x, y, z = kernel.grid
    if x * y * z > MAX_GRID_BLOCKS:
        return "grid", f"{x * y * z} blocks in all; the limit is {MAX_GRID_BLOCKS}"
    x, y, z = kernel.block
    if x * y * z > MAX_BLOCK_THREADS:
        return "block", f"{x * y * z} threads in all; the limit is {MAX_BLOCK_THREADS}"
    return None


def _check_names(trace: Trace, file: str) -> None:
    """Check that op names are unique."""
    if len({op.name for op in trace.ops}) == len(trace.ops):
        return
    seen: dict[str, int] = {}
    for index, op in enumerate(trace.ops):
        if seen.setdefault(op.name, index) != index:
            problem = f"op name '{op.name}' is taken by $.ops[{seen[op.name]}]"
            raise TraceError(file, problem, place=f"$.ops[{index}].name")


def _check_tensors(trace: Trace, file: str) -> None:
    storage_bytes = [storage.bytes for storage in trace.storages]
    needed_by: dict[tuple[object, ...], int] = {}  # a step has few distinct layouts
    for index, tensor in enumerate(trace.tensors):
        layout = (tensor.shape, tensor.stride, tensor.offset, tensor.dtype)
        known = needed_by.get(layout)
        if known is not None and tensor.storage < len(storage_bytes) and known <= storage_bytes[tensor.storage]:
            continue
        place = f"$.tensors[{index}]"
        if tensor.dtype not in DTYPE_BYTES:
            raise TraceError(file, f"unknown dtype '{tensor.dtype}'", place=f"{place}.dtype")
        if tensor.storage >= len(trace.storages):
            problem = f"storage {tensor.storage} does not exist (there are {len(trace.storages)})"
            raise TraceError(file, problem, place=f"{place}.storage")
        if len(tensor.stride) != len(tensor.shape):
            raise TraceError(file, f"{len(tensor.stride)} strides for {len(tensor.shape)} dimensions", place=place)
        elements = prod(tensor.shape)
        if elements > MAX_ELEMENTS:
            problem = f"{elements} elements in all; the limit is {MAX_ELEMENTS}"
            raise TraceError(file, problem, place=f"{place}.shape")
        needed = 0
        if elements:
            last = tensor.offset + sum((s - 1) * d for s, d in zip(tensor.shape, tensor.stride, strict=True))
            needed = (last + 1) * DTYPE_BYTES[tensor.dtype]
            if needed > storage_bytes[tensor.storage]:
                problem = f"needs {needed} bytes of a storage of {storage_bytes[tensor.storage]}"
                raise TraceError(file, problem, place=place)
        needed_by[layout] = needed


def _plainly_right(op: Op, known: bytearray) -> bool:
    """Return True if all arguments are plain values or existing tensors; otherwise the slow checks decide.

    `known` has an entry per tensor, 1 if it exists before the op.
    """
    n_tensors = len(known)
    for values in (op.args, op.kwargs.values()) if op.kwargs else (op.args,):
        for value in values:
            if type(value) is dict:
                tensor = value.get(TENSOR)
                if len(value) != 1 or type(tensor) is not int or not 0 <= tensor < n_tensors or not known[tensor]:
                    return False
            elif type(value) is list:
                for part in value:
                    if type(part) is dict or type(part) is list:
                        return False
    for tensor in op.reads:
        if tensor >= n_tensors or not known[tensor]:
            return False
    for tensor in (*op.writes, *op.cut, *op.other_gradient):
        if tensor >= n_tensors:
            return False
    for result in op.outputs:  # noqa: SIM110  (all() would make a generator for each of a million ops)
        if result is not None and not 0 <= result < n_tensors:
            return False
    return True


def _check_arguments(op: Op, n_tensors: int, file: str, place: str) -> None:
    for key, value in [(f"args[{i}]", arg) for i, arg in enumerate(op.args)] + [
        (f"kwargs.{name}", arg) for name, arg in op.kwargs.items()
    ]:
        problem = problem_with(value)
        if problem:
            raise TraceError(file, problem, place=f"{place}.{key}")
    groups = {
        "args": handles(op),
        "reads": op.reads,
        "writes": op.writes,
        "cut": op.cut,
        "other_gradient": op.other_gradient,
        "outputs": [tensor for tensor in op.outputs if tensor is not None],
    }
    for key, tensors in groups.items():
        for tensor in tensors:
            if not 0 <= tensor < n_tensors:
                problem = f"dangling reference: tensor {tensor} does not exist (there are {n_tensors})"
                raise TraceError(file, problem, place=f"{place}.{key}")


def _check_variants(op: Op, file: str, place: str) -> None:
    """Check that variants have unique names, and that an op with variants and each variant have kernels."""
    seen: dict[str, int] = {}
    for number, variant in enumerate(op.variants):
        where = f"{place}.variants[{number}]"
        if not variant.name:  # in a schedule no name stands for the captured kernels
            raise TraceError(file, "a variant without a name", place=f"{where}.name")
        if variant.name in seen:
            problem = f"variant '{variant.name}' is taken by {place}.variants[{seen[variant.name]}]"
            raise TraceError(file, problem, place=f"{where}.name")
        seen[variant.name] = number
        if not op.kernels or not variant.kernels:
            raise TraceError(file, f"variant '{variant.name}' or its op has no kernels", place=f"{where}.kernels")


def _check_covers(trace: Trace, file: str) -> None:
    """Check that each variant can do the work of the ops fused into it."""
    covering = [
        (index, number)
        for index, op in enumerate(trace.ops)
        for number, variant in enumerate(op.variants)
        if variant.covers
    ]
    if covering and len(trace.ops) > MAX_OPS:
        index, number = covering[0]
        where = f"$.ops[{index}].variants[{number}].covers"
        raise TraceError(file, f"is allowed in steps of at most {MAX_OPS} ops; this one has more", place=where)
    if not covering:
        return
    preds = dependencies(trace)
    if sum(map(len, preds)) > MAX_LOOKED_AT:
        index, number = covering[0]
        raise TraceError(file, TOO_LONG, place=f"$.ops[{index}].variants[{number}].covers")
    rules = CoverRules(trace, preds)
    for index, number in covering:
        if is_merge(trace.ops[index].variants[number]) and number < plain_variants(trace.ops[index]):
            raise TraceError(file, "merges come behind other variants", place=f"$.ops[{index}].variants[{number}]")
        variant = trace.ops[index].variants[number]
        problem = rules.problem(index, variant.covers, merge=is_merge(variant))
        if problem is not None:
            place = f"$.ops[{index}].variants[{number}].covers"
            raise TraceError(file, f"variant '{variant.name}' cannot do the work of others: {problem}", place=place)


def _check_order(trace: Trace, file: str) -> None:
    """Check that every tensor exists before an op uses it, by its `init` or an earlier op."""
    makers: dict[int, int] = {}
    for index, op in enumerate(trace.ops):
        for tensor in op.outputs:
            if tensor is not None:
                makers.setdefault(tensor, index)
        for tensor in op.writes:
            makers.setdefault(tensor, index)
    exists_from = [-1 if tensor.init is not None else len(trace.ops) for tensor in trace.tensors]
    for tensor, index in makers.items():
        exists_from[tensor] = min(exists_from[tensor], index)
    if trace.model.frontend == "inductor":
        _let_views_exist(trace, exists_from, makers)
    for index, op in enumerate(trace.ops):
        used = handles(op)
        used.update(op.reads)
        if all(exists_from[tensor] < index for tensor in used):
            continue
        for tensor in sorted(used):
            maker = makers.get(tensor)
            if exists_from[tensor] < index or (maker is None and exists_from[tensor] == index):
                continue  # a kernel may view the whole of a buffer that it writes in parts
            if maker is None:
                problem = f"tensor {tensor} is read, but no op writes it and it has no 'init'"
                raise TraceError(file, problem, place=f"$.ops[{index}]")
            if maker > index or (maker == index and tensor in op.reads and tensor in op.outputs):
                other = trace.ops[maker].name
                kind = "cycle" if _reaches(trace, index, maker) else "order against the dependencies"
                problem = f"{kind}: op '{op.name}' uses tensor {tensor}, which op '{other}' writes at $.ops[{maker}]"
                raise TraceError(file, problem, place=f"$.ops[{index}]")


def _let_views_exist(trace: Trace, exists_from: list[int], makers: dict[int, int]) -> None:
    """Let views in a trace of Inductor's kernels, which no op creates, exist as soon as their storage does: with its
    first part, or, if an op writes the view itself later, with the first tensor that fills the storage.
    """
    first: dict[int, int] = {}
    filled: dict[int, int] = {}
    for tensor, index in zip(trace.tensors, exists_from, strict=True):
        first[tensor.storage] = min(first.get(tensor.storage, len(trace.ops)), index)
        size = prod(tensor.shape) * DTYPE_BYTES.get(tensor.dtype, 0)
        if not tensor.offset and size >= trace.storages[tensor.storage].bytes:
            filled[tensor.storage] = min(filled.get(tensor.storage, len(trace.ops)), index)
    for number, tensor in enumerate(trace.tensors):
        since = first if number not in makers else filled
        exists_from[number] = min(exists_from[number], since.get(tensor.storage, len(trace.ops)))


def _check_sources(trace: Trace, file: str) -> None:
    """Check that code matches its hash and that ops refer to code in the trace."""
    if trace.sources and trace.model.frontend != "inductor":
        raise TraceError(file, "only a trace of the front end 'inductor' has code in it", place="$.sources")
    known: set[str] = set()
    for number, source in enumerate(trace.sources):
        place = f"$.sources[{number}]"
        if source.sha256 in known:
            raise TraceError(file, f"code '{source.sha256}' is there twice", place=f"{place}.sha256")
        if hashlib.sha256(source.text.encode("utf-8", "surrogatepass")).hexdigest() != source.sha256:
            raise TraceError(file, "the text of the code does not have this hash", place=f"{place}.sha256")
        known.add(source.sha256)
    for index, op in enumerate(trace.ops):
        if (op.target == KERNEL) != bool(op.source):
            problem = f"'{KERNEL}' needs code" if op.target == KERNEL else f"only '{KERNEL}' has code"
            raise TraceError(file, problem, place=f"$.ops[{index}].source")
        if op.source and op.source not in known:
            raise TraceError(file, f"there is no code '{shortened(op.source)}'", place=f"$.ops[{index}].source")


def _reaches(trace: Trace, source: int, goal: int) -> bool:
    """Return True if op `goal` uses, directly or not, a tensor written by op `source`."""
    if source == goal:
        return True
    users: dict[int, list[int]] = {}
    for index, op in enumerate(trace.ops):
        for tensor in handles(op) | set(op.reads):
            users.setdefault(tensor, []).append(index)
    todo, seen = [source], {source}
    while todo:
        op = trace.ops[todo.pop()]
        made = [tensor for tensor in (*op.outputs, *op.writes) if tensor is not None]
        for user in (user for tensor in made for user in users.get(tensor, ())):
            if user == goal:
                return True
            if user not in seen:
                seen.add(user)
                todo.append(user)
    return False
