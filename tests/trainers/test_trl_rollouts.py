"""The recipe in `examples/trl`: TRL's own loop on real sessions of the embedded engine."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from training_run import write_config
from tugline.evaluators.base import SessionOutcome
from tugline.trainers.config import read_config
from tugline.trainers.grpo.train import Grpo
from tugline.types import Trajectory

RECIPE = Path(__file__).parents[2] / "examples" / "trl"
AGENT = """
import json, os, urllib.request
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
messages = [{"role": "user", "content": os.environ["TUGLINE_INSTRUCTION"]}]
for left in range(3):
    body = json.dumps({"model": "m", "messages": messages}).encode()
    request = urllib.request.Request(url, body, headers | {"content-type": "application/json"})
    answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages += [answer, {"role": "user", "content": "Go on."}]
    if len(answer["content"] or "") % 2:
        break
"""
"""An agent of one to three calls, as the answers have it, so that completions differ in length."""
torch.set_num_threads(1)


def by_answer(outcome: SessionOutcome) -> float:
    """Earn by the sampled ids, so that sessions of a group differ unless all said the same."""
    return sum(int(call.sampled_ids.sum()) for call in outcome.calls) % 1000 / 1000


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:.*deprecated and will be removed:FutureWarning"
)  # TRL asks transformers
def test_two_steps_of_trl_are_those_of_our_own_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss and gradient norm agree within 1e-6 over two versions of the weights.

    The sessions of the second step were sampled by the weights that TRL's first step made.
    """
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.setattr(sys, "path", [*sys.path, str(RECIPE)])
    recipe, script = importlib.import_module("tugline_trl"), importlib.import_module("train")
    config = read_config(write_test_config(tmp_path), Path("none"))
    steps: dict[int, tuple[dict[str, torch.Tensor], list[Trajectory]]] = {}

    class Recorded(recipe.TuglineRollouts):
        """Keeps the weights and the sessions of each version."""

        def _make_rows(self, task: Any, results: Sequence[Trajectory]) -> Any:
            weights = {name: one.clone() for name, one in self.weights().items()}
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
        assert {s.version for one in sessions for t in one.traces for s in t.spans} == {version}
        policy = script.AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32)
        policy.load_state_dict(weights)
        ours = Grpo(policy, config.grpo).step(sessions, version=version)
        assert (ours.samples, ours.updates) == (8, 1)
        assert ours.mismatch.total.max_abs < 1e-4
        assert theirs["loss"] == pytest.approx(ours.loss, abs=1e-6)
        assert theirs["grad_norm"] == pytest.approx(ours.grad_norm, abs=1e-6)
    first, second = (weights for weights, _ in steps.values())
    assert list(steps) == [0, 1]
    assert any(not torch.equal(first[name], second[name]) for name in first)


def write_test_config(folder: Path) -> Path:
    """Two steps of two groups of four sessions."""
    path = write_config(
        folder,
        heldout=None,
        template={
            "evaluator": {
                "name": "function",
                "options": {"target": "trainers.test_trl_rollouts:by_answer"},
            }
        },
        grpo={"advantage": "dr_grpo", "max_grad_norm": 1e9},
        schedule={"steps": 2, "tasks_per_step": 2, "samples": 4},
    )
    (folder / "agent.py").write_text(AGENT)
    return path
