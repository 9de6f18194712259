"""Parts of parameters that layers use: a fused weight may serve two layers, and one weight may serve several."""

from __future__ import annotations

from collections.abc import Sequence, Set

from gpusim.formats.trace import Trace

#: Storage, first element, and the element after the last one.
Region = tuple[int, int, int]


def region_of(trace: Trace, tensor: int) -> Region:
    """Return the elements that a parameter, or a view of one, covers."""
    each = trace.tensors[tensor]
    reach = sum((size - 1) * stride for size, stride in zip(each.shape, each.stride, strict=True))
    return each.storage, each.offset, each.offset + reach + 1


def weight_elements(regions: Sequence[Set[Region]]) -> list[int]:
    """Return the elements of each layer's weights; those shared by layers count for the first."""
    seen: set[Region] = set()
    elements = []
    for own in regions:
        new = {region for region in own if not _overlaps(region, seen)}
        inner = {each for each in new if any(_lies_in(each, other) for other in new - {each})}
        seen |= new
        elements.append(sum(last - first for _, first, last in new - inner))
    return elements


def shared_with(regions: Sequence[Set[Region]]) -> list[int | None]:
    """Return for each layer an earlier one that uses some of its weights, if any."""
    seen: dict[int, list[tuple[Region, int]]] = {}
    found: list[int | None] = []
    for number, own in enumerate(regions):
        earlier = [user for each in own for region, user in seen.get(each[0], ()) if _overlaps(each, {region})]
        found.append(min(earlier, default=None))
        for each in own:
            seen.setdefault(each[0], []).append((each, number))
    return found


def _overlaps(region: Region, others: Set[Region]) -> bool:
    storage, first, last = region
    return any(s == storage and first < b and a < last for s, a, b in others)


def _lies_in(region: Region, other: Region) -> bool:
    return region[0] == other[0] and other[1] <= region[1] and region[2] <= other[2]
