"""Block tables laid out for a device ahead of the step that reads them.

A text that goes on has the table that it had, and maybe a few blocks behind. So while the device
computes a step, the tables are written for the next one, with room behind each; when that comes,
only new blocks are. That holds whatever is accepted of the drafts. A table that is not known is
written behind the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SPARE_BLOCKS = 5
"""Room behind a table: the most drafts of a round, and a token."""

Array = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Known:
    table: list[int]
    place: int
    room: int


class TableLayout:
    """Which table lies where in an array; one array is for the next step, another for the last."""

    def __init__(
        self, array: Array, most_blocks: int, check: Callable[[Sequence[int]], None]
    ) -> None:
        """most_blocks: of a sequence, those behind are left out. check: raises for bad blocks."""
        self.num_placed = 0
        """Tables that steps asked for."""
        self.num_known = 0
        """Of these, the ones that were there."""
        self.end = 0
        """Behind the last table."""
        self._array = array
        self._most_blocks = most_blocks
        self._check = check
        self._known: list[_Known] = []
        self._placed: list[tuple[list[int], int]] = []
        self._next = 0

    @staticmethod
    def most_places(num_tables: int, most_blocks: int) -> int:
        """Length of an array for so many tables, none of which may be known."""
        return num_tables * (2 * most_blocks + SPARE_BLOCKS)

    def prepare(self, array: Array) -> None:
        """Write the tables of the step that was placed last for the next one, in another array."""
        self._known, self.end, self._next = [], 0, 0
        for table, place in self._placed:
            count = len(table)
            array[self.end : self.end + count] = self._array[place : place + count]
            self._known.append(_Known(table, self.end, count + SPARE_BLOCKS))
            self.end += count + SPARE_BLOCKS
        self._array = array
        self._placed.clear()

    def place(self, table: list[int]) -> int:
        """Where the table begins, once it is there. Raises what `check` raises."""
        mine = table[: self._most_blocks]  # a copy: whose it is may change it
        known = self._take(mine)
        place, have = (self.end, 0) if known is None else (known.place, len(known.table))
        new = mine[have:]
        if new:
            self._check(new)
            self._array[place + have : place + len(mine)] = new
        if known is None:
            self.end += len(mine)
        self.num_placed += 1
        self.num_known += known is not None
        self._placed.append((mine, place))
        return place

    def _take(self, table: list[int]) -> _Known | None:
        """The known table that this one goes on from; nobody else gets it, as both may write."""
        count = len(self._known)
        for step in range(count):
            at = (self._next + step) % count
            known = self._known[at]
            have = len(known.table)
            if (
                have <= len(table) <= known.room
                and known.table[-1] == table[have - 1]
                and known.table == table[:have]
            ):
                del self._known[at]
                self._next = at  # texts keep their order: the next one's follows
                return known
        return None
