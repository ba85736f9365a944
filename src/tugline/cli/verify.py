"""``tugline verify``: whether what was recorded may be trained on, turn by turn.

Exit code 0 if every check that could be made passed, 1 if one failed or a recording cannot be read.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Column, Table

from tugline.errors import CaptureError
from tugline.recording import file as recordings
from tugline.recording.folder import list_recordings, locate
from tugline.recording.verify.findings import Seam, SessionReport, Total, Verdict, total
from tugline.recording.verify.scoring import Scorer, scorer_at
from tugline.recording.verify.sessions import TOLERANCE, judge, judge_logprobs
from tugline.recording.verify.texts import Texts

_SEAMS = {
    Seam.EXACT: "green",
    Seam.HEALED: "cyan",
    Seam.FORKED: "yellow",
    Seam.BROKEN: "red",
    Seam.UNTOLD: "yellow",
}
_VERDICTS = {Verdict.PASS: "green", Verdict.FAIL: "red", Verdict.UNCHECKED: "yellow"}
_MANY = 20
"""Sessions from which on progress is shown."""


def verify(
    session: Annotated[
        str, typer.Argument(help="A recording file, a folder of them, or the id of a session.")
    ],
    *,
    engine: Annotated[
        str | None, typer.Option(help="Recompute logprobs on this one, as http://127.0.0.1:8000.")
    ] = None,
    tolerance: Annotated[
        float, typer.Option(help="Mean logprob difference of a turn that passes, in nats.")
    ] = TOLERANCE,
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer.json, where none is kept beside the recording.")
    ] = None,
    salvage: Annotated[
        bool, typer.Option("--salvage", help="Judge what comes before the damage of a broken file.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check recorded ids, texts, lineage, ledgers and logprobs."""
    where = Path(session)
    found = list_recordings(where) if where.is_dir() else [locate(session)]
    judged = asyncio.run(
        _all(found, engine, tolerance, Texts(tokenizer), salvage=salvage, show=not as_json)
    )
    sums = total(judged)
    if as_json:
        typer.echo(msgspec.json.encode({"sessions": judged, "sum": sums}))
    else:
        _show_sum(sums)
    if sums.failed:
        raise typer.Exit(1)


async def _all(
    found: list[Path],
    url: str | None,
    tolerance: float,
    texts: Texts,
    *,
    salvage: bool,
    show: bool,
) -> list[SessionReport]:
    judged = []
    async with AsyncExitStack() as stack:
        scorer = await stack.enter_async_context(scorer_at(url)) if url else None
        quiet, console = len(found) < _MANY, Console(stderr=True)
        for path in track(found, "verifying", console=console, transient=True, disable=quiet):
            judged.append(await _one(path, scorer, tolerance, texts, salvage=salvage))
            if show:
                _show(judged[-1])
    return judged


async def _one(
    path: Path, scorer: Scorer | None, tolerance: float, texts: Texts, *, salvage: bool
) -> SessionReport:
    try:
        recording = recordings.read(path, salvage=salvage, bodies=False)
    except CaptureError as error:
        return SessionReport(session=path.stem, recording=str(path), error=str(error))
    judged = judge(path, recording, texts)
    if scorer is not None:
        await judge_logprobs(judged, recording, scorer, tolerance)
    return judged


# --------------------------------------------------------------------------- on the terminal
def _show(judged: SessionReport) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]{escape(judged.session)}[/] {escape(judged.recording)}")
    if judged.error is not None:
        console.print(judged.error, style="red", markup=False)
        return
    console.print(_table(judged))
    for name, check in judged.checks.items():
        detail = f": {check.detail}" if check.detail else ""
        style = _VERDICTS[check.verdict]
        console.print(f"  {check.verdict} {name}{detail}", style=style, markup=False)
    for line in [f"turn {turn.call}: {one}" for turn in judged.turns for one in turn.faults[1:]]:
        console.print(f"  also {line}", style="red", markup=False)
    for note in judged.notes:
        console.print(f"  note: {note}", markup=False)


def _table(judged: SessionReport) -> Table:
    """A line per call; the KL is the less noisy of the two estimates."""
    names = ["prompt", "shared", "sampled"]
    if any(turn.scored for turn in judged.turns):
        names += ["max", "mean", "KL"]
    table = Table("call", "status", Column("why", overflow="fold"), box=None)
    for name in names:
        table.add_column(name, justify="right", min_width=7)
    for turn in judged.turns:
        row = [str(turn.call), f"[{_SEAMS[turn.status]}]{turn.status}[/]", turn.why]
        row += [str(count) for count in (turn.prompt, turn.shared, turn.sampled)]
        values = (turn.max_dlogprob, turn.mean_dlogprob, turn.kl3)
        row += ["" if value is None else f"{value:.1e}" for value in values]
        table.add_row(*row[: 3 + len(names)], style="" if not turn.faults else "red")
    return table


def _show_sum(sums: Total) -> None:
    console = Console(highlight=False, soft_wrap=True)
    seams = ", ".join(f"{count} {name}" for name, count in sums.turns.items() if count)
    checks = ", ".join(f"{count} {name}" for name, count in sums.checks.items() if count)
    colour = "red" if sums.failed else "green"
    console.print(
        f"[{colour}]sessions: {sums.sessions}, {sums.failed} failed[/]; "
        f"turns: {seams or 'none'}; checks: {checks or 'none'}"
    )
