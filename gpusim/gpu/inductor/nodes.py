"""Nodes of Inductor's scheduler: their declared reads and writes, and the lines matched so far."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from gpusim.errors import CaptureError
from gpusim.gpu.inductor.places import Places


class Nodes:
    """Nodes of the graph that Inductor is compiling."""

    def __init__(self, places: Places) -> None:
        from torch._inductor.virtualized import V

        self._places = places
        self._graph = V.graph
        self._matched: dict[str, int] = {}
        """Matched nodes, by name, with the number of their line."""
        self._written: set[str] = set()
        """Names of buffers that a line has written so far."""

    def matched(self, node: Any) -> bool:
        """Whether a node has its line."""
        return node.get_name() in self._matched

    def match(self, nodes: Iterable[Any], writes: Iterable[str] = ()) -> None:
        """Record that these nodes have their line, and the buffers it writes."""
        number = len(self._matched)
        self._matched.update((name, number) for node in nodes if not self.matched(node) and (name := node.get_name()))
        self._written.update(writes)

    def of_kernel(self, line: Any, node: Any) -> list[Any]:
        """Return the nodes that a kernel was made for: the current one, or on the CPU all that wait for their
        kernel.
        """
        if node is None:
            raise refused(f"kernel {line.kernel_name} outside of any node", node)
        if line.device.type != "cpu":
            return [node]
        waiting = []
        for each in self._graph.scheduler.nodes:
            if not self.matched(each) and not each.is_extern() and not _is_nop(each):
                waiting.append(each)
            if each is node:
                break
        return waiting

    def check_agree(self, kernel: str, reads: Sequence[str], writes: Sequence[str], nodes: Sequence[Any]) -> None:
        """Raise `CaptureError` where a kernel's arguments contradict its nodes."""
        known_writes = {name for node in nodes for name in self.names_written(node)}
        known_reads = {name for node in nodes for name in self._names_read(node)} | known_writes
        node = nodes[-1] if nodes else None
        wrong = sorted(set(writes) - known_writes - self._places.workspaces)
        if wrong:
            raise refused(f"kernel {kernel}, which writes {', '.join(wrong)} and whose node does not,", node)
        wrong = sorted(set(reads) - known_reads - self._places.workspaces)
        if wrong:
            raise refused(f"kernel {kernel}, which reads {', '.join(wrong)} and whose node does not,", node)

    def check_complete(self) -> None:
        """Raise `CaptureError` where a node has no line, or its lines omit something that it writes."""
        removed = set(self._graph.removed_buffers) | set(self._graph.inplaced_to_remove)
        for node in self._graph.scheduler.nodes:
            if _is_nop(node):
                continue
            needed = {b.get_name() for b in node.get_outputs()} - removed
            if node.is_extern():
                missing = set() if self.matched(node) else needed
            else:
                missing = {name for name in needed if self._places.real_name(name) not in self._written}
            if missing:
                raise refused(f"no line that writes {', '.join(sorted(missing))}", node)

    def check_order(self) -> None:
        """Raise `CaptureError` where uses and changes of memory have another order in the lines than in the graph.

        After fusing nodes, Inductor does not always keep track of such changes.
        """
        place = {operation.get_operation_name(): number for number, operation in enumerate(self._graph.operations)}
        uses: dict[str, list[tuple[int, int, bool, Any]]] = {}
        for node in self._graph.scheduler.nodes:
            if not self.matched(node):
                continue
            for part in node.get_nodes():
                changed = {self._places.real_name(n) for b in part.get_outputs() for n in b.get_mutations()}
                for name in self._names_read(part) | changed:
                    use = (self._matched[node.get_name()], place[part.get_name()], name in changed, node)
                    uses.setdefault(name, []).append(use)
        for name, mine in uses.items():
            for line, number, _, _ in (use for use in mine if use[2]):
                for other_line, other_number, _, node in mine:
                    if other_line != line and (other_line < line) != (other_number < number):
                        raise refused(f"a use of {name} on the wrong side of its change", node)

    def names_written(self, node: Any) -> set[str]:
        """Return the names of the buffers that a node writes, new or changed."""
        names = {buffer.get_name() for buffer in node.get_outputs()}
        names |= {name for buffer in node.get_outputs() for name in buffer.get_mutations()}
        return {self._places.real_name(name) for name in names}

    def _names_read(self, node: Any) -> set[str]:
        return {self._places.real_name(dep.name) for dep in node.read_writes.reads if type(dep).__name__ != "WeakDep"}


def refused(code: str, node: Any) -> CaptureError:
    """Return the error for code of Inductor's that gpusim does not understand."""
    where = f" at node {node.get_name()}" if node is not None else ""
    return CaptureError(
        f"Inductor of torch {torch.__version__} writes {code}{where}: gpusim does not know what that reads and "
        "writes; use the front end 'aten'"
    )


def _is_nop(node: Any) -> bool:
    return type(node).__name__ == "NopKernelSchedulerNode"
