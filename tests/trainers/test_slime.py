"""The recipe in `examples/slime`, with replacements of the two types that it imports from slime."""

from __future__ import annotations

import asyncio
import importlib
import sys
from argparse import Namespace
from contextlib import closing
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from support.groups import finish
from support.server import TOKENS, RestartableServer
from trainers.sessions import sample as make_sample
from tugline.errors import UsageError
from tugline.types import Kept
from tugline.types import Sample as Trained

RECIPE = Path(__file__).parents[2] / "examples" / "slime"


@dataclass
class Sample:
    """The fields of slime's class that the recipe sets."""

    class Status(Enum):
        """The values that the recipe sets."""

        COMPLETED = "completed"
        TRUNCATED = "truncated"
        FAILED = "failed"

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    tokens: list[int] = field(default_factory=list)
    response_length: int = 0
    reward: float | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: torch.Tensor | None = None
    rollout_top_p_token_offsets: torch.Tensor | None = None
    rollout_routed_experts: torch.Tensor | None = None
    remove_sample: bool = False
    status: Status = Status.COMPLETED
    metadata: dict[str, Any] = field(default_factory=dict)
    session_id: str | None = None


@dataclass
class RolloutFnTrainOutput:
    """The result of slime's rollout functions."""

    samples: list[list[list[Sample]]]
    metrics: dict[str, Any] | None = None


