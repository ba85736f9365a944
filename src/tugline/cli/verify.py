"""``tugline verify``: check recorded sessions, turn by turn.

Exit code 0 if every check that could be made passed, 1 if one failed or a recording cannot be read.
"""

import sys
from contextlib import AsyncExitStack
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Column, Table

from tugline.cli.options import DEFAULT_SERVER, Json, Remote, print_report
from tugline.errors import CaptureError
from tugline.recording.file import read
from tugline.recording.verify.engine import Scorer, connect_scorer
from tugline.recording.verify.session import (
    TOLERANCE,
    SessionReport,
    VerifySummary,
    VerifyVerdict,
    summarize,
    verify_logprobs,
    verify_session,
)
from tugline.recording.verify.text import TextVerifier
from tugline.recording.view.terminal import CONTINUATION_STYLES

_VERDICTS = {
    VerifyVerdict.PASS: "green",
    VerifyVerdict.FAIL: "red",
    VerifyVerdict.UNCHECKED: "yellow",
}
_MANY = 20
"""Sessions from which on progress is shown."""


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
        engine: Recompute logprobs on this one, as http://127.0.0.1:8000.
        tolerance: Mean logprob difference of a turn that passes, in nats.
        tokenizer: tokenizer.json, where none is kept beside the recording.
        salvage: Judge what comes before the damage of a broken file.
    """
    texts, reports = TextVerifier(tokenizer), []
    async with AsyncExitStack() as stack:
        paths = stack.enter_context(remote.find_recordings(session))
        scorer = await stack.enter_async_context(connect_scorer(engine)) if engine else None
        quiet, console = len(paths) < _MANY, Console(stderr=True)
        for path in track(paths, "verifying", console=console, transient=True, disable=quiet):
            reports.append(await _verify_one(path, scorer, tolerance, texts, salvage=salvage))
            if not as_json:
                _show(reports[-1])
    summary = summarize(reports)
    report = {"sessions": reports, "summary": summary}
    print_report(report, lambda: _show_summary(summary), as_json=as_json)
    if summary.failed:
        sys.exit(1)


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
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]{escape(report.session)}[/] {escape(report.recording)}")
    if report.error is not None:
        console.print(report.error, style="red", markup=False)
        return
    console.print(_make_table(report))
    for name, check in report.checks.items():
        detail = f": {check.detail}" if check.detail else ""
        style = _VERDICTS[check.verdict]
        console.print(f"  {check.verdict} {name}{detail}", style=style, markup=False)
    for line in [f"turn {turn.call}: {one}" for turn in report.turns for one in turn.faults[1:]]:
        console.print(f"  also {line}", style="red", markup=False)
    for note in report.notes:
        console.print(f"  note: {note}", markup=False)


def _make_table(report: SessionReport) -> Table:
    """Make a table with a line per call."""
    names = ["prompt", "shared", "sampled"]
    if any(turn.scored for turn in report.turns):
        names += ["max", "mean", "KL"]
    table = Table("call", "continuation", Column("detail", overflow="fold"), box=None)
    for name in names:
        table.add_column(name, justify="right", min_width=7)
    for turn in report.turns:
        style = CONTINUATION_STYLES[turn.continuation]
        row = [str(turn.call), f"[{style}]{turn.continuation}[/]", turn.detail]
        row += [str(count) for count in (turn.prompt, turn.shared, turn.sampled)]
        values = (turn.max_dlogprob, turn.mean_dlogprob, turn.kl)
        row += ["" if value is None else f"{value:.1e}" for value in values]
        table.add_row(*row[: 3 + len(names)], style="" if not turn.faults else "red")
    return table


def _show_summary(summary: VerifySummary) -> None:
    turns = ", ".join(f"{count} {name}" for name, count in summary.turns.items() if count)
    checks = ", ".join(f"{count} {name}" for name, count in summary.checks.items() if count)
    colour = "red" if summary.failed else "green"
    Console(highlight=False, soft_wrap=True).print(
        f"[{colour}]sessions: {summary.sessions}, {summary.failed} failed[/]; "
        f"turns: {turns or 'none'}; checks: {checks or 'none'}"
    )
