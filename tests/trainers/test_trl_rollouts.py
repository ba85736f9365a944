"""The recipe in `examples/trl`: TRL's training loop, with sessions of the embedded engine."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from support.training import AGENT, TRL_ON_CPU, write_config
from trainers.sessions import sample
from tugline.errors import UsageError
from tugline.evaluators.base import SessionOutcome
from tugline.inference.load import load
from tugline.trainers.config import TrainConfig, read_config
from tugline.trainers.grpo.train import Grpo
from tugline.trainers.grpo.update import Mismatch
from tugline.types import Kept, Trajectory

RECIPE = Path(__file__).parents[2] / "examples" / "trl"
AGENTS = AGENT.replace("range(1)", "range(3)")
"""An agent with one to three calls, so that completions differ in length."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    # transformers warns about calls of TRL
    pytest.mark.filterwarnings("ignore:.*deprecated and will be removed:FutureWarning"),
]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The recipe's `train.py`; the other files can be imported."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.setattr(sys, "path", [*sys.path, str(RECIPE)])
    return importlib.import_module("train")


def assert_same_update(
    config: TrainConfig,
    weights: Mapping[str, torch.Tensor],
    sessions: Sequence[Trajectory],
    theirs: Mapping[str, float],
) -> Mismatch:
    """Assert that TRL logged the loss and gradient norm of our own step from these weights."""
    policy, _, _ = load(config.model or Path(), dtype=torch.float32)
    policy.load_state_dict(weights)
    ours = Grpo(policy, config.grpo).step(sessions, version=0)
    assert (ours.samples, ours.updates) == (8, 1)
    assert theirs["loss"] == pytest.approx(ours.loss, abs=1e-6)
    assert theirs["grad_norm"] == pytest.approx(ours.grad_norm, abs=1e-6)
    return ours.mismatch.total


def by_answer(outcome: SessionOutcome) -> float:
    """A reward by the sampled ids, so that sessions of a group differ."""
    return sum(int(call.sampled_ids.sum()) for call in outcome.calls) % 1000 / 1000


def test_steps_of_trl_equal_those_of_our_trainer(tmp_path: Path, script: Any) -> None:
    """Loss and gradient norm agree within 1e-6 over two versions of the weights.

    The sessions of the second step are sampled with the weights of TRL's first step.
    """
    recipe = importlib.import_module("tugline_trl")
    config = read_config(write_test_config(tmp_path), Path("none"))
    steps: dict[int, tuple[dict[str, torch.Tensor], list[Trajectory]]] = {}

    class Recorded(recipe.TuglineRollouts):
        """Records the weights and the sessions of each version."""

        def _make_rows(self, task: Any, results: Sequence[Trajectory]) -> Any:
            weights = {name: weight.clone() for name, weight in self.weights().items()}
            steps[self.version] = (weights, list(results))
            return super()._make_rows(task, results)

    model = script.AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32)
    with Recorded(config, tmp_path, tmp_path / "run") as rollouts:
        trainer = script.GRPOTrainer(
            model=model,
            reward_funcs=recipe.reward,
            rollout_func=rollouts,
            train_dataset=rollouts.dataset(),
            processing_class=script.load_tokenizer(model),
            args=script.make_arguments(config, tmp_path / "run", save_strategy="no"),
        )
        trainer.train()
    assert rollouts.tokens_left_out == 0
    logged = [row for row in trainer.state.log_history if "loss" in row]
    for (version, (weights, sessions)), theirs in zip(steps.items(), logged, strict=True):
        assert {s.version for done in sessions for t in done.traces for s in t.spans} == {version}
        mismatch = assert_same_update(config, weights, sessions, theirs)
        assert mismatch.max_abs < 1e-4
    first, second = (weights for weights, _ in steps.values())
    assert list(steps) == [0, 1]
    assert any(not torch.equal(first[name], second[name]) for name in first)


