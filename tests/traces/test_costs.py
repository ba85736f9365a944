"""What building costs by a session's length; benchmarks/trajectories has the figures."""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest

from calls import make_call as call
from tugline.traces.builders import PerRequest, PrefixMerging, PrefixTree
from tugline.types import Call


def conversation(turns: int, base: int = 8000, new: int = 600) -> list[Call]:
    """Half of each turn is sampled; the prompts are views of one buffer, as `read` returns them."""
    ids = np.random.default_rng(0).integers(0, 150_000, base + new * turns, np.int32)
    ends = [base + new * number for number in range(turns)]
    half = new // 2
    parents = [None, *range(turns)]
    blank = call(0, [1], [2] * half)
    return [
        msgspec.structs.replace(
            blank,
            number=number,
            parent=parents[number],
            prompt_ids=ids[:end],
            sampled_ids=ids[end : end + half],
        )
        for number, end in enumerate(ends)
    ]


def cpu_ms(build: Callable[[Sequence[Call]], object], calls: Sequence[Call]) -> float:
    """CPU milliseconds of this thread, the least of several: others use the machine, too."""
    build(calls)
    gc.collect()
    spent = []
    for _ in range(9):
        began = time.thread_time()
        build(calls)
        spent.append(1e3 * (time.thread_time() - began))
    return min(spent)


@pytest.mark.parametrize("builder", [PrefixMerging, PrefixTree])
def test_time_grows_with_tokens(builder: type[PrefixMerging]) -> None:
    """A hundred turns take well under 50 ms, and four times as many not much more than that."""
    hundred, most = (cpu_ms(builder().build, conversation(turns)) for turns in (100, 400))
    assert hundred <= 25
    assert most <= 8 * hundred  # repeating every turn in each later one would make it 13 times


def test_prompts_in_one_buffer_are_not_compared_again() -> None:
    """A long prompt asked many times costs as little as a short one; copies have to be read."""
    calls = conversation(60, base=500_000)
    copies = [msgspec.structs.replace(one, prompt_ids=one.prompt_ids.copy()) for one in calls]
    build = PrefixMerging().build
    assert build(calls).ledger == build(copies).ledger
    assert 2 * cpu_ms(build, calls) < cpu_ms(build, copies)


def test_building_needs_little_memory() -> None:
    """At its height at most four times the bytes of the unique ids: what traces are made of."""
    calls = conversation(100)
    unique = len(calls[-1].prompt_ids) + len(calls[-1].sampled_ids)
    PrefixMerging().build(calls[:2])
    gc.collect()
    tracemalloc.start()
    kept = PrefixMerging().build(calls)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(kept.traces[0].ids) == unique
    assert peak <= 4 * 4 * unique


def test_a_group_of_forks_makes_a_tree_in_linear_time() -> None:
    """Every sample shares a prompt and goes its own way; twice as many take about twice as long."""

    def group(samples: int) -> list[Call]:
        first = conversation(1)[0]
        answers = (np.arange(300, dtype=np.int32) + 7 * number for number in range(samples))
        return [
            msgspec.structs.replace(first, number=number, sampled_ids=ids)
            for number, ids in enumerate(answers)
        ]

    few, many = (cpu_ms(PrefixTree().build, group(samples)) for samples in (32, 128))
    assert many <= 12 * few
    assert len(PrefixTree().tree(group(128)).ids) == 8000 + 128 * 300
    assert len(PerRequest().build(group(3)).traces) == 3
