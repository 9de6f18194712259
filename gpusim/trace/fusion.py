"""Operator fusion by variants: the ops that a variant may cover, for example the ReLU after a convolution.

A covered op launches nothing; its results exist when the op with the variant has ended. The inputs of covered later ops
must exist before that op starts, and no other op may use a value that is never written. Of covered earlier ops, no
other op may use the results. A merge covers later, independent ops (`gpusim.trace.merging`), whose results all exist.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from gpusim.formats.trace import Op, Trace
from gpusim.trace.dependencies import handles

#: Limits on ops of a step with such variants, and on ops that a variant covers; captured steps have up to 2,206 and 6.
MAX_OPS: Final = 20_000
MAX_COVERS: Final = 1000
#: Limit on the ops and tensors visited to check all variants of a step, which takes seconds.
MAX_LOOKED_AT: Final = 5_000_000
TOO_LONG: Final = "variants of this step share memory and dependencies with more ops than can be checked"


class CoverRules:
    """Checker of fusion in a trace of up to `MAX_OPS` ops; `preds` are its `dependencies`."""

    def __init__(self, trace: Trace, preds: Sequence[Sequence[int]]) -> None:
        self.trace = trace
        self.preds = preds
        self._looked_at = 0
        self.before: list[int] = []
        """Bit mask of the ancestors of each op."""
        for op_preds in preds:
            ancestors = 0
            for pred in op_preds:
                ancestors |= self.before[pred] | 1 << pred
            self.before.append(ancestors)
        self.succs: list[list[int]] = [[] for _ in preds]
        for index, op_preds in enumerate(preds):
            for pred in op_preds:
                self.succs[pred].append(index)
        self.tensors: dict[int, list[int]] = {}
        """Tensors of each storage."""
        for number, tensor in enumerate(trace.tensors):
            self.tensors.setdefault(tensor.storage, []).append(number)
        self.users: dict[int, dict[int, None]] = {}
        """Ops that read, write, return or mention each storage, in recorded order."""
        self.mentioned = [_mentioned(op) for op in trace.ops]
        for index, tensors in enumerate(self.mentioned):
            for mentioned in tensors:
                self.users.setdefault(trace.tensors[mentioned].storage, {})[index] = None

    def problem(self, op: int, covers: Sequence[int], *, merge: bool = False) -> str | None:
        """Return the reason why a variant of `op` cannot cover these ops, all later or all earlier, or None.

        `merge` is for a variant that covers later ops that do not depend on it.
        """
        if len(covers) > MAX_COVERS:
            return f"it covers {len(covers)} ops; the limit is {MAX_COVERS}"
        chain = sorted((op, *covers))
        if not covers or list(covers) != sorted(set(covers)) or chain[-1] >= len(self.trace.ops):
            return "they are not in order, or no ops of this step"
        if op not in (chain[0], chain[-1]):
            return "some come before it and some behind it"
        for covered in covers:
            if not self.trace.ops[covered].kernels or self.trace.ops[covered].random:
                return f"op '{self.trace.ops[covered].name}' has no kernels, or draws random numbers"
        if merge:
            return self._independent(op, covers)
        if op == chain[-1]:
            return self._before(op, covers)
        return self._behind(chain, covers)

    def _behind(self, chain: Sequence[int], covers: Sequence[int]) -> str | None:
        """Check covered later ops: their other inputs must exist before the first op starts."""
        first, together = chain[0], set(chain)
        for covered in covers:
            name = self.trace.ops[covered].name
            if not self.before[covered] >> first & 1:
                return f"op '{name}' does not depend on it"
            if self._takes_too_long(1 + len(self.preds[covered])):
                return TOO_LONG
            late = [p for p in self.preds[covered] if p not in together and not self.before[first] >> p & 1]
            if late:
                return f"op '{name}' needs op '{self.trace.ops[late[0]].name}', which may end later"
        for place in range(len(chain) - 1):
            problem = self._hidden(chain, place)
            if problem is not None:
                return problem
        return None

    def _independent(self, op: int, covers: Sequence[int]) -> str | None:
        """Check covered independent ops: their inputs exist before this op, and their results' memory is not in use."""
        if covers[0] < op:
            return "a merge covers later ops"
        for covered in covers:
            name = self.trace.ops[covered].name
            results = {t for t in (*self.trace.ops[covered].outputs, *self.trace.ops[covered].writes) if t is not None}
            users = {user for tensor in results for user in self.users[self.trace.tensors[tensor].storage]}
            if self._takes_too_long(1 + len(self.preds[covered]) + len(users)):
                return TOO_LONG
            late = [p for p in self.preds[covered] if not self.before[op] >> p & 1]
            if late:
                return f"op '{name}' needs op '{self.trace.ops[late[0]].name}', which may end later"
            early = [user for user in sorted(users) if user < covered]
            if early or any(self.trace.tensors[tensor].init is not None for tensor in results):
                return f"op '{name}' writes memory that is in use before"
        return None

    def _before(self, op: int, covers: Sequence[int]) -> str | None:
        """Check covered earlier ops: no other op may depend on them, as their results exist only after the last op."""
        together = {op, *covers}
        for covered in covers:
            name = self.trace.ops[covered].name
            if not self.before[op] >> covered & 1:
                return f"it does not depend on op '{name}'"
            if self._takes_too_long(1 + len(self.succs[covered])):
                return TOO_LONG
            others = [user for user in self.succs[covered] if user not in together]
            if others:
                return f"op '{self.trace.ops[others[0]].name}' depends on op '{name}', too"
            result = next(iter(self.trace.ops[covered].outputs), None)
            if result is not None and self.trace.tensors[result].role in ("output", "gradient"):
                return f"tensor {result} is a result of the step"
        return None

    def _hidden(self, chain: Sequence[int], place: int) -> str | None:
        """Return the reason why another op could see an overwritten or omitted write of the chain, or None."""
        trace, op, together = self.trace, self.trace.ops[chain[place]], set(chain)
        result = next(iter(op.outputs), None)
        for tensor in dict.fromkeys((*op.writes, *((result,) if result is not None else ()))):
            storage = trace.tensors[tensor].storage
            users = self.users[storage]
            touched = sum(1 + len(self.mentioned[visited]) for visited in (*chain, *users))
            if self._takes_too_long(touched + len(self.tensors[storage])):
                return TOO_LONG
            writers = [later for later in chain[place + 1 :] if self._writes(later, storage)]
            if not writers and tensor != result:
                continue  # written as without fusion
            until = writers[-1] if writers else len(trace.ops)
            for user in users:
                if user not in together and chain[0] < user < until:
                    return f"op '{trace.ops[user].name}' uses tensor {tensor} in between"
            given = {t for member in chain for t in trace.ops[member].outputs}
            later_users = [user for user in users if user > chain[0] and user not in together]
            seen_later = {t for user in later_users for t in self.mentioned[user]}
            for other in self.tensors[storage]:
                one = trace.tensors[other]
                if one.init is not None or (not writers and one.role in ("output", "gradient")):
                    return f"tensor {other} is a state or a result of the step"
                if other not in given and other in seen_later:
                    return f"tensor {other} shares memory with what it writes"
        return None

    def _takes_too_long(self, more: int) -> bool:
        """Count `more` visits and return True if a step exceeds the limit."""
        self._looked_at += more
        return self._looked_at > MAX_LOOKED_AT

    def _writes(self, op: int, storage: int) -> bool:
        return any(self.trace.tensors[tensor].storage == storage for tensor in self.trace.ops[op].writes)


