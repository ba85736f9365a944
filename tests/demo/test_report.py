from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace
from rich.console import Console

from tugline.demo.run import DemoSummary, closing
from tugline.trainers.evaluation import Estimate, Evaluation, VersionScore, wilson
from tugline.trainers.metrics import TrainState
from tugline.types import Ledger, Reason


def _score(step: int, passed: int, unrewarded: int) -> VersionScore:
    rate = Estimate(passed / 96, *wilson(passed, 96), 96)
    evaluation = Evaluation(
        pass_at={1: rate}, reward=rate.value, attempts=96 - unrewarded, unrewarded=unrewarded
    )
    return VersionScore(
        step=step, version=step, evaluation=evaluation, mixed=0, sampled=9, seconds=60.0
    )


SCORES = (_score(0, 31, 0), _score(30, 77, 1))
SUMMARY = DemoSummary(
    harness="pi",
    harness_version="0.87.1",
    seed=0,
    before=SCORES[0].evaluation.pass_at[1],
    after=SCORES[1].evaluation.pass_at[1],
    state=TrainState(
        step=30,
        sessions=1920,
        failed=1,
        updates=30,
        elapsed_s=455.0,
        training_s=60.0,
        scores=SCORES,
        ledger=Ledger(
            sampled=73_920,
            trained=70_000,
            masked={Reason.CLIENT_GONE: 3_900},
            dropped={Reason.NO_SIGNAL: 18, Reason.OVER_LENGTH: 2},
        ),
    ),
    cpu_seconds=160.2,
    cpu_seconds_sessions=640.9,
    replay_max_abs_dlogprob=2e-6,
)


def _text(summary: DemoSummary) -> str:
    console = Console(width=100, highlight=False)
    with console.capture() as output:
        console.print(closing(summary, [Path("runs/demo/training.png")]))
    return output.get()


def test_closing_says_how_sure_it_is_and_where_the_files_are() -> None:
    """Pass rates carry counts and intervals; ledger, logprob distance and files are shown."""
    text = _text(SUMMARY)
    for part in (
        "32% (31 of 96; interval 24% to 42%)",
        "80% (77 of 96; interval 71% to 87%)",
        "73,920 sampled = 70,000 trained + 3,900 masked + 20 dropped",
        "masked: 3,900 client_gone; dropped: 18 no_signal, 2 over_length",
        "differ by 2.0e-06 nats at most",
        "2,112, 2 failed",
        "641 s in agents and tests, 160 s in server",
        "30 steps, 30 updates; 7.6 min in all, 1.0 of them",
        "runs/demo/training.png",
    ):
        assert part in text


def test_what_was_not_measured_is_not_claimed() -> None:
    """A distance of None is shown as not compared, never as zero."""
    assert "were not compared" in _text(replace(SUMMARY, replay_max_abs_dlogprob=None))
