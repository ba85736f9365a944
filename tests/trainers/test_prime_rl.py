"""The recipe in `examples/prime_rl` writes files that prime-rl's trainer can decode."""

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
from msgspec.structs import replace

from support.commands import run_program
from support.groups import finish
from support.server import TOKENS, RestartableServer
from trainers.sessions import sample as make_sample
from tugline.errors import UsageError
from tugline.types import Kept, Reason, Sample

RECIPE = Path(__file__).parents[2] / "examples" / "prime_rl"


class MicroBatch(msgspec.Struct, array_like=True, gc=False, omit_defaults=True):
    """prime-rl's struct, with its order, types and defaults of fields."""

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


class NewMicroBatch(MicroBatch, array_like=True, gc=False, omit_defaults=True):
    """The struct since pull request 3431; newer fields have defaults."""

    sampling_mask: tuple[bytes, bytes] | None = None


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The recipe's module."""
    monkeypatch.syspath_prepend(RECIPE)
    return importlib.import_module("tugline_prime_rl")


def sample(length: int, session: str = "s") -> Sample:
    """A sample of this length; its tokens from the third on are trained, at temperature 0.5."""
    sampled = np.arange(length) >= 2
    return make_sample(
        range(length),
        sampled,
        logprobs=np.where(sampled, np.float32(-0.25), np.float32(0)),
        advantages=np.where(sampled, np.float32(2), np.float32(0)),
        temperatures=np.where(sampled, np.float32(0.5), np.float32(1)),
        session=session,
    )


class Group:
    """The fields of a graded group that are written."""

    id = "g"

    def __init__(self, *samples: Sample) -> None:
        self.samples = samples


def routed(length: int, known: int, first: int = 0, **changes: Any) -> Sample:
    """A sample with experts of its leading tokens; the tokens after these are not trained."""
    numbers = first + np.arange(known * 6) % 50
    plain = sample(length)
    mask = plain.loss_mask & (np.arange(length) <= known)
    experts = numbers.reshape(known, 3, 2).astype(np.min_scalar_type(int(numbers.max())))
    return replace(plain, experts=experts, loss_mask=mask, **changes)


def read(folder: Path, rank: int, kind: type[MicroBatch] = MicroBatch) -> list[MicroBatch]:
    """Decode a rank's file as the trainer does."""
    data = (folder / f"rank_{rank}.bin").read_bytes()
    batches = msgspec.msgpack.decode(data, type=list[kind])  # type: ignore[valid-type]
    assert msgspec.msgpack.encode(batches) == data  # the same bytes as its sender writes
    return batches


async def run(live: RestartableServer, out: Path, *arguments: str) -> None:
    """Run the script until the newest group."""
    script = (sys.executable, RECIPE / "tugline_prime_rl.py", out, "--no-follow", *arguments)
    env = os.environ | {"TUGLINE_SERVER": live.url, "TUGLINE_TOKEN": TOKENS.client}
    done = await asyncio.to_thread(run_program, *script, env=env)
    assert done.returncode == 0, done.stderr


async def test_files_of_steps(live: RestartableServer, tmp_path: Path) -> None:
    """A step has two groups with signal; a single group is not written yet.

    The next run continues with the next step. Groups that were written but not acknowledged are
    read again, and not written again.

    It is one scenario, since the second step depends on the first.
    """
    await finish(live, a=[1.0, 0.0], b=[1.0, 1.0], c=[0.0, None, 1.0], d=[1.0, 0.0])
    await run(live, tmp_path, "--groups", "2", "--ranks", "2", "--seq-len", "12")
    first = tmp_path / "rollouts" / "step_1"
    assert {path.name for path in first.iterdir()} == {"groups.json", "rank_0.bin", "rank_1.bin"}
    assert msgspec.json.decode((first / "groups.json").read_bytes()) == ["a", "c"]
    batches = [read(first, rank)[0] for rank in (0, 1)]
    assert [batch.seq_lens for batch in batches] == [[6, 6], [6, 6]]
    assert batches[0].input_ids == [10, 11, 12, 13, 14, 15] * 2
    assert batches[0].position_ids == [0, 1, 2, 3, 4, 5] * 2
    assert batches[0].loss_mask == [False, False, True, True, False, False] * 2
    assert batches[0].inference_logprobs == [0, 0, -0.5, -0.5, 0, -0.5] * 2
    signs = [np.sign(batch.advantages).tolist() for batch in batches]
    assert signs[0] == [0, 0, 1, 1, 0, 0, 0, 0, -1, -1, 0, 0]
    assert not (tmp_path / "rollouts" / "step_2").exists()
    await finish(live, e=[1.0, 0.0])
    arguments = ("--groups", "2", "--ranks", "2", "--seq-len", "12", "--consumer", "another")
    await run(live, tmp_path, *arguments)
    second = tmp_path / "rollouts" / "step_2" / "groups.json"
    assert msgspec.json.decode(second.read_bytes()) == ["d", "e"]