def plain_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends_q: torch.Tensor,
    ends_k: torch.Tensor,
    *_lengths: int,
    softmax_scale: float | None = None,
    **_: object,
) -> torch.Tensor:
    """FlashAttention 3, which needs a GPU, replaced by PyTorch's attention."""
    parts = []
    bounds = zip(pairwise(ends_q.tolist()), pairwise(ends_k.tolist()), strict=True)
    for (start_q, end_q), (start_k, end_k) in bounds:
        own = query[start_q:end_q].transpose(0, 1)[None]
        seen = [part[start_k:end_k].transpose(0, 1)[None] for part in (key, value)]
        mask = causal_lower_right(end_q - start_q, end_k - start_k)
        made = scaled_dot_product_attention(
            own, *seen, attn_mask=mask, scale=softmax_scale, enable_gqa=True
        )
        parts.append(made[0].transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.nightly
def test_asynchronous_steps_of_trl_equal_those_of_our_trainer(
    tmp_path: Path, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss and gradient norm agree within 1e-6, whatever the version of the sessions.

    TRL's kernel is replaced, since it needs a GPU; its loop, queue, packing and loss are its own.
    """
    trl = importlib.import_module("trl.experimental.async_grpo")
    packing = importlib.import_module("trl.experimental.async_grpo.packing")
    kernel = SimpleNamespace(flash_attn_varlen_func=plain_varlen)
    monkeypatch.setattr(packing, "_flash_attn", lambda: kernel)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "cpu")
    recipe = importlib.import_module("tugline_async")
    config = read_config(write_test_config(tmp_path, staleness=1), Path("none"))
    groups: list[list[Trajectory]] = []
    sent: list[dict[str, torch.Tensor]] = []

    class Recorded(recipe.TuglineWorker):
        """Records the weights of each version and the sessions in their order."""

        def hand_over(self, group: Sequence[Trajectory], number: int) -> None:
            groups.append(list(group))
            super().hand_over(group, number)

        def publish(self) -> None:
            sent.append({name: weight.clone() for name, weight in self.weights().items()})
            super().publish()

    model = script.AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32)
    with Recorded(config, tmp_path, tmp_path / "run") as worker:
        trainer = trl.AsyncGRPOTrainer(
            model=str(config.model),
            args=trl.AsyncGRPOConfig(
                output_dir=str(tmp_path / "trl"),
                max_steps=2,
                learning_rate=1e-3,
                max_grad_norm=1e9,
                per_device_train_batch_size=8,
                token_budget=-1,
                num_generations=4,
                logging_steps=1,
                dtype="float32",
                **TRL_ON_CPU,
            ),
            train_dataset=worker.dataset(),
            processing_class=script.load_tokenizer(model),
            rollout_worker=worker,
            weight_transfer=worker,
        )
        trainer.train()
    logged = [row for row in trainer.state.log_history if "loss" in row]
    assert len(logged) == 2
    for step, theirs in enumerate(logged):
        sessions = groups[2 * step] + groups[2 * step + 1]
        assert_same_update(config, sent[step], sessions, theirs)
    assert len(sent) == 3
    assert any(not torch.equal(sent[0][name], sent[1][name]) for name in sent[0])


def write_test_config(folder: Path, **schedule: int) -> Path:
    """A configuration of two steps of two groups of four sessions."""
    path = write_config(
        folder,
        heldout=None,
        template={
            "limits": {"agent_s": 300},
            "evaluator": {
                "name": "function",
                "options": {"target": "trainers.test_trl_rollouts:by_answer"},
            },
        },
        grpo={"advantage": "dr_grpo", "max_grad_norm": 1e9},
        schedule={"steps": 2, "tasks_per_step": 2, "samples": 4} | schedule,
    )
    (folder / "agent.py").write_text(AGENTS)
    return path


@pytest.mark.usefixtures("script")
def test_what_trl_does_not_replay_is_refused_or_left_out() -> None:
    """A sample with experts is trained without by option, and a token with a set not at all."""
    fit = importlib.import_module("tugline_trl").fit_samples
    routed = sample(range(3), [False, True, True], experts=np.zeros((2, 1, 1), np.uint8))
    truncated = replace(routed, experts=None, kept=Kept.of([[], [1, 2], []]))
    with pytest.raises(UsageError, match="--no-experts"):
        fit([routed], experts=True, kept=False)
    with pytest.raises(UsageError, match="--no-kept"):
        fit([truncated], experts=False, kept=True)
    first, second = fit([routed, truncated], experts=False, kept=False)
    assert first.experts is None
    masks = [each.loss_mask.tolist() for each in (first, second)]
    assert masks == [[False, True, True], [False, False, True]]
    nothing = replace(truncated, loss_mask=np.array([0, 1, 0], np.bool_))
    assert fit([nothing], experts=True, kept=False) == []
