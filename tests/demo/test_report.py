from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec.structs import replace
from rich.console import Console

from tugline.demo.run import DemoSummary, closing

SUMMARY = msgspec.json.decode(
    Path(__file__).with_name("summary.json").read_bytes(), type=DemoSummary, strict=False
)
"""A run of 30 steps: 31 of 96 held-out tasks solved before, 77 after."""


def _text(summary: DemoSummary) -> str:
    console = Console(width=100, highlight=False)
    with console.capture() as output:
        console.print(closing(summary, [Path("runs/demo/training.png")]))
    return output.get()


def test_closing_report_has_intervals_and_files() -> None:
    """Pass rates have counts and intervals; ledger, logprob distance and files are printed."""
    text = _text(SUMMARY)
    for part in (
        "32% (31 of 96; interval 24% to 42%)",
        "80% (77 of 96; interval 71% to 87%)",
        "73,920 sampled = 70,000 trained + 3,900 masked + 20 dropped",
        "masked: 3,900 client_gone; dropped: 18 no_signal, 2 over_length",
        "differ by at most 2.0e-06 nats",
        "2,112, 2 failed",
        "641 s in agents and tests, 160 s in server",
        "30 steps, 30 updates; 7.6 min in all, 1.0 of them",
        "runs/demo/training.png",
    ):
        assert part in text


def test_a_missing_distance_is_reported_as_not_compared() -> None:
    """A distance of None is never printed as zero."""
    assert "were not compared" in _text(replace(SUMMARY, replay_max_abs_dlogprob=None))
