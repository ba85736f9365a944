"""The figures that the demo ends with."""

import msgspec

from tugline.types import Ledger


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
    model: str
    """Architecture and size, as text."""
    seed: int
    pass_before: float
    pass_after: float
    ci_before: tuple[float, float]
    ci_after: tuple[float, float]
    held_out: int
    """Tasks, each attempted once before and once after training."""
    sessions: int
    """All sessions, evaluations included."""
    failed_sessions: int
    steps: int
    updates: int
    seconds: float
    training_seconds: float
    cpu_seconds: float
    """CPU time of this process: server, gateway, engine, trainer; of the last start only."""
    cpu_seconds_sessions: float
    """CPU time of the processes that it started: agents and tests; of the last start only."""
    ledger: Ledger
    """All sampled tokens; those of evaluations are dropped as `held_out`."""
    replay_max_abs_dlogprob: float | None
    """Largest distance between a captured and a recomputed logprob over all steps, nats."""
    builders: tuple[BuilderCost, ...]