def covered_by(trace: Trace, variants: Sequence[int]) -> dict[int, int]:
    """Return the op with the covering variant for each covered op.

    `variants` has the number of each op's variant, counted from 1, or 0. The variant of a covered op is ignored, and so
    is a variant that covers an op already covered or covering others: in recorded order, the first one counts.
    """
    coverer: dict[int, int] = {}
    doing: set[int] = set()
    for op, number in enumerate(variants):
        covers = trace.ops[op].variants[number - 1].covers if number and op not in coverer else ()
        if covers and not any(covered in coverer or covered in doing for covered in covers):
            coverer.update((covered, op) for covered in covers)
            doing.add(op)
    return coverer


def _mentioned(op: Op) -> set[int]:
    """Return the tensors that an op reads, writes, returns or has as arguments."""
    return {*op.reads, *op.writes, *handles(op), *(tensor for tensor in op.outputs if tensor is not None)}


def canonical_variants(trace: Trace, variants: Sequence[int]) -> tuple[int, ...]:
    """Return the choice of variants without ignored ones (`covered_by`)."""
    covered = covered_by(trace, variants)
    doing = set(covered.values())

    def counts(op: int, number: int) -> bool:
        return op not in covered and (op in doing or not trace.ops[op].variants[number - 1].covers)

    return tuple(number if number and counts(op, number) else 0 for op, number in enumerate(variants))


def place_fused(
    order: Sequence[int], streams: Sequence[int], covered: Mapping[int, int]
) -> tuple[list[int], list[int]]:
    """Return order and streams with each covered op next to the op that does its work, on the same stream.

    The schedule stays the same, since covered ops launch nothing, but an op that waits for a covered one then waits
    for no more than that work.
    """
    chains: dict[int, list[int]] = {}
    for op in sorted(covered):
        chains.setdefault(covered[op], []).append(op)
    together = [member for op in order if op not in covered for member in sorted((op, *chains.get(op, ())))]
    return together, [streams[covered.get(op, op)] for op in range(len(streams))]
