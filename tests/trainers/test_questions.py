"""Questions of ``tugline train --dry-run`` about settings that are seldom meant."""

from __future__ import annotations

from typing import Any

import pytest

from tugline.config import from_mapping
from tugline.trainers.config import TrainConfig
from tugline.trainers.questions import ask


def make(**sections: Any) -> TrainConfig:
    """A configuration with these sections."""
    source = {"taskset": {"name": "demo"}}
    if "heldout" in sections:
        sections["heldout"] |= source
    return from_mapping({"tasks": source, **sections}, TrainConfig)


@pytest.mark.parametrize(
    ("sections", "question"),
    [
        ({"schedule": {"steps": 100, "tasks_per_step": 8}}, "each of 16 tasks is trained 50 times"),
        ({"schedule": {"steps": 2, "samples": 2}}, "schedule.samples is 2"),
        ({"schedule": {"steps": 2, "staleness": 2}}, "sampled from the first weights"),
        ({"schedule": {"steps": 5}, "heldout": {"every": 6}}, "before and after the training only"),
        ({"schedule": {"steps": 5}, "grpo": {"lr": 0.01}}, "grpo.lr is 0.01"),
        ({"schedule": {"steps": 5}, "grpo": {"kl": 2.0}}, "grpo.kl is 2"),
        ({"schedule": {"steps": 5}, "grpo": {"warmup_updates": 5}}, "never reaches grpo.lr"),
        ({"schedule": {"steps": 5}, "grpo": {"decay_updates": 2}}, "from step 3 on the learning"),
        (
            {"schedule": {"steps": 2}, "grpo": {"sessions_per_update": 4}},
            "an update has a part of a group only",
        ),
    ],
)
def test_a_setting_that_is_seldom_meant_is_questioned(
    sections: dict[str, Any], question: str
) -> None:
    """There is one question, which names the key."""
    [asked] = ask(make(**sections), tasks=16)
    assert question in asked


def test_sensible_settings_raise_no_question() -> None:
    """A few passes over many tasks, with a decay to the end of the run."""
    schedule = {"steps": 100, "tasks_per_step": 8, "samples": 8, "staleness": 1}
    grpo = {"decay_updates": 100, "warmup_updates": 5, "lr": 1e-6}
    config = make(schedule=schedule, heldout={"every": 10}, grpo=grpo)
    assert not list(ask(config, tasks=400))
