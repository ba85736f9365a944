"""The training run that the demo's settings describe."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tugline.demo.run import DemoSettings, make_config
from tugline.trainers.grpo.config import GrpoConfig


@pytest.mark.parametrize("steps", [3, 16])
def test_the_learning_rate_falls_until_the_last_step(steps: int) -> None:
    """However long the run is, unless the settings say when; one step has one update."""
    settings = DemoSettings(steps=steps)
    assert settings.tasks_per_step * settings.samples <= settings.grpo.sessions_per_update
    assert make_config(settings).grpo.decay_updates == steps
    own = replace(settings, grpo=GrpoConfig(decay_updates=100, final_lr=0.5))
    assert make_config(own).grpo.decay_updates == 100
