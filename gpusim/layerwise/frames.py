"""The meaning of a traced tensor's dimensions (samples, channels, height, width) through views and transposes.

A dimension is a row of atoms, each a letter with a size. `[[n4, h192], [c768]]` is a matrix of 4 samples x 192
positions by 768 features; viewed as (4, 192, 12, 64) it is `[[n4], [h192], [c12], [c64]]`, twelve heads of 64 features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

from gpusim.layerwise.layers import DIMS, Extents

#: A letter and a size. Letters beyond those of `DIMS` do not occur.
Atom = tuple[str, int]
Row = tuple[Atom, ...]


@dataclass(frozen=True, slots=True)
class Frame:
    """The atoms of each dimension of a tensor."""

    rows: tuple[Row, ...]

    @property
    def extents(self) -> Extents:
        """Sizes by letter, in the order of `DIMS`."""
        n, c, h, w = (prod(size for row in self.rows for letter, size in row if letter == dim) for dim in DIMS)
        return n, c, h, w

    def letters(self, dimension: int) -> str:
        """Letters of one dimension."""
        return "".join(dict.fromkeys(letter for letter, _ in self.rows[dimension]))

    def is_rows_of(self, *letters: str) -> bool:
        """Whether each dimension consists of the given letters, or of nothing (a size of 1)."""
        return len(self.rows) == len(letters) and all(
            {letter for letter, _ in row} <= set(wanted) for row, wanted in zip(self.rows, letters, strict=True)
        )


def image(shape: Sequence[int]) -> Frame:
    """Return samples, channels, height, width."""
    return Frame(tuple(((letter, size),) for letter, size in zip("nchw", shape, strict=True)))


#: Meaning of dimensions by their number: features, sequences of features, images, volumes.
_RESULTS: Final = {1: "n", 2: "nc", 3: "nhc", 4: "nchw", 5: "ncwhw"}
#: The letter of atoms other than samples that are merged into the first dimension.
_MORE: Final = {1: "h", 2: "h", 3: "w", 4: "w", 5: "w"}


def of_input(shape: Sequence[int], batch: int, integers: bool, channels_first: bool = False) -> Frame | None:
    """Return the frame of an input of the step; None if its first dimension is not the batch.

    With `channels_first`, a sequence has its channels before its positions.
    """
    if not shape or shape[0] != batch:
        return None
    if channels_first and len(shape) == 3:
        return Frame(tuple(((letter, size),) for letter, size in zip("nch", shape, strict=True)))
    if integers and len(shape) == 2:
        return Frame(((("n", batch),), (("h", shape[1]),)))
    return by_rank(shape, batch)


def by_rank(shape: Sequence[int], batch: int) -> Frame | None:
    """Guess the frame of a result of unknown dimensions: samples first, the others named like an input's.

    The names do not matter for splits by samples. None if the batch does not divide the first dimension.
    """
    if not shape or shape[0] % batch or len(shape) > len(_RESULTS):
        return None
    letters, more = _RESULTS[len(shape)], shape[0] // batch
    first: Row = (("n", batch), (_MORE[len(shape)], more)) if more > 1 else (("n", batch),)
    return Frame((first, *(((x, size),) for x, size in zip(letters[1:], shape[1:], strict=True))))


def viewed(frame: Frame, shape: Sequence[int]) -> Frame | None:
    """Return the frame of a view of another shape; None if a dimension cuts through an atom."""
    atoms = [atom for row in frame.rows for atom in row if atom[1] > 1]
    single = ("n", 1) in [atom for row in frame.rows for atom in row]
    rows: list[Row] = []
    for size in shape:
        row: list[Atom] = []
        while prod(each for _, each in row) < size:
            if not atoms:
                return None
            letter, have = atoms.pop(0)
            missing = size // prod(each for _, each in row)
            if have <= missing:
                if missing % have:
                    return None
                row.append((letter, have))
            elif have % missing:
                return None
            else:
                row.append((letter, missing))
                atoms.insert(0, (letter, have // missing))
        if prod(each for _, each in row) != size:
            return None
        rows.append(tuple(row))
    if single and rows:  # a batch of one is still the batch
        rows[0] = (("n", 1), *rows[0])
    return None if atoms else Frame(tuple(rows))


def permuted(frame: Frame, order: Sequence[int]) -> Frame:
    """Return the frame with its dimensions in another order."""
    return Frame(tuple(frame.rows[dimension] for dimension in order))


def with_row(frame: Frame, dimension: int, row: Row) -> Frame:
    """Return the frame with one dimension replaced."""
    rows = list(frame.rows)
    rows[dimension] = row
    return Frame(tuple(rows))
