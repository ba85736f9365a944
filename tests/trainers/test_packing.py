"""Rows are divided into forward passes, and passes among ranks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from tugline.trainers.grpo.batch import EMPTY, Row, plain_sample
from tugline.trainers.grpo.config import GrpoConfig
from tugline.trainers.grpo.packing import Costs, divide

COSTS = Costs(token=10, pair=1, trained=5)


def make_rows(count: int) -> list[Row]:
    """Rows of 10 to 99 tokens, of which neighbours share a prefix."""
    rng = np.random.default_rng(count)
    prompt = rng.integers(0, 9, 8)
    rows = []
    for number in range(count):
        own = rng.integers(0, 9, int(rng.integers(2, 92)))
        ids = np.concatenate((prompt, own)).astype(np.int32)
        rows.append(Row(plain_sample(ids, np.arange(len(ids)) > 7, session=str(number))))
    return rows


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("world", [1, 3, 4])
@pytest.mark.parametrize("count", [0, 1, 23])
def test_each_row_is_in_one_pass_and_turns_cost_alike(count: int, world: int, tree: bool) -> None:  # noqa: FBT001
    """Ranks have as many passes as each other; no pass costs more than one of the turn before."""
    rows = make_rows(count)
    config = GrpoConfig(micro_tokens=120, tree_packing=tree)
    turns = divide(rows, config, COSTS, world)
    assert all(len(turn) == world for turn in turns)
    passes = [part for turn in turns for part in turn if part[0].sample is not EMPTY]
    assert sorted(row.sample.session for part in passes for row in part) == sorted(
        row.sample.session for row in rows
    )
    costs = [
        [COSTS.estimate(part, tree=tree) for part in turn if part[0].sample is not EMPTY]
        for turn in turns
    ]
    assert all(costs)
    for before, after in pairwise(costs):
        assert min(before) >= max(after)


def test_the_cost_of_a_tree_counts_a_shared_prefix_once() -> None:
    """Its tokens, its pairs of queries and keys, and every trained token of each row."""
    ids = [np.array(each, np.int32) for each in ([1, 2, 3, 4], [1, 2, 3, 5, 6])]
    rows = [Row(plain_sample(each, np.arange(len(each)) > 2)) for each in ids]
    alone = Costs(token=1).estimate(rows, tree=True)
    assert alone == 6
    assert Costs(token=0, pair=2).estimate(rows, tree=True) == 4**2 + 5**2 - 3**2
    assert Costs(token=0, trained=1).estimate(rows, tree=True) == 3
    assert Costs(token=1).estimate(rows, tree=False) == 10
