"""Loss and gradient, compared with those of the installed TRL."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from support.training import TRL_ON_CPU, load_tokenizer
from trainers.sessions import PROMPT, VERSION, captured, groups, recaptured, session, tiny
from tugline.trainers.grpo.config import GrpoConfig
from tugline.trainers.grpo.samples import prepare
from tugline.trainers.grpo.train import Grpo
from tugline.types import Sample, Trajectory

LOSS_TYPES = {"token": "dapo", "sequence": "grpo", "constant": "dr_grpo"}
"""TRL's name of each normalisation."""
REFERENCE = 1
"""Seed of the reference model's weights."""


def off_policy() -> list[Trajectory]:
    """Sessions of one trace, as in TRL, with log probabilities of other weights."""
    rng = np.random.default_rng(0)
    rewards = [1.0, 0.0] * 4
    batch = [
        session(original.traces[:1], task=original.task, sample=original.sample, reward=reward)
        for original, reward in zip(groups(tiny()), rewards, strict=True)
    ]
    return [
        recaptured(original, lambda each: each.logprobs + rng.normal(0, 0.4, len(each.ids)))
        for original in batch
    ]


def trl_trainer(model: PreTrainedModel, config: GrpoConfig, folder: Path) -> Any:
    """TRL's trainer with this configuration; imported here, which takes seconds."""
    trl = importlib.import_module("trl")
    rows = importlib.import_module("datasets").Dataset.from_list([{"prompt": ""}])
    settings = trl.GRPOConfig(
        output_dir=str(folder),
        loss_type=LOSS_TYPES[config.normalisation],
        epsilon=config.clip_low,
        epsilon_high=config.clip_high,
        importance_sampling_level="token" if config.ratio_level == "token" else "sequence",
        max_completion_length=config.constant_length,
        use_bias_correction_kl=config.kl_correction,
        entropy_coef=config.entropy,
        **TRL_ON_CPU,
    )
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=len,
        args=settings,
        train_dataset=rows,
        processing_class=load_tokenizer(),
    )
    # set afterwards, since they would start vLLM and load the reference from a hub
    trainer.use_vllm, trainer.beta = config.importance is not None, config.kl
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def trl_inputs(samples: tuple[Sample, ...], config: GrpoConfig) -> dict[str, Any]:
    """The samples as a padded batch of TRL; prompts have the same length."""
    start, longest = len(PROMPT), max(len(row.input_ids) for row in samples)

    def pad(parts: list[np.ndarray]) -> torch.Tensor:
        return torch.stack(
            [torch.from_numpy(np.pad(part, (0, longest - len(part)))) for part in parts]
        )

    ids = pad([row.input_ids.astype(np.int64) for row in samples])
    mask = pad([np.ones(len(row.input_ids), np.int64) for row in samples])
    trained = pad([row.loss_mask.astype(np.float32) for row in samples])[:, start:]
    sampled = pad([row.logprobs for row in samples])[:, start:]
    old = sampled
    if config.importance is not None:
        recomputed = [captured(tiny(), row.input_ids) * row.loss_mask for row in samples]
        old = pad(recomputed)[:, start:]
    reference = [captured(tiny(REFERENCE), row.input_ids) for row in samples]
    return {
        "prompt_ids": ids[:, :start],
        "prompt_mask": mask[:, :start],
        "completion_ids": ids[:, start:],
        "completion_mask": mask[:, start:],
        "tool_mask": trained,
        "advantages": torch.tensor([float(row.advantages[row.loss_mask][0]) for row in samples]),
        "old_per_token_logps": old,
        "ref_per_token_logps": pad(reference)[:, start:],
        "importance_sampling_ratio": (old - sampled).exp().clamp(max=config.importance_high),
        "num_items_in_batch": trained.sum(),
    }


@pytest.mark.parametrize("normalisation", LOSS_TYPES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ratio_level": "trace", "clip_low": 0.003, "clip_high": 0.004},
        {"kl": 0.1},
        {"kl": 0.1, "kl_correction": True},
        {"importance": "truncate", "importance_high": 1.2},
        {"entropy": 0.03, "logits_chunk": 16},
        {"entropy": 0.03, "ratio_level": "trace", "clip_low": 0.003, "clip_high": 0.004},
    ],
    ids=[
        "off-policy",
        "trace ratio",
        "kl",
        "corrected kl",
        "truncated importance",
        "entropy",
        "entropy, trace ratio",
    ],
)
def test_the_gradient_is_that_of_trl(
    tmp_path: Path, normalisation: str, options: dict[str, Any]
) -> None:
    """Loss and gradient of off-policy, partly clipped tokens agree within 1e-7.

    With importance sampling the old log probabilities are the trainer's, so that ratios are 1.
    """
    config = GrpoConfig(normalisation=normalisation, max_grad_norm=1e9, **options)  # type: ignore[arg-type]
    batch = off_policy()
    ours, theirs = tiny(), tiny()
    reference = tiny(REFERENCE) if config.kl else None
    report = Grpo(ours, config, reference).step(batch, version=VERSION)
    inputs = trl_inputs(prepare(batch, config, version=VERSION)[0], config)
    loss = trl_trainer(theirs, config, tmp_path)._compute_loss(theirs, inputs)
    loss.backward()
    assert report.loss == pytest.approx(loss.item(), abs=1e-7)
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert float((own.grad - other.grad).abs().max()) < 1e-7
    assert (abs(report.ratio_mean - 1) < 1e-5) is (config.importance is not None)
    # `test_the_loss_is_clipped_and_weighted` of test_grpo_math.py has both sides of the clip
    assert max(report.clip_fraction, report.importance_bounded) > 0.1
