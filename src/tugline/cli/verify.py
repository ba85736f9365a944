"""``tugline verify``: check recorded sessions.

The exit code is 0 if all checks that could be made passed, 1 if a check failed or a recording is
unreadable.
"""

from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from rich.table import Column, Table
from rich.text import Text

from tugline.cli.options import DEFAULT_SERVER, Json, Remote
from tugline.cli.output import COLOURS, format_counts, make_table, print_report, print_text, track
from tugline.errors import CaptureError, UsageError
from tugline.plugins import import_extra
from tugline.recording.file import Recording, read
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
from tugline.recording.view.terminal import CONTINUATION_STYLES


async def verify(
    session: str,
    /,
    *,
    engine: str | None = None,
    model: Path | None = None,
    model_version: int | None = None,
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
        model: Folder of a model that recomputes logprobs itself, with the recorded experts and kept
            sets, and without them; needs the extra `train`.
        model_version: Policy version of its weights; calls of others are not compared.
        tolerance: Maximum mean logprob difference of a turn, in nats.
        tokenizer: Path of tokenizer.json, if there is none beside the recording.
        salvage: Check the part of a damaged file before the damage.
    """
    if engine and model:
        raise UsageError("give --engine or --model, not both: a turn has one column of differences")
    texts = TextVerifier(tokenizer)
    add_model_check = _load_model(model, model_version, tolerance) if model else None
    reports = []
    async with AsyncExitStack() as stack:
        paths = stack.enter_context(remote.find_recordings(session))
        scorer = await stack.enter_async_context(connect_scorer(engine)) if engine else None
        for path in track(paths, "verifying", "recordings"):
            reports.append(
                await _verify_one(path, scorer, add_model_check, tolerance, texts, salvage=salvage)
            )
            if not as_json:
                _show(reports[-1])
    summary = summarize(reports)
    report = {"sessions": reports, "summary": summary}
    failed = summary.failed > 0
    print_report(report, lambda: _show_summary(summary), as_json=as_json, failed=failed)


async def _verify_one(
    path: Path,
    scorer: Scorer | None,
    add_model_check: Callable[[SessionReport, Recording], None] | None,
    tolerance: float,
    texts: TextVerifier,
    *,
    salvage: bool,
) -> SessionReport:
    try:
        recording = read(path, salvage=salvage)
    except CaptureError as error:
        return SessionReport(session=path.stem, recording=str(path), error=str(error))
    report = verify_session(path, recording, texts)
    if scorer is not None:
        await verify_logprobs(report, recording, scorer, tolerance)
    if add_model_check is not None:
        add_model_check(report, recording)
    return report


def _load_model(
    folder: Path, version: int | None, tolerance: float
) -> Callable[[SessionReport, Recording], None]:
    """Return a function that adds the check ``model`` to a report. Raises `UsageError`."""
    recompute = import_extra("tugline.trainers.recompute", "train", "verifying with --model")
    recomputer = recompute.Recomputer(folder)
    return partial(
        recompute.verify_with_model, recomputer=recomputer, tolerance=tolerance, version=version
    )


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
