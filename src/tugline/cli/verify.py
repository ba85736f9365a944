"""``tugline verify`` and ``view``: check recorded sessions, and show a session.

`verify` exits with 0 if all checks that could be made passed, with 1 if a check failed or a
recording is unreadable. `view` writes to the terminal, as JSON or as HTML.
"""

import sys
from contextlib import AsyncExitStack
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from tugline.cli.options import DEFAULT_SERVER, Json, Remote
from tugline.cli.output import COLOURS, format_counts, make_table, print_report, print_text
from tugline.errors import CaptureError, UsageError
from tugline.recording.file import read
from tugline.recording.tokenizer_file import load_tokenizer
from tugline.recording.verify.engine import Scorer, connect_scorer
from tugline.recording.verify.session import (
    TOLERANCE,
    SessionReport,
    VerifySummary,
    summarize,
    verify_logprobs,
    verify_session,
)
from tugline.recording.verify.text import TextVerifier
from tugline.recording.view.html_page import render_page, write_run
from tugline.recording.view.session_view import TokenText, ViewedSession, encode_json, view_session
from tugline.recording.view.terminal import CONTINUATION_STYLES, Terminal

_WIDTH = 120
"""Width of a session's lines if the output is not a terminal."""


async def verify(
    session: str,
    /,
    *,
    engine: str | None = None,
    tolerance: float = TOLERANCE,
    tokenizer: Path | None = None,
    salvage: bool = False,
    remote: Remote = DEFAULT_SERVER,
    as_json: Json = False,
) -> None:
    """Check recorded ids, texts, lineage, ledgers and logprobs.

    Args:
        session: A recording file, a folder of them, or the id of a session.
        engine: Engine to recompute logprobs on, such as http://127.0.0.1:8000.
        tolerance: Maximum mean logprob difference of a turn, in nats.
        tokenizer: Path of tokenizer.json, if there is none beside the recording.
        salvage: Check the part of a damaged file before the damage.
    """
    texts = TextVerifier(tokenizer)
    reports = []
    async with AsyncExitStack() as stack:
        paths = stack.enter_context(remote.find_recordings(session))
        scorer = await stack.enter_async_context(connect_scorer(engine)) if engine else None
        for path in paths:
            reports.append(await _verify_one(path, scorer, tolerance, texts, salvage=salvage))
            if not as_json:
                _show(reports[-1])
    summary = summarize(reports)
    report = {"sessions": reports, "summary": summary}
    failed = summary.failed > 0
    print_report(report, lambda: _show_summary(summary), as_json=as_json, failed=failed)


async def _verify_one(
    path: Path, scorer: Scorer | None, tolerance: float, texts: TextVerifier, *, salvage: bool
) -> SessionReport:
    try:
        recording = read(path, salvage=salvage)
    except CaptureError as error:
        return SessionReport(session=path.stem, recording=str(path), error=str(error))
    report = verify_session(path, recording, texts)
    if scorer is not None:
        await verify_logprobs(report, recording, scorer, tolerance)
    return report


# --------------------------------------------------------------------------- on the terminal
def _show(report: SessionReport) -> None:
    print_text(f"{report.session} {report.recording}", style="bold")
    if report.error is not None:
        print_text(report.error, style="red")
        return
    print_text(_make_table(report))
    for name, check in report.checks.items():
        detail = f": {check.detail}" if check.detail else ""
        print_text(f"  {check.verdict} {name}{detail}", style=COLOURS[check.verdict])
    for turn in report.turns:
        for fault in turn.faults[1:]:
            print_text(f"  also turn {turn.call}: {fault}", style="red")
    for note in report.notes:
        print_text(f"  note: {note}")


def _make_table(report: SessionReport) -> Table:
    """Create a table with a line per call."""
    names = ["prompt", "shared", "sampled"]
    if any(turn.scored for turn in report.turns):
        names += ["max", "mean", "KL"]
    numbers = (Column(name, justify="right", min_width=7) for name in names)
    rows = []
    for turn in report.turns:
        continuation = Text(turn.continuation, CONTINUATION_STYLES[turn.continuation])
        counts = (turn.prompt, turn.shared, turn.sampled)
        values = (turn.max_dlogprob, turn.mean_dlogprob, turn.kl)
        scores = ("" if value is None else f"{value:.1e}" for value in values)
        cells = (turn.call, continuation, turn.detail, *counts, *scores)
        rows.append(cells[: 3 + len(names)])
    detail = Column("detail", overflow="fold")
    table = make_table(("call", "continuation", detail, *numbers), rows)
    table.row_styles = ["red" if turn.faults else "" for turn in report.turns]
    return table


def _show_summary(summary: VerifySummary) -> None:
    turns = format_counts(summary.turns)
    checks = format_counts(summary.checks)
    print_text(
        f"sessions: {summary.sessions}, {summary.failed} failed; "
        f"turns: {turns or 'none'}; checks: {checks or 'none'}",
        style="red" if summary.failed else "green",
    )


# --------------------------------------------------------------------------- view
def view(
    session: str,
    /,
    *,
    builder: str | None = None,
    turn: int | None = None,
    tokenizer: Path | None = None,
    as_json: Json = False,
    html: Path | None = None,
    salvage: bool = False,
    remote: Remote = DEFAULT_SERVER,
) -> None:
    """Show what happened in a session: turns, tokens, forks, ledger and timings.

    Args:
        session: A recording file, or the id of a session; with --html also a folder of recordings.
        builder: Show the traces of this builder (default: the task's builder).
        turn: Show only this call, with its messages.
        tokenizer: Path of tokenizer.json, if there is none beside the recording.
        html: Write an HTML page to this file; for a folder of recordings, write a page per session
            and an index into this new folder.
        salvage: Show the part of a damaged file before the damage.
    """

    def load(path: Path) -> tuple[ViewedSession, TokenText]:
        recording = read(path, salvage=salvage)
        header = recording.header
        texts = TokenText(load_tokenizer(path, header, tokenizer) if header else None)
        return view_session(path, recording, builder), texts

    if html is not None and Path(session).is_dir() and turn is None and not as_json:
        print(write_run(Path(session), html, load))
        return
    with remote.find_recording(session) as path:
        session_view, texts = load(path)
    numbers = [each.call for each in session_view.view.turns]
    if turn is not None and turn not in numbers:
        known = f"its calls are {numbers[0]} to {numbers[-1]}" if numbers else "it has no calls"
        raise UsageError(f"--turn is {turn}, but {path} has no such call; {known}")
    if html is not None:
        html.write_text(render_page(session_view, texts), encoding="utf-8")
        print_text(f"wrote {html} ({html.stat().st_size / 1e3:,.0f} kB)", stderr=as_json)
    if as_json:
        print(encode_json(session_view, turn).decode())
    elif html is None:
        console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
        terminal = Terminal(console, session_view, texts)
        terminal.print_session() if turn is None else terminal.print_turn(turn)