@pytest.fixture
def recipe(live: RestartableServer, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The recipe's module, with those types and the address of the server."""
    monkeypatch.setenv("TUGLINE_SERVER", live.url)
    monkeypatch.setenv("TUGLINE_TOKEN", TOKENS.client)
    for name in ("slime", "slime.rollout", "slime.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, value in (("rollout.base_types", RolloutFnTrainOutput), ("utils.types", Sample)):
        module = ModuleType(f"slime.{name}")
        setattr(module, value.__name__, value)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.syspath_prepend(RECIPE)
    monkeypatch.delitem(sys.modules, "tugline_slime", raising=False)
    return importlib.import_module("tugline_slime")


def arguments(groups: int, sessions: int) -> Namespace:
    """Options of slime for the size of a batch."""
    return Namespace(rollout_batch_size=groups, n_samples_per_prompt=sessions)


async def read_batch(live: RestartableServer, recipe: Any) -> Any:
    """The output for a group of two sessions with two traces, and one without a reward."""
    await finish(live, traces=2, a=[1.0, 0.0, None])
    args = arguments(1, 3)
    with closing(recipe.TuglineGroups(args)) as source:
        return await asyncio.to_thread(recipe.generate_rollout, args, 7, source, evaluation=False)


async def test_traces_of_a_session_share_an_id(live: RestartableServer, recipe: Any) -> None:
    """Rows of a group are in the order of its sessions, with slime's ids."""
    output = await read_batch(live, recipe)
    (group,) = output.samples
    assert [len(session) for session in group] == [2, 2, 1]
    assert output.metrics == {"tugline/missing": 1}
    rows = [row for session in group for row in session]
    assert [row.rollout_id for row in rows] == [21, 21, 22, 22, 23]
    assert [row.session_id for row in rows] == ["a-0", "a-0", "a-1", "a-1", "a-2"]
    assert {row.group_index for row in rows} == {7}


async def test_a_batch_has_the_fields_of_slime(live: RestartableServer, recipe: Any) -> None:
    """A row has ids, mask, log probabilities and versions of its trace."""
    first = (await read_batch(live, recipe)).samples[0][0][0]
    assert first.tokens == [10, 11, 12, 13, 14, 15]
    assert first.response_length == 4
    assert first.loss_mask == [1, 1, 0, 0]  # the last token was sampled greedily
    assert first.rollout_log_probs == [-0.5, -0.5, 0.0, -0.5]
    assert first.weight_versions == ["3", "4"]


async def test_a_session_without_a_reward_is_in_the_batch(
    live: RestartableServer, recipe: Any
) -> None:
    """The session trains nothing and does not change the mean; slime needs equal batches."""
    output = await read_batch(live, recipe)
    rows = [row for session in output.samples[0] for row in session]
    last = rows[-1]
    assert (last.loss_mask, last.remove_sample, last.status) == ([0], True, Sample.Status.FAILED)
    assert len(last.rollout_log_probs) == last.response_length == 1
    rewards, advantages = recipe.advantages(arguments(1, 3), rows)
    assert rewards == [1.0, 1.0, 0.0, 0.0, 0.5]
    assert advantages == pytest.approx([0.7070068, 0.7070068, -0.7070068, -0.7070068, 0.0])


async def test_groups_are_read_again_until_slime_has_saved(
    live: RestartableServer, recipe: Any
) -> None:
    """The next run has the groups since the last checkpoint, in the same order."""
    await finish(live, a=[1.0, 0.0], b=[None, None], c=[0.0, 1.0], d=[1.0, 1.0])
    args = arguments(1, 2)

    def take(source: Any, rollout_id: int) -> str:
        output = recipe.generate_rollout(args, rollout_id, source, evaluation=False)
        return str(output.samples[0][0][0].metadata["task"])

    def run() -> list[str]:
        with closing(recipe.TuglineGroups(args)) as source:
            taken = [take(source, 0)]
            source.save(0)
            taken.append(take(source, 1))  # read but not saved
        with closing(recipe.TuglineGroups(args)) as source:
            source.load(0)
            return [*taken, take(source, 1), take(source, 2)]

    assert await asyncio.to_thread(run) == ["a", "c", "c", "d"]


async def test_other_batches_are_refused(live: RestartableServer, recipe: Any) -> None:
    """Groups of another size, and evaluations, are errors."""
    await finish(live, a=[1.0, 0.0])
    args = arguments(1, 8)
    with closing(recipe.TuglineGroups(args)) as source:
        with pytest.raises(UsageError, match="task a has 2 samples, --n-samples-per-prompt is 8"):
            await asyncio.to_thread(recipe.generate_rollout, args, 0, source, evaluation=False)
        with pytest.raises(UsageError, match="eval-function-path"):
            recipe.generate_rollout(args, 0, source, evaluation=True)


# --------------------------------------------------------------------------- experts, kept sets
EXPERTS = np.arange(16, dtype=np.uint8).reshape(4, 2, 2)
ROUTED = Namespace(
    use_rollout_routing_replay=True, num_layers=3, moe_layer_freq=[0, 1, 1], moe_router_topk=2
)


def trained(**changes: Any) -> Trained:
    """A sample of six tokens, whose last three are an answer; the last one is not trained."""
    mask = [False, False, False, True, True, False]
    versions = np.int32([-1, -1, -1, 3, 3, 3])
    advantages = np.where(mask, np.float32(0.5), np.float32(0))
    return replace(make_sample(range(6), mask), versions=versions, advantages=advantages, **changes)


def test_experts_are_those_of_all_tokens_but_the_last(recipe: Any) -> None:
    """Trained tokens have the experts of their context; other rows have different experts."""
    form = recipe.Form.read(ROUTED)
    row = recipe.make_sample(trained(experts=EXPERTS), {}, form)
    held = row.rollout_routed_experts.numpy()
    assert (held.dtype, held.shape) == (np.int32, (5, 3, 2))
    assert np.array_equal(held[:4, 1:], EXPERTS)
    assert held[4, 1:].tolist() == [[0, 1], [0, 1]]
    assert not held[:, 0].any()
    empty = form.make_columns(2, 1)["rollout_routed_experts"]
    assert empty.tolist() == [[[0, 0], [0, 1], [0, 1]]]


@pytest.mark.parametrize(
    ("changes", "args", "message"),
    [
        ({"experts": EXPERTS}, Namespace(), "tugline_experts: false"),
        ({}, ROUTED, "has no experts to replay"),
        ({"kept": Kept.of([[], [], [], [3, 9], [], []])}, Namespace(), "tugline_kept: false"),
        (
            {"kept": Kept.of([[], [], [], [3, 9], [], []])},
            Namespace(rollout_top_p=0.9),
            "has 1 tokens .* tugline_kept: false",
        ),
    ],
)
def test_what_slime_would_not_replay_is_refused(
    recipe: Any, changes: dict[str, Any], args: Namespace, message: str
) -> None:
    """The error names the option to train without."""
    with pytest.raises(UsageError, match=message):
        recipe.make_sample(trained(**changes), {}, recipe.Form.read(args))


def test_kept_sets_are_those_of_the_response(recipe: Any) -> None:
    """With a top-p, all rows have the sets of their trained tokens."""
    form = recipe.Form.read(Namespace(rollout_top_p=0.9))
    kept = Kept.of([[], [], [], [3, 9], [4], []])
    row = recipe.make_sample(trained(kept=kept), {}, form)
    assert row.rollout_top_p_token_ids.tolist() == [3, 9, 4]
    assert row.rollout_top_p_token_offsets.tolist() == [0, 2, 3, 3]
    assert form.make_columns(2, 1)["rollout_top_p_token_offsets"].tolist() == [0, 0]


@pytest.mark.parametrize(("top_p", "mask"), [(1.0, [0, 1, 0]), (0.9, [1, 0, 0])])
def test_tokens_of_other_sets_are_not_trained_by_option(
    recipe: Any, top_p: float, mask: list[int]
) -> None:
    """Other tokens of the trace are trained, with the advantage of the session.

    With a top-p, slime takes an empty set for that of the token alone, which trains nothing.
    """
    form = recipe.Form.read(Namespace(tugline_kept=False, rollout_top_p=top_p))
    kept = Kept.of([[], [], [], [3, 9], [], []])
    row = recipe.make_sample(trained(kept=kept), {}, form)
    assert (row.loss_mask, row.metadata["advantage"]) == (mask, 0.5)
