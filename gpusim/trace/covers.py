"""Which ops a variant may cover: those behind its own whose work it does, too, such as the ReLU of a convolution.

A covered op runs nothing; what it would have written is there when the op with the variant has ended. So all that the
covered ops need must be there before that op starts, and nobody may look at a value that is never written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpusim.trace.dependencies import handles
from gpusim.trace.schema import Op, Trace


class CoverRules:
    """What `problem` needs of a trace, found once; `preds` are its `dependencies`."""

    def __init__(self, trace: Trace, preds: Sequence[Sequence[int]]) -> None:
        self.trace = trace
        self.preds = preds
        self.before: list[int] = []
        """For each op, a bit for each op that it depends on, directly or not."""
        for op_preds in preds:
            found = 0
            for pred in op_preds:
                found |= self.before[pred] | 1 << pred
            self.before.append(found)
        self.users: dict[int, dict[int, None]] = {}
        """For each storage the ops that read, write, make or mention it, in recorded order."""
        for index, op in enumerate(trace.ops):
            for tensor in _mentioned(op):
                self.users.setdefault(trace.tensors[tensor].storage, {})[index] = None

    def problem(self, op: int, covers: Sequence[int]) -> str | None:
        """Why a variant of `op` cannot cover these ops, or None."""
        trace, chain = self.trace, (op, *covers)
        for place, covered in enumerate(covers, start=1):
            if not chain[place - 1] < covered < len(trace.ops):
                return f"op {covered} does not come behind op {chain[place - 1]}"
            name = trace.ops[covered].name
            if not trace.ops[covered].kernels or trace.ops[covered].random:
                return f"op '{name}' has no kernels, or draws random numbers"
            if not self.before[covered] >> op & 1:
                return f"op '{name}' does not depend on it"
            late = [pred for pred in self.preds[covered] if pred not in chain and not self.before[op] >> pred & 1]
            if late:
                return f"op '{name}' needs op '{trace.ops[late[0]].name}', which may end later"
        for place in range(len(chain) - 1):
            problem = self._hidden(chain, place)
            if problem is not None:
                return problem
        return None

    def _hidden(self, chain: Sequence[int], place: int) -> str | None:
        """Why what an op of the chain writes cannot be overwritten, or left out, before anybody sees it."""
        trace, op = self.trace, self.trace.ops[chain[place]]
        result = next(iter(op.outputs), None)
        for tensor in dict.fromkeys((*op.writes, *((result,) if result is not None else ()))):
            storage = trace.tensors[tensor].storage
            writers = [later for later in chain[place + 1 :] if self._writes(later, storage)]
            if not writers and tensor != result:
                continue  # written as it would be
            until = writers[-1] if writers else len(trace.ops)
            for user in self.users[storage]:
                if user not in chain and chain[0] < user < until:
                    return f"op '{trace.ops[user].name}' uses tensor {tensor} in between"
            given = {t for each in chain for t in trace.ops[each].outputs}
            for other, one in enumerate(trace.tensors):
                if one.storage != storage:
                    continue
                if one.init is not None or (not writers and one.role in ("output", "gradient")):
                    return f"tensor {other} is a state or a result of the step"
                if other not in given and any(
                    user > chain[0] and user not in chain and other in _mentioned(trace.ops[user])
                    for user in self.users[storage]
                ):
                    return f"tensor {other} shares memory with what it writes"
        return None

    def _writes(self, op: int, storage: int) -> bool:
        return any(self.trace.tensors[tensor].storage == storage for tensor in self.trace.ops[op].writes)


def covered_by(trace: Trace, variants: Sequence[int]) -> dict[int, int]:
    """For each op that a chosen variant covers, the op with that variant.

    `variants` has for each op the number of its variant, counted from 1, or 0. What a covered op chooses means nothing.
    """
    found: dict[int, int] = {}
    for op, number in enumerate(variants):
        if number and op not in found:
            found.update((covered, op) for covered in trace.ops[op].variants[number - 1].covers)
    return found


def _mentioned(op: Op) -> set[int]:
    """Tensors that an op reads, writes, returns or is given."""
    return {*op.reads, *op.writes, *handles(op), *(tensor for tensor in op.outputs if tensor is not None)}


def settled(trace: Trace, variants: Sequence[int]) -> tuple[int, ...]:
    """The same choice of variants, with none for ops that are covered."""
    covered = covered_by(trace, variants)
    return tuple(0 if op in covered else number for op, number in enumerate(variants))


def beside_theirs(
    order: Sequence[int], streams: Sequence[int], covered: Mapping[int, int]
) -> tuple[list[int], list[int]]:
    """A schedule with each covered op right behind the op that does its work, in its stream.

    That is no other schedule: covered ops run nothing. But whoever waits for one then waits for no more than that.
    """
    chains: dict[int, list[int]] = {}
    for op in sorted(covered):
        chains.setdefault(covered[op], []).append(op)
    together = [each for op in order if op not in covered for each in (op, *chains.get(op, ()))]
    return together, [streams[covered.get(op, op)] for op in range(len(streams))]
