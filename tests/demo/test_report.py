from __future__ import annotations

import io
import math
import struct
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tugline.demo import live as live_module
from tugline.demo.live import ProgressDisplay
from tugline.demo.metrics import RunSummary, Score, Step, smoothed, wilson
from tugline.demo.report import closing, picture
from tugline.types import Ledger, Reason

SUMMARY = RunSummary(
    before=Score(31, 96),
    after=Score(77, 96),
    seed=0,
    steps=30,
    updates=30,
    sessions=2112,
    failed_sessions=2,
    ledger=Ledger(
        73_920, 70_000, {Reason.CLIENT_GONE: 3_900}, {Reason.HELD_OUT: 18, Reason.OVER_LENGTH: 2}
    ),
    tokens_forwarded=900_000,
    training_s=60.0,
    max_abs_dlogprob=2e-6,
    seconds=455.0,
    harness="pi",
    harness_version="0.87.1",
    model="Qwen3 architecture, 1.1 M parameters",
    builder="prefix_merging",
)


def _step(number: int, reward: float = 0.5) -> Step:
    return Step(
        step=number,
        reward=reward,
        pass_rate=0.25,
        tokens=2240,
        ledger=Ledger(2240, 2200, {Reason.CLIENT_GONE: 40}),
        sessions_per_s=4.2,
        engine_busy=0.71,
        updates=1,
        max_abs_dlogprob=2e-6,
        seconds=90.0,
    )


def _screen(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, highlight=False)


def _text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("passed", "n", "low", "high"),
    [  # published in R. G. Newcombe 1998, Statistics in Medicine 17, 857, table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_gives_the_published_intervals(passed: int, n: int, low: float, high: float) -> None:
    """The interval is Wilson's without continuity correction, to four digits."""
    assert wilson(passed, n) == pytest.approx((low, high), abs=5e-5)


def test_wilson_knows_nothing_from_nothing() -> None:
    """No attempts, no knowledge: the whole range, and a rate that is not a number."""
    assert wilson(0, 0) == (0.0, 1.0)
    assert math.isnan(Score(0, 0).rate)


@given(st.integers(1, 5000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_encloses_the_rate_and_mirrors(counts: tuple[int, int]) -> None:
    """The interval lies within 0 and 1, holds the rate, and failures mirror passes."""
    passed, n = counts
    low, high = wilson(passed, n)
    assert 0 <= low <= passed / n <= high <= 1
    assert wilson(n - passed, n) == pytest.approx((1 - high, 1 - low), abs=1e-12)


def test_smoothed_is_the_mean_of_neighbours() -> None:
    """Ends use fewer neighbours, so the line neither lags nor is cut."""
    means = [5 / 3, 1.25, 1, 3, 3.75, 10 / 3]
    assert smoothed([0, 0, 5, 0, 0, 10], window=5) == pytest.approx(means)
    assert smoothed([]) == []


@pytest.mark.parametrize("rewards", [[], [0.4], [0.1 * k for k in range(10)], [-3.0, 7.0]])
def test_picture_is_a_png_of_any_run(tmp_path: Path, rewards: list[float]) -> None:
    """Runs of no step, one step, many steps and unbounded rewards all make a picture."""
    path = tmp_path / "new" / "learning.png"
    picture([_step(k + 1, reward) for k, reward in enumerate(rewards)], SUMMARY, path)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", data[16:24]) == (1500, 690)


def test_picture_of_an_evaluation_that_did_not_happen(tmp_path: Path) -> None:
    """Without held-out attempts the bars say 0 of 0 and claim nothing."""
    summary = msgspec.structs.replace(SUMMARY, before=Score(0, 0), after=Score(0, 0))
    picture([_step(1)], summary, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_closing_says_how_sure_it_is_and_where_the_files_are() -> None:
    """Pass rates carry counts and intervals; ledger, logprob distance and files are shown."""
    console = _screen(terminal=False)
    console.print(closing(SUMMARY, [Path("runs/demo/learning.png")]))
    text = _text(console)
    for part in (
        "32% (31 of 96; interval 24% to 42%)",
        "80% (77 of 96; interval 71% to 87%)",
        "73,920 sampled = 70,000 trained + 3,900 masked + 20 dropped",
        "masked: 3,900 client_gone; dropped: 18 held_out, 2 over_length",
        "differ by 2.0e-06 nats at most",
        "2,112 (4.6/s), 2 failed",
        "30 steps, 30 updates; 7 min 35 s in all",
        "runs/demo/learning.png",
    ):
        assert part in text


def test_what_was_not_measured_is_not_claimed() -> None:
    """A distance of None is shown as not compared, never as zero."""
    console = _screen(terminal=False)
    console.print(closing(msgspec.structs.replace(SUMMARY, max_abs_dlogprob=None), []))
    with ProgressDisplay(3, console) as live:
        live.row(msgspec.structs.replace(_step(1), max_abs_dlogprob=None))
    assert "were not compared" in _text(console)
    assert "|dlogp| -" in _text(console)


def test_live_writes_plain_lines_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log gets a line per phase, per finished step and now and then per session, no codes."""
    console = _screen(terminal=False)
    with ProgressDisplay(30, console) as live:
        live.phase("installing pi")
        live.sessions(1, 64)
        monkeypatch.setattr(live_module, "QUIET_S", 0.0)
        live.sessions(17, 64)
        live.row(_step(1))
    row = "reward 0.500  pass 25%  tokens 2,240  sess/s 4.2  engine 71%  updates 1  |dlogp| 2e-06"
    assert _text(console).splitlines() == [
        "installing pi ...",
        "  installing pi: session 17 of 64",
        f"step 1/30  {row}",
    ]


def test_live_keeps_a_table_on_a_terminal() -> None:
    """A terminal shows the last steps, the phase with its sessions, and the time left."""
    console = _screen(terminal=True)
    with ProgressDisplay(30, console) as live:
        for number in range(1, 21):
            live.row(_step(number))
        live.phase("step 21")
        live.sessions(17, 64)
        assert live.left_s == pytest.approx(900)
        shown = _screen(terminal=False)
        shown.print(live._render())
    text = _text(shown)
    assert "20/30" in text
    assert " 8/30" not in text, "only the last steps are shown"
    assert "17/64 sessions" in text
    assert "about 15 min left" in text
    assert "\x1b[" in _text(console), "a terminal is drawn upon"


def test_live_leaves_stdout_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Everything goes to stderr, so that --json on stdout stays clean."""
    with ProgressDisplay(3) as live:
        live.phase("warming up")
        live.row(_step(1))
    out, err = capsys.readouterr()
    assert out == ""
    assert "warming up" in err
    assert "1/3" in err
