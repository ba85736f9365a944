"""What the demo can be told. The defaults are the run that README promises."""

from __future__ import annotations

from pydantic import Field

from tugline.config import Config
from tugline.trainers.grpo.config import GrpoConfig


class DemoSettings(Config):
    """One run: a policy, a harness, a task family, and how long to train."""

    harness: str = "pi"
    """Which agent to train: `pi`, `shell`, or ``module:Class``."""
    command: str | None = None
    """The agent's own command line, for the `shell` harness."""
    builder: str = "prefix_merging"
    """How recorded calls become traces: `prefix_merging`, `per_request` or `tree`."""
    seed: int = Field(default=0, ge=0)
    """Chooses the training tasks, the order of updates and every random draw of the sampler."""
    steps: int = Field(default=16, ge=1)
    """GRPO steps."""
    tasks_per_step: int = Field(default=6, ge=1)
    """Groups in one step."""
    samples: int = Field(default=8, ge=2)
    """Sessions in one group."""
    heldout: int = Field(default=96, ge=1)
    """Held-out tasks, each attempted once before and once after training."""
    minutes: float = Field(default=9.5, gt=0)
    """Training ends early if the run would otherwise take longer than this."""
    slots: int = Field(default=6, ge=1)
    """Sessions that run at the same time."""
    window: int = Field(default=4096, ge=1)
    """Context window of the engine in tokens."""
    max_turns: int = Field(default=6, ge=1)
    """Model calls that a session may make."""
    max_answer: int = Field(default=128, ge=1)
    """Tokens that one answer may have."""
    agent_s: float = Field(default=60.0, gt=0)
    """Seconds that an agent may run."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the gateway on the loopback interface; 0 takes any free one."""
    grpo: GrpoConfig = GrpoConfig(lr=2.5e-4)
    """The trainer's settings."""
