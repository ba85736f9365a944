"""``tugline replay``: run the harness of a recorded session again, and continue live from any call.

Exit code 0 if every request was as recorded, 1 if one was not or a fork could not be run.
"""

import asyncio
import sys
import tempfile
from pathlib import Path

import msgspec
from rich.console import Console

from tugline import log
from tugline.cli.options import DEFAULT_SERVER, Count, Json, Remote, make_new_folder, print_json
from tugline.errors import UsageError
from tugline.gateway.probe import connect
from tugline.recording.folder import RUNS
from tugline.replay.matching import Difference
from tugline.replay.run import Options, RecordedSession, ReplayReport, fork
from tugline.replay.run import replay as run_replay
from tugline.replay.source import Live

_LAST = "last"


def replay(
    session: str,
    /,
    *,
    fork_at: str | None = None,
    engine: str | None = None,
    samples: Count = 1,
    slots: Count = 1,
    go_on: bool = False,
    mask: list[str] | None = None,
    harness_version: str | None = None,
    tokenizer: Path | None = None,
    keep: Path | None = None,
    remote: Remote = DEFAULT_SERVER,
    as_json: Json = False,
) -> None:
    """Run the harness of a recorded session again on the recorded answers.

    Args:
        session: A recording file, or the id of a session.
        fork_at: Go live from this call on; 'last' is after the last one.
        engine: Engine that answers then, such as http://127.0.0.1:8000.
        samples: Sessions that go live from there.
        slots: How many of them run at a time.
        go_on: Answer a request that differs, too.
        mask: Regular expression of what may differ; repeatable.
        harness_version: Run this version of the harness instead.
        tokenizer: tokenizer.json, if there is none beside the recording.
        keep: Keep the run in this new folder; a fork is always kept, below runs/.
    """
    log.configure(level="error")
    with remote.find_recording(session) as path:
        recorded = RecordedSession.load(path, tokenizer)
    options = Options(go_on=go_on, masks=tuple(mask or ()), harness_version=harness_version)
    live = _make_live(recorded, fork_at, engine, (samples, slots))
    keep = _make_folder(keep, recorded, live)
    with (
        tempfile.TemporaryDirectory(prefix="tugline-replay-") as scratch,
        Console(stderr=True).status(f"running {recorded.header.task.harness.name}"),
    ):
        folder = keep or Path(scratch)
        if live is None:
            reports = [asyncio.run(run_replay(recorded, folder, options))]
        else:
            reports = asyncio.run(fork(recorded, folder, live, options))
    if keep is None:  # the folder was temporary
        reports = [msgspec.structs.replace(report, recording="") for report in reports]
    if as_json:
        print_json({"sessions": reports})
    else:
        for report in reports:
            _show(report)
    if not all(report.as_recorded for report in reports):
        sys.exit(1)


def _make_live(
    recorded: RecordedSession, at: str | None, engine: str | None, many: tuple[int, int]
) -> Live | None:
    """Make the fork that the options name; None for a plain replay."""
    if at is None and engine is None and many[0] == 1:
        return None
    if at is None or engine is None:
        raise UsageError("--fork-at and --engine go together, and --samples with them")
    if at != _LAST and not at.isdecimal():
        raise UsageError(f"--fork-at is {at!r}, must be the number of a call or 'last'")
    number = len(recorded.calls) if at == _LAST else int(at)
    source = asyncio.run(connect([engine], mode=recorded.header.mode))
    earlier = RUNS.rglob(f"{recorded.header.session.id}-at{number}-*.rec")
    return Live(source, number, *many, first=len(list(earlier)))


def _make_folder(keep: Path | None, recorded: RecordedSession, live: Live | None) -> Path | None:
    """Create the folder of the run; None if it is not kept."""
    if keep is None and live is not None:
        wanted = f"{recorded.header.session.id}-at{live.at}"
        taken = len(list(RUNS.glob(f"{wanted}*")))
        keep = RUNS / (f"{wanted}-{taken + 1}" if taken else wanted)
    if keep is not None:
        make_new_folder(keep)
    return keep


# --------------------------------------------------------------------------- output
def _show(report: ReplayReport) -> None:
    say = Console(highlight=False, soft_wrap=True, markup=False).print
    program = " ".join(filter(None, (report.harness, report.version)))
    done = f"{report.replayed} of {report.recorded} requests"
    live = f", then {report.live} live" if report.live else ""
    if report.as_recorded:
        say(f"{report.session} by {program}: {done} as recorded{live}")
    else:
        differ = f", {count} differ" if (count := len(report.differences)) else ""
        say(f"{report.session} by {program}: {done} answered{live}{differ}")
    for one in report.differences:
        _show_difference(one)
    if report.exact is not None and report.replayed:
        say(f"  prompts with the recorded ids: {report.exact} of {report.replayed}")
    if report.adapted:
        say(f"  answers adapted to this run's values: {report.adapted} of {report.replayed}")
    for name, values in report.masked.items():
        old, new = next(iter(values.items()))
        say(f"  masked {name}: {len(values)} differ, such as {old} -> {new}")
    if report.failure is not None and not report.differences:
        say(f"  {report.status}: {report.failure.boundary}: {report.failure.message}")
    rewards = [
        f"{one.value:g}" if one else "none" for one in (report.recorded_reward, report.reward)
    ]
    say(f"  reward: recorded {rewards[0]}, now {rewards[1]}")
    if report.recording:
        say(f"  {report.recording}")


def _show_difference(difference: Difference) -> None:
    console = Console(highlight=False, soft_wrap=True)
    say = console.print
    beside = "" if difference.call is None else f", beside call {difference.call}"
    say(f"request {difference.request}{beside}: {difference.where}", markup=False, style="yellow")
    for sign, text, colour in (
        ("-", difference.recorded, "red"),
        ("+", difference.replayed, "green"),
    ):
        for line in text.splitlines():
            say(f"  {sign} {line}", markup=False, style=colour)
    if difference.id_at is not None:
        say(f"  prompt ids differ from position {difference.id_at} on", markup=False)
