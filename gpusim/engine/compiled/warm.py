"""Compilation at a first start, on two cores.

numba compiles one function at a time per process. With an empty cache, one helper process therefore compiles the event
loop, which takes as long as all other entries together, and another compiles the others; this process then reads the
cache. Helpers use fewer LLVM passes (`NUMBA_OPT=1`), a setting of a whole process that must not affect other numba code
here: a quarter less time to compile, code as fast within the noise of 8 %. Helpers do not collect garbage either, which
would take a tenth of the time: they end with 40 MB more memory.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import msgspec
import numpy as np

from gpusim.engine.compiled.arrays import TASK, Plans, Room, encode_hardware, hardware_dtype
from gpusim.engine.compiled.events import EventsRoom, count_events
from gpusim.engine.compiled.heap import ENTRY
from gpusim.engine.compiled.jit import is_kept
from gpusim.engine.compiled.link import link_plans
from gpusim.engine.compiled.lists import ListRoom, schedule_lists
from gpusim.engine.compiled.memory import find_peaks
from gpusim.engine.compiled.op_graph import OP, VARIANT, LoweringRoom, OpArrays, lower_schedules
from gpusim.engine.compiled.orders import orders_by_keys
from gpusim.engine.compiled.simulate import simulate, simulate_plans
from gpusim.engine.threads import cores
from gpusim.formats.hardware import HardwareModel, load_hardware

#: Message of a command while it compiles.
COMPILING = "compiling once, about 10 s"
#: Entries other than the event loop.
OTHERS = (lower_schedules, link_plans, find_peaks, schedule_lists, orders_by_keys, count_events)
#: Program of a helper; it has the `sys.path` of this process, however that was started.
_PROGRAM = (
    "import gc, sys; gc.disable(); sys.path[:] = sys.argv[2:]; "
    "from gpusim.engine.compiled import warm; warm.help_with(sys.argv[1])"
)
#: Parts that a helper may compile.
BY_BLOCK, ONE_POOL, ALL_OTHERS = "by-block", "one-pool", "others"


def needs_compiling() -> bool:
    """Return True if the event loop is not cached on this machine; without a cache, it is compiled at every start."""
    return not is_kept(simulate)


def warm_up(hardware: HardwareModel) -> float:
    """Compile all that a search on this GPU needs, or read it from the cache; return the time in s."""
    begin = time.monotonic()
    with compiling_ahead(hardware) as wait:
        wait()
    compile_simulate(hardware)  # from the cache, unless a helper failed
    compile_others()
    return time.monotonic() - begin


@contextlib.contextmanager
def compiling_ahead(hardware: HardwareModel) -> Iterator[Callable[[], None]]:
    """Run the helpers, at a first start, during the block; yields a function that waits for them.

    Call it before the block simulates anything. Helpers that still run at the end of the block are ended.
    """
    by_block = hardware.contention.sharing_exponent > 0.0
    first_start = is_kept(simulate) is False and not all(is_kept(entry) for entry in OTHERS)
    wanted = (BY_BLOCK if by_block else ONE_POOL, ALL_OTHERS) if first_start and cores() > 1 else ()
    helpers: list[subprocess.Popen[bytes]] = []

    def wait() -> None:
        for helper in helpers:
            helper.wait()

    try:
        with contextlib.suppress(OSError):
            for part in wanted:
                helpers.append(_helper(part))
        yield wait
    finally:
        for helper in helpers:
            if helper.poll() is None:
                helper.terminate()
                helper.wait()


def _helper(part: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        helper_command(part),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "NUMBA_OPT": "1"},
    )


def helper_command(part: str) -> list[str]:
    """Return the command line of a helper."""
    return [sys.executable, "-c", _PROGRAM, part, *sys.path]


def help_with(part: str) -> None:
    """Compile one part and cache it on disk."""
    if part == ALL_OTHERS:
        compile_others()
        return
    model = load_hardware("h200")  # any model will do; only the rule for SMs matters
    exponent = 0.5 if part == BY_BLOCK else 0.0
    contention = msgspec.structs.replace(model.contention, sharing_exponent=exponent)
    compile_simulate(msgspec.structs.replace(model, contention=contention))


def compile_simulate(hardware: HardwareModel) -> None:
    """Compile the event loop for one GPU in graph mode with this GPU's rule for SMs, by simulating no plan."""
    plans = Plans.of_size(0, 0, 0, stream_mode=False)
    room = Room.for_plans(plans, 1, 1, hardware)
    simulate_plans(encode_hardware(hardware), np.zeros(0, TASK), plans, None, room, 0, 0)


def compile_others() -> None:
    """Compile `OTHERS` in the same way."""
    hardware, graph, plans = np.zeros(1, hardware_dtype()), _no_ops(), Plans.of_size(0, 0, 0, stream_mode=False)
    table, ints, numbers = np.zeros((0, 0), np.int32), np.zeros(0, np.int32), np.zeros(0)
    integers = np.zeros(0, np.int64)
    lower_schedules(hardware, graph, table, table.copy(), None, plans, LoweringRoom.of_size(0, 0), 0, 0)
    link_plans(hardware, graph.tasks, plans, 0, 0)
    find_peaks(graph, plans, ints, integers)
    room = ListRoom.of_size(0, 0)
    keys = np.zeros((0, 0))
    schedule_lists(hardware, graph, keys, integers, numbers, room, numbers.copy(), table, table.copy(), 0, 0, 0)
    orders_by_keys(hardware, graph, keys, np.zeros(0, ENTRY), ints, table, 0, 0)
    count_events(graph, ints, table, table.copy(), None, 0, EventsRoom.of_size(0, 0, 0), integers, 0, 0)


def _no_ops() -> OpArrays:
    """Return an empty op graph, with arrays of the usual types."""
    return OpArrays(
        tasks=np.zeros(0, TASK),
        ops=np.zeros(0, OP),
        preds=np.zeros(0, np.int32),
        succs=np.zeros(0, np.int32),
        first_buffer=np.zeros(0, np.int32),
        buffer_of=np.zeros(0, np.int32),
        buffer_bytes=np.zeros(0, np.int64),
        kept_bytes=0,
        variants=np.zeros(0, VARIANT),
        covers=np.zeros(0, np.int32),
        partition_of=np.zeros(0, np.int32),
        rows_of_partition=0,
        most_tasks=0,
    )
