"""``tugline replay``: rerun the harness of a recorded session; optionally fork live from a call.

The exit code is 0 if every request was as recorded, else 1; also 1 if a fork could not run.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tugline import log
from tugline.cli.options import DEFAULT_SERVER, Count, Json, Remote, make_new_folder
from tugline.cli.output import print_report, print_text, show_progress
from tugline.errors import UsageError
from tugline.gateway.probe import connect
from tugline.recording.folder import RUNS
from tugline.replay.matching import Difference
from tugline.replay.run import Options, RecordedSession, ReplayReport, check_fork, fork
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
    """Rerun the harness of a recorded session on the recorded responses.

    Args:
        session: A recording file, or the id of a session.
        fork_at: Number of the first live call; 'last': fork after the last call.
        engine: Engine for live calls, such as http://127.0.0.1:8000.
        samples: Number of live sessions.
        slots: Number of concurrent live sessions.
        go_on: Continue after a request that differs.
        mask: Regular expression for text that may differ; repeatable.
        harness_version: Version of the harness to run instead.
        tokenizer: Path of tokenizer.json, if there is none beside the recording.
        keep: Keep the run in this new folder (default for a fork: a folder in runs/).
    """
    log.configure(level="error")
    with remote.find_recording(session) as path:
        recorded = RecordedSession.load(path, tokenizer)
    name = recorded.header.task.harness.name
    progress = show_progress(f"running {name}", "sessions", samples)
    options = Options(
        go_on=go_on,
        masks=tuple(mask or ()),
        harness_version=harness_version,
        on_session=progress.advance,
    )
    live = None
    if fork_at is not None or engine is not None or samples > 1:
        live = _make_live(recorded, fork_at, engine, samples, slots)
        keep = keep or _choose_folder(f"{recorded.header.session.id}-at{live.at}")
    if keep is not None:
        make_new_folder(keep)
    with tempfile.TemporaryDirectory(prefix="tugline-replay-") as scratch, progress:
        folder = keep or Path(scratch)
        if live is None:
            reports = [asyncio.run(run_replay(recorded, folder, options))]
        else:
            reports = asyncio.run(fork(recorded, folder, live, options))
    if keep is None:  # the folder was temporary
        reports = [msgspec.structs.replace(report, recording="") for report in reports]
    failed = not all(report.as_recorded for report in reports)
    print_report({"sessions": reports}, lambda: _show(reports), as_json=as_json, failed=failed)


def _make_live(
    recorded: RecordedSession, at: str | None, engine: str | None, samples: int, slots: int
) -> Live:
    """Create the fork from the options. Raises `UsageError`."""
    if at is None or engine is None:
        raise UsageError("--fork-at and --engine require each other, --samples requires both")
    if at != _LAST and not at.isdecimal():
        raise UsageError(f"--fork-at is {at!r}, must be the number of a call or 'last'")
    number = len(recorded.calls) if at == _LAST else int(at)
    check_fork(recorded, number)  # before a folder is created
    source = asyncio.run(connect([engine], mode=recorded.header.mode))
    earlier = RUNS.rglob(f"{recorded.header.session.id}-at{number}-*.rec")
    return Live(source, number, samples, slots, first=len(list(earlier)))


def _choose_folder(name: str) -> Path:
    taken = len(list(RUNS.glob(f"{name}*")))
    return RUNS / (f"{name}-{taken + 1}" if taken else name)


# --------------------------------------------------------------------------- output
def _show(reports: Sequence[ReplayReport]) -> None:
    for report in reports:
        program = " ".join(filter(None, (report.harness, report.version)))
        done = f"{report.replayed} of {report.recorded} requests"
        live = f", then {report.live} live" if report.live else ""
        state = "as recorded" if report.as_recorded else "answered"
        differ = f", {count} differ" if (count := len(report.differences)) else ""
        print_text(f"{report.session} by {program}: {done} {state}{live}{differ}")
        for difference in report.differences:
            _show_difference(difference)
        if report.exact is not None and report.replayed:
            print_text(f"  prompts with the recorded ids: {report.exact} of {report.replayed}")
        if report.adapted:
            print_text(
                f"  answers adapted to this run's values: {report.adapted} of {report.replayed}"
            )
        for name, values in report.masked.items():
            old, new = next(iter(values.items()))
            print_text(f"  masked {name}: {len(values)} differ, such as {old} -> {new}")
        if report.failure is not None and not report.differences:
            print_text(f"  {report.status}: {report.failure.boundary}: {report.failure.message}")
        rewards = [f"{r.value:g}" if r else "none" for r in (report.recorded_reward, report.reward)]
        print_text(f"  reward: recorded {rewards[0]}, now {rewards[1]}")
        if report.recording:
            print_text(f"  {report.recording}")


def _show_difference(difference: Difference) -> None:
    beside = "" if difference.call is None else f", compared with call {difference.call}"
    print_text(f"request {difference.request}{beside}: {difference.where}", style="yellow")
    for line in difference.recorded.splitlines():
        print_text(f"  - {line}", style="red")
    for line in difference.replayed.splitlines():
        print_text(f"  + {line}", style="green")
    if difference.id_at is not None:
        print_text(f"  prompt ids differ from position {difference.id_at} on")
