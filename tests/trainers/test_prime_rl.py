"""The recipe in `examples/prime_rl`: files as prime-rl's trainer decodes them."""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from graded import finish
from house import House
from served import TOKENS
from trainers.sessions import sample as make_sample
from tugline.types import Sample

RECIPE = Path(__file__).parents[2] / "examples" / "prime_rl"


class MicroBatch(msgspec.Struct, array_like=True, gc=False, omit_defaults=True):
    """prime-rl's struct: order, types and defaults of its fields."""

    input_ids: list[int]
    loss_mask: list[bool]
    advantages: list[float]
    inference_logprobs: list[float]
    position_ids: list[int]
    sequence_lengths: list[int]
    temperatures: list[float]
    env_names: list[str]
    seq_lens: list[int]
    ref_logprobs: list[float] | None = None
    routed_experts: tuple[bytes, list[int], str] | None = None
    mm_kwargs: dict[str, Any] | None = None
    mm_token_type_ids: list[int] | None = None
    rl_weights: list[float] | None = None
    ce_weights: list[float] | None = None
    ref_kl_weights: list[float] | None = None


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The recipe's module."""
    monkeypatch.syspath_prepend(RECIPE)
    return importlib.import_module("tugline_prime_rl")


def sample(length: int, session: str = "s") -> Sample:
    """A trace of this many tokens; from the third on they are sampled, at temperature 0.5."""
    sampled = np.arange(length) >= 2
    return make_sample(
        range(length),
        sampled,
        logprobs=np.where(sampled, np.float32(-0.25), np.float32(0)),
        advantages=np.where(sampled, np.float32(2), np.float32(0)),
        temperatures=np.where(sampled, np.float32(0.5), np.float32(1)),
        session=session,
    )


def read(folder: Path, rank: int) -> list[MicroBatch]:
    """What the trainer's receiver gets."""
    data = (folder / f"rank_{rank}.bin").read_bytes()
    batches = msgspec.msgpack.decode(data, type=list[MicroBatch])
    assert msgspec.msgpack.encode(batches) == data  # byte for byte what its sender writes
    return batches


async def run(house: House, out: Path, *arguments: str) -> None:
    """The script, to the newest group."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        RECIPE / "tugline_prime_rl.py",
        out,
        "--no-follow",
        *arguments,
        env=os.environ | {"TUGLINE_SERVER": house.url, "TUGLINE_TOKEN": TOKENS.client},
    )
    assert await process.wait() == 0


async def test_steps_have_what_the_trainer_reads(house: House, tmp_path: Path) -> None:
    """Two groups are a step; one without signal is not in it, and one is too little for a third.

    The next run goes on with the next step. Groups that were written and not acknowledged come
    again to it, and are not written again.
    """
    await finish(house, a=[1.0, 0.0], b=[1.0, 1.0], c=[0.0, None, 1.0], d=[1.0, 0.0])
    await run(house, tmp_path, "--groups", "2", "--ranks", "2", "--seq-len", "12")
    first = tmp_path / "rollouts" / "step_1"
    assert {one.name for one in first.iterdir()} == {"groups.json", "rank_0.bin", "rank_1.bin"}
    assert msgspec.json.decode((first / "groups.json").read_bytes()) == ["a", "c"]
    batches = [read(first, rank)[0] for rank in (0, 1)]
    assert [one.seq_lens for one in batches] == [[6, 6], [6, 6]]
    assert batches[0].input_ids == [10, 11, 12, 13, 14, 15] * 2
    assert batches[0].position_ids == [0, 1, 2, 3, 4, 5] * 2
    assert batches[0].loss_mask == [False, False, True, True, False, False] * 2
    assert batches[0].inference_logprobs == [0, 0, -0.5, -0.5, 0, -0.5] * 2
    signs = [np.sign(one.advantages).tolist() for one in batches]
    assert signs[0] == [0, 0, 1, 1, 0, 0, 0, 0, -1, -1, 0, 0]
    assert not (tmp_path / "rollouts" / "step_2").exists()
    await finish(house, e=[1.0, 0.0])
    arguments = ("--groups", "2", "--ranks", "2", "--seq-len", "12", "--consumer", "another")
    await run(house, tmp_path, *arguments)
    second = tmp_path / "rollouts" / "step_2" / "groups.json"
    assert msgspec.json.decode(second.read_bytes()) == ["d", "e"]


def test_a_temperature_stands_where_the_logits_are(recipe: Any) -> None:
    """prime-rl divides the logits at a place by its temperature: those of the token after it.

    A temperature of 0, where nothing is trained, would make them infinite.
    """
    one = msgspec.structs.replace(sample(5), temperatures=np.float32([1, 1, 0.5, 0, 0.5]))
    assert recipe.make_micro_batch([one]).temperatures == [1, 0.5, 1, 0.5, 1]


def test_every_rank_gets_as_many_micro_batches(recipe: Any) -> None:
    """Each trace is in one of them, none is above the length; what fills up trains nothing."""
    lengths = [9, 8, 5, 5, 4, 3, 2]
    ranks = recipe.pack([sample(length) for length in lengths], 10, 3)
    assert [len(batches) for batches in ranks] == [2, 2, 2]
    batches = [one for batches in ranks for one in batches]
    assert all(len(one.input_ids) <= 10 for one in batches)
    trained = [one for one in batches if any(one.loss_mask)]
    assert sorted(n for one in trained for n in one.seq_lens) == sorted(lengths)
    assert len(trained) == 4


def test_a_trace_that_is_too_long_is_left_out(recipe: Any, tmp_path: Path) -> None:
    """It is counted, and nothing is cut; a second writer goes on after the step."""

    class Group:
        """As much of a graded group as is written."""

        id = "g"
        samples = (sample(5), sample(20))

    assert recipe.StepWriter(tmp_path, 10, 1).write([Group()]) == 1
    (batch,) = read(tmp_path / "rollouts" / "step_1", 0)
    assert batch.seq_lens == [5]
    again = recipe.StepWriter(tmp_path, 10, 1)
    assert (again.step, again.known) == (2, {"g"})
