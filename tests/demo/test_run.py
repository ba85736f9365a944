"""The training configuration made from the demo's settings."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from msgspec.structs import replace

from tugline.demo.run import DemoSettings, make_config
from tugline.demo.tasks import VOCABULARY
from tugline.errors import ConfigError
from tugline.trainers.batches import TaskBatches
from tugline.trainers.grpo.config import GrpoConfig


@pytest.mark.parametrize("steps", [3, 16])
def test_the_learning_rate_falls_until_the_last_step(steps: int) -> None:
    """The length of the run decides, unless `decay_updates` is set; a step has one update."""
    settings = DemoSettings(steps=steps)
    assert settings.tasks_per_step * settings.samples <= settings.grpo.sessions_per_update
    assert make_config(settings).grpo.decay_updates == steps
    own = replace(settings, grpo=GrpoConfig(decay_updates=100, final_lr=0.5))
    assert make_config(own).grpo.decay_updates == 100


@pytest.mark.parametrize("per_step", [6, 4])
def test_every_step_has_tasks_of_every_kind(tmp_path: Path, per_step: int) -> None:
    """The kinds have the proportion of the whole set, as nearly as a step's size allows."""
    config = make_config(DemoSettings(tasks_per_step=per_step, steps=12))
    batches = TaskBatches(config, tmp_path)
    chosen = [
        batches.batch((step - 1) * per_step, batches.choose(step, {})) for step in range(1, 13)
    ]
    steps = [[task.tags["family"] for task in tasks] for tasks in chosen]
    seen = Counter({family.name: 0 for family in VOCABULARY.families})
    for names in steps:
        assert max(Counter(names).values()) <= 2 - (per_step == 6)
        seen.update(names)
        assert max(seen.values()) - min(seen.values()) <= 1
    assert len({tuple(names) for names in steps}) > 1
    unknown = replace(config, schedule=replace(config.schedule, balance="famly"))
    with pytest.raises(ConfigError, match=r"schedule.balance is 'famly', must be .*\bfamily\b"):
        TaskBatches(unknown, tmp_path)
