"""JSON decoded by several threads at once, of classes that nobody has decoded before."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: Eight threads decode a class whose description takes long: it has a hundred parts of other classes. A crash would end
#: pytest, so it runs in a process of its own.
THREADS = """
import sys, threading
import msgspec
from gpusim.io.decoding import convert, decode_json

sys.setswitchinterval(1e-6)
for turn in range(30):
    parts = [(f"p{i}", msgspec.defstruct(f"Part{turn}_{i}", [(f"x{i}", int)])) for i in range(100)]
    kind = msgspec.defstruct(f"Whole{turn}", parts)
    value = {f"p{i}": {f"x{i}": i} for i in range(100)}
    data = msgspec.json.encode(value)
    barrier = threading.Barrier(8)
    read = []

    def work():
        barrier.wait()
        read.append(READ)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [msgspec.to_builtins(each) for each in read] == 8 * [value]
print("all read")
"""


@pytest.mark.parametrize("read", ["decode_json(data, kind)", "convert(value, kind)"])
def test_threads_that_decode_a_class_for_the_first_time_at_once_all_read_it(read: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", THREADS.replace("READ", read)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "all read"), done.stderr
