"""The figures that the demo ends with."""

import msgspec

from tugline.trainers.evaluation import Estimate
from tugline.trainers.state import TrainState


class BuilderCost(msgspec.Struct, frozen=True, kw_only=True):
    """What the recorded sessions cost a trainer with one builder (arXiv 2605.24220)."""

    builder: str
    sessions: int
    traces: int
    tokens_trained: int
    tokens_forwarded: int
    """In all traces, context included."""


class DemoSummary(msgspec.Struct, frozen=True, kw_only=True):
    """``summary.json``, and the output of ``--json``."""

    harness: str
    harness_version: str
    seed: int
    before: Estimate
    """pass@1 on the held-out tasks, each attempted once."""
    after: Estimate
    """The same after training."""
    state: TrainState
    """Steps, sessions, token ledger and evaluations of the training run."""
    cpu_seconds: float
    """CPU time of this process: server, gateway, engine, trainer; of the last start only."""
    cpu_seconds_sessions: float
    """CPU time of the processes that it started: agents and tests; of the last start only."""
    replay_max_abs_dlogprob: float | None
    """Largest distance between a captured and a recomputed logprob over all steps, nats."""
    builders: tuple[BuilderCost, ...]
