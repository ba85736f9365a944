"""What building needs in memory; benchmarks/trajectories has the time by a session's length."""

import gc
import tracemalloc

import msgspec
import numpy as np

from calls import make_call as call
from tugline.traces.builders import PrefixMerging
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
