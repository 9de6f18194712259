"""Reader of pickles with plain values only: containers, text and numbers.

A pickle is a program. Python's own reader can be kept from importing but not from allocating memory: five bytes make it
allocate gigabytes. This reader has only the opcodes of plain values (protocols 2 to 5, `pickletools`) and counts their
memory.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final, NoReturn

from gpusim.io.file_limits import FREE_VALUES_BYTES, LIST_BYTES, NUMBER_BYTES, OBJECT_BYTES, TEXT_BYTES
from gpusim.text import shortened
from gpusim.units import format_bytes

#: Maximum size of a whole number; an address has 8 bytes.
MAX_NUMBER_BYTES: Final = 16
#: Minimum memory of an opcode: a slot on the stack or in a container.
STEP_BYTES: Final = 16


class PickleProblemError(ValueError):
    """A pickle that cannot be read; the text is for the user."""


def read_plain_pickle(data: bytes) -> Any:
    """Return the value of a pickle. Raises `PickleProblemError` for a broken one, or one with other values."""
    return _Machine(data).run()


class _Machine:
    """State of the reader: stack, memo and position of the next opcode."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        """Stack below each mark."""
        self.memo: dict[int, Any] = {}
        self.room = FREE_VALUES_BYTES

    def run(self) -> Any:
        data, end = self.data, len(self.data)
        while self.at < end:
            code = data[self.at]
            self.at += 1
            if code == _STOP:
                return self.top()
            step = _STEPS.get(code)
            if step is None:
                self.fail(f"has opcode 0x{code:02x} at byte {self.at - 1}, which plain values do not need")
            self.take(STEP_BYTES)
            step(self)
        return self.fail("ends too early")

    def fail(self, problem: str) -> NoReturn:
        raise PickleProblemError(problem)

    def take(self, size: int) -> None:
        """Count the memory of a value against the limit."""
        self.room -= size
        if self.room < 0:
            self.fail(f"has values of more than {format_bytes(FREE_VALUES_BYTES)}")

    def piece(self, count: int) -> bytes:
        """Read the next bytes."""
        piece = self.data[self.at : self.at + count]
        if len(piece) < count:
            self.fail("ends too early")
        self.at += count
        return piece

    def number(self, count: int) -> int:
        """Read the next bytes as a whole number."""
        return int.from_bytes(self.piece(count), "little")

    def top(self) -> Any:
        return self.stack[-1] if self.stack else self.fail("takes a value that is not there")

    def pop(self) -> Any:
        return self.stack.pop() if self.stack else self.fail("takes a value that is not there")

    def skip(self, count: int) -> None:
        """Skip bytes."""
        self.piece(count)

    def drop(self) -> None:
        """Drop the values pushed since the last mark."""
        self.since_mark()

    def since_mark(self) -> list[Any]:
        """Pop and return the values pushed since the last mark."""
        if not self.below:
            self.fail("takes values behind a mark that is not there")
        values, self.stack = self.stack, self.below.pop()
        return values


def _skip(count: int) -> Callable[[_Machine], None]:
    return lambda machine: machine.skip(count)


def _fixed(value: Any) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(value)


def _empty(kind: type[list[Any] | dict[str, Any]], size: int) -> Callable[[_Machine], None]:
    def step(machine: _Machine) -> None:
        machine.take(size)
        machine.stack.append(kind())

    return step


def _whole(count: int, signed: bool = False) -> Callable[[_Machine], None]:
    def step(machine: _Machine) -> None:
        machine.take(NUMBER_BYTES)
        machine.stack.append(int.from_bytes(machine.piece(count), "little", signed=signed))

    return step


def _long(count: int) -> Callable[[_Machine], None]:
    def step(machine: _Machine) -> None:
        size = machine.number(count)
        if size > MAX_NUMBER_BYTES:
            machine.fail(f"has a whole number of {size} bytes")
        machine.take(NUMBER_BYTES)
        machine.stack.append(int.from_bytes(machine.piece(size), "little", signed=True))

    return step


def _float(machine: _Machine) -> None:
    machine.take(NUMBER_BYTES)
    machine.stack.append(struct.unpack(">d", machine.piece(8))[0])


def _text(count: int) -> Callable[[_Machine], None]:
    def step(machine: _Machine) -> None:
        encoded = machine.piece(machine.number(count))
        machine.take(TEXT_BYTES + 4 * len(encoded))
        try:
            machine.stack.append(encoded.decode("utf-8", "surrogatepass"))
        except UnicodeDecodeError:
            machine.fail("has text that is not UTF-8")

    return step


def _tuple(count: int) -> Callable[[_Machine], None]:
    def step(machine: _Machine) -> None:
        machine.take(LIST_BYTES)
        values = [machine.pop() for _ in range(count)]
        machine.stack.append(tuple(reversed(values)))

    return step


def _tuple_since_mark(machine: _Machine) -> None:
    values = machine.since_mark()
    machine.take(LIST_BYTES)
    machine.stack.append(tuple(values))


def _mark(machine: _Machine) -> None:
    machine.take(LIST_BYTES)
    machine.below.append(machine.stack)
    machine.stack = []


def _append(machine: _Machine) -> None:
    _extend(machine, [machine.pop()])


def _extend(machine: _Machine, values: list[Any]) -> None:
    target = machine.top()
    if type(target) is not list:
        machine.fail("appends to what is no list")
    target.extend(values)


def _set(machine: _Machine, values: list[Any]) -> None:
    target = machine.top()
    if type(target) is not dict or len(values) % 2:
        machine.fail("sets keys of what is no dictionary")
    machine.take(OBJECT_BYTES * len(values) // 2)
    for key, value in zip(values[::2], values[1::2], strict=True):
        if type(key) not in (str, int):
            machine.fail("has a dictionary whose keys are no text")
        target[key] = value


def _set_one(machine: _Machine) -> None:
    value = machine.pop()
    _set(machine, [machine.pop(), value])


def _put(place: Callable[[_Machine], int]) -> Callable[[_Machine], None]:
    def step(machine: _Machine) -> None:
        machine.take(NUMBER_BYTES)
        machine.memo[place(machine)] = machine.top()

    return step


def _get(count: int) -> Callable[[_Machine], None]:
    def step(machine: _Machine) -> None:
        place = machine.number(count)
        if place not in machine.memo:
            machine.fail(f"refers to value {place}, which is not there")
        machine.stack.append(machine.memo[place])

    return step


def _class(machine: _Machine) -> None:
    name, module = machine.pop(), machine.pop()
    if type(name) is not str or type(module) is not str:  # the text of other values may be endless
        machine.fail("asks for a class without a name, which is no plain value")
    machine.fail(f"asks for '{shortened(f'{module[:200]}.{name[:200]}')}', which is no plain value")


def _old_class(machine: _Machine) -> None:
    lines = machine.data[machine.at : machine.at + 200].split(b"\n")
    name = b".".join(lines[:2]).decode("utf-8", "replace")
    machine.fail(f"asks for '{shortened(name)}', which is no plain value")


_STOP: Final = ord(".")
_STEPS: Final[dict[int, Callable[[_Machine], None]]] = {
    0x80: _skip(1),  # the protocol, which the opcodes make redundant
    0x95: _skip(8),  # the length of a frame
    ord("("): _mark,
    ord("0"): lambda machine: machine.pop(),
    ord("1"): lambda machine: machine.drop(),
    ord("N"): _fixed(None),
    0x88: _fixed(True),
    0x89: _fixed(False),
    ord("K"): _whole(1),
    ord("M"): _whole(2),
    ord("J"): _whole(4, signed=True),
    0x8A: _long(1),
    0x8B: _long(4),
    ord("G"): _float,
    0x8C: _text(1),
    ord("X"): _text(4),
    0x8D: _text(8),
    ord("]"): _empty(list, LIST_BYTES),
    ord("}"): _empty(dict, LIST_BYTES),
    ord(")"): _fixed(()),
    0x85: _tuple(1),
    0x86: _tuple(2),
    0x87: _tuple(3),
    ord("t"): _tuple_since_mark,
    ord("a"): _append,
    ord("e"): lambda machine: _extend(machine, machine.since_mark()),
    ord("s"): _set_one,
    ord("u"): lambda machine: _set(machine, machine.since_mark()),
    0x94: _put(lambda machine: len(machine.memo)),
    ord("q"): _put(lambda machine: machine.number(1)),
    ord("r"): _put(lambda machine: machine.number(4)),
    ord("h"): _get(1),
    ord("j"): _get(4),
    0x93: _class,
    ord("c"): _old_class,
}