def test_temperatures_are_those_of_the_next_token(recipe: Any) -> None:
    """prime-rl divides the logits at a position, which are of the next token, by its temperature.

    The temperature is never 0, which would make the logits infinite.
    """
    row = msgspec.structs.replace(sample(5), temperatures=np.float32([1, 1, 0.5, 0, 0.5]))
    assert recipe.make_micro_batch([row]).temperatures == [1, 0.5, 1, 0.5, 1]


def test_ranks_have_equally_many_micro_batches(recipe: Any) -> None:
    """Each sample is in one micro-batch, none is too long, and padding batches train nothing."""
    lengths = [9, 8, 5, 5, 4, 3, 2]
    ranks = recipe.pack([sample(length) for length in lengths], 10, 3)
    assert [len(batches) for batches in ranks] == [2, 2, 2]
    batches = [batch for of_rank in ranks for batch in of_rank]
    assert all(len(batch.input_ids) <= 10 for batch in batches)
    trained = [batch for batch in batches if any(batch.loss_mask)]
    assert sorted(n for batch in trained for n in batch.seq_lens) == sorted(lengths)
    assert len(trained) == 4


def test_long_samples_are_left_out(recipe: Any, tmp_path: Path) -> None:
    """Long samples are counted, not cut; a second writer continues after the step."""
    assert recipe.StepWriter(tmp_path, 10, 1).write([Group(sample(5), sample(20))]) == 1
    (batch,) = read(tmp_path / "rollouts" / "step_1", 0)
    assert batch.seq_lens == [5]
    again = recipe.StepWriter(tmp_path, 10, 1)
    assert (again.step, again.known) == (2, {"g"})


# --------------------------------------------------------------------------- experts, kept sets
def test_experts_are_those_of_the_samples(recipe: Any, tmp_path: Path) -> None:
    """Every trained token has the experts of its context; layers without a router have none.

    Samples without experts are in other micro-batches, as in prime-rl's own packing.
    """
    samples = (routed(6, 5), routed(5, 3, first=250), sample(4))
    form = recipe.Form(dense_layers=(0,))
    recipe.StepWriter(tmp_path, 20, 1, form).write([Group(*samples)])
    batch, plain = read(tmp_path / "rollouts" / "step_1", 0)
    assert (batch.seq_lens, plain.seq_lens, plain.routed_experts) == ([6, 5], [4], None)
    assert batch.routed_experts is not None
    data, shape, kind = batch.routed_experts
    held = np.frombuffer(data, kind).reshape(shape)
    assert held.shape == (11, 4, 2)
    assert not held[:, 0].any()
    for start, each in zip((0, 6), samples, strict=False):
        last = int(np.flatnonzero(each.loss_mask)[-1])
        assert each.experts is not None
        assert np.array_equal(held[start : start + last, 1:], each.experts[:last])


def test_experts_are_left_out_by_option(recipe: Any, tmp_path: Path) -> None:
    """The file is that of a model without experts."""
    form = recipe.Form(experts=False)
    routed_sample = routed(6, 5)
    recipe.StepWriter(tmp_path / "a", 20, 1, form).write([Group(routed_sample)])
    recipe.StepWriter(tmp_path / "b", 20, 1).write([Group(replace(routed_sample, experts=None))])
    files = [tmp_path / name / "rollouts" / "step_1" / "rank_0.bin" for name in "ab"]
    assert files[0].read_bytes() == files[1].read_bytes()


SETS = Kept.of([[], [], [2, 9], [3], []])


def test_kept_sets_are_at_their_tokens(recipe: Any, tmp_path: Path) -> None:
    """A trained token has its set, and others have none, also after another sequence."""
    form = recipe.Form(kept="hold")
    samples = (sample(6), replace(sample(5), kept=SETS))
    recipe.StepWriter(tmp_path, 20, 1, form).write([Group(*samples)])
    (batch,) = read(tmp_path / "rollouts" / "step_1", 0, NewMicroBatch)
    assert isinstance(batch, NewMicroBatch)
    assert batch.sampling_mask is not None
    ids, counts = (np.frombuffer(each, np.int32) for each in batch.sampling_mask)
    assert ids.tolist() == [2, 9, 3]
    assert counts.tolist() == [0] * 8 + [2, 1, 0]


def test_kept_sets_are_refused_or_masked(recipe: Any, tmp_path: Path) -> None:
    """A trainer that does not read them never trains a token with a set."""
    truncated = replace(sample(5), kept=SETS)
    with pytest.raises(UsageError, match=r"session s has 2 tokens .*--kept mask"):
        recipe.StepWriter(tmp_path, 20, 1).write([Group(truncated)])
    form = recipe.Form(kept="mask")
    assert form.fit(truncated).masked == {Reason.UNREPRODUCIBLE: 2}
    recipe.StepWriter(tmp_path, 20, 1, form).write([Group(truncated)])
    (batch,) = read(tmp_path / "rollouts" / "step_1", 0)
    assert batch.loss_mask == [False] * 4 + [True]
    assert batch.advantages == [0, 0, 0, 0, 2]
