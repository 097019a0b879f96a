"""Block tables that are laid out ahead: each lies where it is said to, whatever came before."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from outrider.engine.table_layout import SPARE_BLOCKS, TableLayout

MOST_BLOCKS, MOST_TABLES = 12, 6
NUM_BLOCKS = 100


def check(blocks: Sequence[int]) -> None:
    """As the runner does."""
    if not 0 <= min(blocks) <= max(blocks) < NUM_BLOCKS:
        raise ValueError("a block outside the cache")


class Laid:
    """A layout with its two arrays, used as by captured steps."""

    def __init__(self) -> None:
        size = TableLayout.most_places(MOST_TABLES, MOST_BLOCKS)
        self.arrays = [np.full(size, -1, np.int32) for _ in range(2)]
        self.layout = TableLayout(self.arrays[0], MOST_BLOCKS, check)

    def step(self, tables: list[list[int]]) -> None:
        """Place all, look at them all, lay out the next step's."""
        places = [self.layout.place(table) for table in tables]
        for place, table in zip(places, tables, strict=True):
            wanted = table[:MOST_BLOCKS]
            assert self.arrays[0][place : place + len(wanted)].tolist() == wanted
        self.arrays.reverse()
        self.layout.prepare(self.arrays[0])


@pytest.mark.parametrize("seed", range(20))
def test_every_table_lies_where_it_is_said_to(seed: int) -> None:
    """Texts begin, grow, end, come back with other blocks, swap places and share beginnings."""
    rng, laid = random.Random(seed), Laid()
    tables: list[list[int]] = []
    for _ in range(60):
        for table in tables:
            room = MOST_BLOCKS + 2 - len(table)
            grown = min(room, rng.choice([0, 0, 0, 1, 1, SPARE_BLOCKS, SPARE_BLOCKS + 1]))
            table += rng.choices(range(NUM_BLOCKS), k=grown)  # the same list, as a caller's may be
        for i in range(len(tables)):
            if rng.random() < 0.1:
                tables[i] = rng.choices(range(NUM_BLOCKS), k=rng.randint(1, 5))
        if tables and rng.random() < 0.2:
            del tables[rng.randrange(len(tables))]
        if len(tables) < MOST_TABLES and rng.random() < 0.4:
            fork = list(rng.choice(tables)) if tables and rng.random() < 0.5 else []
            tables.insert(rng.randint(0, len(tables)), fork + [rng.randrange(NUM_BLOCKS)])
        if rng.random() < 0.1:
            rng.shuffle(tables)
        laid.step(tables)


def test_two_texts_behind_one_beginning_do_not_share_a_place() -> None:
    """Both go on from the same table: only one of them can be where that lies."""
    laid = Laid()
    laid.step([[3, 8]])
    laid.step([[3, 8, 5], [3, 8, 6]])
    assert (laid.layout.num_placed, laid.layout.num_known) == (3, 1)


def test_texts_that_go_on_are_known_while_others_come_and_go() -> None:
    """Ends, beginnings and new blocks cost nobody else anything."""
    laid = Laid()
    tables = [[10 * i, 10 * i + 1] for i in range(5)]
    laid.step(tables)
    tables = [table + [table[-1] + 1] for table in tables]
    laid.step(tables)
    assert (laid.layout.num_placed, laid.layout.num_known) == (10, 5)
    laid.step([tables[4], tables[0], [77], tables[3]])
    assert (laid.layout.num_placed, laid.layout.num_known) == (14, 8)


def test_blocks_that_do_not_exist_are_refused_known_table_or_not() -> None:
    """Only new blocks are looked at, and all of those."""
    laid = Laid()
    for bad in (-1, NUM_BLOCKS):
        with pytest.raises(ValueError, match="outside the cache"):
            laid.layout.place([1, bad])
        laid.step([[1, 2]])
        with pytest.raises(ValueError, match="outside the cache"):
            laid.layout.place([1, 2, bad])
        laid.layout.prepare(laid.arrays[1])
        laid.arrays.reverse()
        laid.step([[1, 2]])


@pytest.mark.parametrize("num_drafts", [0, 4])
def test_tables_are_laid_out_in_time_whatever_becomes_of_drafts(num_drafts: int) -> None:
    """Of texts that begin and end all the time, only those are unknown that have just begun."""
    rng, most_blocks = random.Random(0), 64
    arrays = [np.zeros(TableLayout.most_places(32, most_blocks), np.int32) for _ in range(2)]
    layout = TableLayout(arrays[0], most_blocks, lambda blocks: None)
    texts: list[list[int]] = []  # tokens so far, and those at the end
    tables: list[list[int]] = []
    num_begun = 0
    for _ in range(400):
        while len(texts) < 32:
            texts.append([rng.randint(1, 500), rng.randint(501, 1000)])
            tables.append([])
            num_begun += 1
        for (length, _), table in zip(texts, tables, strict=True):
            while len(table) * 16 < length + num_drafts + 1:
                table.append(rng.randrange(10**6))
            layout.place(table)
        arrays.reverse()
        layout.prepare(arrays[0])
        for text in texts:
            text[0] += rng.randint(1, num_drafts + 1)
        going_on = [i for i, (length, end) in enumerate(texts) if length < end]
        texts, tables = [texts[i] for i in going_on], [tables[i] for i in going_on]
    assert num_begun > 32
    assert layout.num_placed - layout.num_known == num_begun
    assert layout.num_known / layout.num_placed > 0.98
