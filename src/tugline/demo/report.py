"""Closing report of the demo.

Held-out pass rates have 95 % Wilson intervals. The summary shows the token ledger (I2) and the
difference between captured and recomputed logprobs (I1), because a reward curve does not show
whether the right tokens were trained.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tugline.trainers.evaluation import Estimate
from tugline.trainers.state import TrainState
from tugline.types import Reason


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


def closing(summary: DemoSummary, files: Sequence[Path]) -> RenderableType:
    """The summary for a terminal: results, what was trained on, and where the files are."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, value in _facts(summary):
        table.add_row(name, value)
    for path in files:
        table.add_row("written", Text(str(path), style="cyan", overflow="fold"))
    return Panel(Group(_headline(summary), "", table), title="tugline demo", expand=False)


def _headline(summary: DemoSummary) -> Text:
    style = "bold green" if summary.after.value > summary.before.value else "bold red"
    return Text.assemble(
        "held-out pass@1, before  ",
        (f"{_share(summary.before)}\n", "bold"),
        "held-out pass@1, after   ",
        (_share(summary.after), style),
    )


def _share(rate: Estimate) -> str:
    passed = f"{round(rate.value * rate.tasks)} of {rate.tasks}"
    return f"{rate.value:.0%} ({passed}; interval {rate.low:.0%} to {rate.high:.0%})"


def _facts(summary: DemoSummary) -> list[tuple[str, str]]:
    state, ledger = summary.state, summary.state.ledger
    held_out = [score.evaluation for score in state.scores]
    sessions = state.sessions + sum(one.attempts + one.unrewarded for one in held_out)
    failed = state.failed + sum(one.unrewarded for one in held_out)
    masked, dropped = sum(ledger.masked.values()), sum(ledger.dropped.values())
    tokens = f"{ledger.sampled:,} sampled = {ledger.trained:,} trained"
    cpu = f"{summary.cpu_seconds_sessions:.0f} s in agents and tests, {summary.cpu_seconds:.0f} s"
    return [
        ("harness", f"{_harness(summary)}, unmodified"),
        (
            "training",
            (
                f"{state.step} steps, {state.updates} updates; {state.elapsed_s / 60:.1f} min in"
                f" all, {state.training_s / 60:.1f} of them in the trainer"
            ),
        ),
        ("CPU", f"{cpu} in server, gateway, engine and trainer"),
        ("sessions", f"{sessions:,}, {failed:,} failed"),
        ("tokens", f"{tokens} + {masked:,} masked + {dropped:,} dropped"),
        ("", f"masked: {_reasons(ledger.masked)}; dropped: {_reasons(ledger.dropped)}"),
        ("logprobs", _logprob_difference(summary)),
    ]


def _reasons(counts: Mapping[Reason, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in counts.items()) or "none"


def _logprob_difference(summary: DemoSummary) -> str:
    if summary.replay_max_abs_dlogprob is None:
        return "captured and recomputed were not compared"
    return f"captured and recomputed differ by {summary.replay_max_abs_dlogprob:.1e} nats at most"


def _harness(summary: DemoSummary) -> str:
    return f"{summary.harness} {summary.harness_version}".rstrip()
