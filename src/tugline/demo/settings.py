"""Settings of the demo; the defaults are the run that README describes."""

from typing import Annotated

from msgspec import Meta

from tugline.config import Config
from tugline.errors import ConfigError
from tugline.schema import NonNegativeInt, Port, PositiveFloat, PositiveInt
from tugline.trainers.grpo.config import GrpoConfig
from tugline.types import PluginSpec


class DemoSettings(Config, frozen=True):
    """One run: a policy, a harness, a task family, and how long to train."""

    harness: str = "pi"
    """Which agent to train: `pi`, `shell`, or ``module:Class``."""
    command: str | None = None
    """The agent's own command line, for the `shell` harness."""
    builder: str = "prefix_merging"
    """How recorded calls become traces: `prefix_merging`, `per_request` or `tree`."""
    seed: NonNegativeInt = 0
    """Seed of the training tasks, the order of updates and the sampling."""
    steps: PositiveInt = 6
    """GRPO steps."""
    tasks_per_step: PositiveInt = 6
    """Groups in one step."""
    samples: Annotated[int, Meta(ge=2)] = 8
    """Sessions in one group."""
    heldout: PositiveInt = 92
    """Held-out tasks, each attempted once before and once after training."""
    minutes: PositiveFloat = 9.5
    """Training ends early if the run would otherwise take longer than this."""
    slots: PositiveInt = 6
    """Sessions that run at the same time."""
    window: PositiveInt = 4096
    """Context window of the engine in tokens."""
    max_turns: PositiveInt = 6
    """Model calls that a session may make."""
    max_answer: PositiveInt = 128
    """Tokens that one answer may have."""
    agent_s: PositiveFloat = 60.0
    """Seconds that an agent may run."""
    port: Port = 0
    """Port of the gateway on the loopback interface; 0 takes any free one."""
    grpo: GrpoConfig = GrpoConfig(lr=3e-4)
    """The trainer's settings; without `decay_updates` the learning rate falls until the last step.
    """


def harness_spec(settings: DemoSettings) -> PluginSpec:
    """The harness and its options. Raises `ConfigError` if the command is missing or unused."""
    if settings.harness == "shell":
        if not settings.command:
            msg = "harness 'shell' needs the agent's command: add --command \"python my_agent.py\""
            raise ConfigError(msg)
        return PluginSpec("shell", {"command": settings.command})
    if settings.command:
        msg = f"command is for the harness 'shell' only, not for {settings.harness!r}"
        raise ConfigError(msg)
    return PluginSpec(settings.harness)
