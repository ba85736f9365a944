"""Traces and tokens to compute that each builder makes from recorded sessions of real harnesses.

The sessions are those that ``tugline harness check --all`` records, or any folder of recordings. A
trainer forwards every token of every trace with a trained token; with tree packing it forwards
shared prefixes once. The trained tokens are the same with each builder. `docs/benchmarks.md`
explains each figure.

    python benchmarks/builders/run.py [--json] [--sessions FOLDER]
    python benchmarks/builders/run.py [--json] --train [--scale S] [--model FOLDER]
"""

# ruff: noqa: INP001 - a program, not a package
from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from canonical import Canonical
from rich.console import Console
from rich.table import Table

from tugline.errors import TuglineError, UsageError
from tugline.plugins import find
from tugline.recording import file as recordings
from tugline.recording.folder import list_recordings
from tugline.types import (
    Branch,
    Call,
    Finish,
    Reason,
    Sampling,
    Timings,
    Trace,
    VersionSpan,
    shared_prefix,
)

BUILDERS = ("per_request", "prefix_merging")
FORWARDED = (*BUILDERS, "packed")
"""``packed`` is `prefix_merging` with tree packing."""
CHECKED = "check"
"""The task of ``tugline harness check``; its stages are the folders above ``recordings``."""
STAGES = ("plain", "team", "title")
"""Stages whose traces differ between builders; the others end early or repeat these."""
LONG = {"turns": 40, "base": 8000, "sampled": 300, "added": 300}
"""The synthetic session: turns, tokens of the first prompt, and tokens per turn."""
WIDTH = 132
"""Minimum width of the table; a narrower terminal wraps its lines."""


@dataclass(frozen=True)
class Recorded:
    """The calls of one session, and where they come from."""

    session: str
    task: str
    harness: str
    stage: str
    calls: tuple[Call, ...]


@dataclass
class Row:
    """Sums over the sessions of one harness, dialect and stage."""

    harness: str
    dialect: str
    stage: str
    sessions: int = 0
    calls: int = 0
    turns: int = 0
    """Calls that continue a conversation, exactly or not."""
    exact_turns: int = 0
    echo_changed_turns: int = 0
    """Exact turns in which the harness changed the echo of an answer."""
    traces: dict[str, int] = field(default_factory=lambda: dict.fromkeys(BUILDERS, 0))
    forwarded: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FORWARDED, 0))
    sampled: int = 0
    trained: int = 0
    canonical_dropped: int = 0
    """Sampled tokens that the published rule leaves out."""
    canonical_false: int = 0
    """Tokens that it trains in another context than that of their sampling."""

    def add(self, session: Recorded) -> None:
        """Count a session. Raises `UsageError` if builders train different numbers of tokens."""
        self.sessions += 1
        self.calls += len(session.calls)
        turns = [
            c for c in session.calls if c.parent is not None and c.branch is not Branch.NEW_THREAD
        ]
        self.turns += len(turns)
        self.exact_turns += sum(turn.branch is None for turn in turns)
        self.echo_changed_turns += sum(
            turn.branch is None and bool(turn.echo_changes) for turn in turns
        )
        trained = set()
        for builder in BUILDERS:
            traces, ledger, _ = find("builder", builder)().build(session.calls)
            forwarded = select_forwarded(traces)
            self.traces[builder] += len(traces)
            self.forwarded[builder] += sum(len(trace.ids) for trace in forwarded)
            if builder == "prefix_merging":
                self.forwarded["packed"] += count_packed(forwarded)
            trained.add(ledger.trained)
        if len(trained) > 1:
            msg = f"session {session.session}: builders differ in trained tokens: {sorted(trained)}"
            raise UsageError(msg)
        self.sampled += ledger.sampled
        self.trained += trained.pop()
        self._canonical(session.calls)

    def _canonical(self, calls: Sequence[Call]) -> None:
        traces, ledger, _ = Canonical().build(calls)
        by_number = {call.number: call for call in calls}
        self.canonical_dropped += ledger.dropped.get(Reason.UNMERGED, 0)
        for trace in traces:
            for span in trace.spans:
                call = by_number[span.call]
                context = np.concatenate([call.prompt_ids, call.sampled_ids])[: span.end]
                if span.masked is None and not np.array_equal(trace.ids[: span.end], context):
                    self.canonical_false += span.end - span.start


@dataclass
class Group:
    """Tokens of one task's samples, each packed alone and all packed together."""

    task: str
    sessions: int
    prefix_merging: int
    """Tokens that a trainer forwards without packing."""
    tree: int
    """The same with one tree for each session."""
    forest: int
    """The same with one tree for all of them."""


def select_forwarded(traces: Iterable[Trace]) -> list[Trace]:
    """Return the traces with a trained token; a trainer forwards only these."""
    return [trace for trace in traces if trace.mask.any()]


def count_packed(traces: Iterable[Trace]) -> int:
    """Count the tokens of one forward pass with tree packing: shared prefixes count once.

    Prefixes are compared by ids alone, as in the trainer; each trace keeps its own loss terms.
    """
    count, last = 0, np.empty(0, np.int32)
    for ids in sorted((trace.ids for trace in traces), key=lambda ids: ids.astype(">i4").tobytes()):
        count += len(ids) - shared_prefix(last, ids)
        last = ids
    return count


# --------------------------------------------------------------------------- sessions
def read_sessions(folder: Path) -> list[Recorded]:
    """Read the sessions below `folder` with calls; of harness checks, only those of `STAGES`."""
    sessions = []
    for path in list_recordings(folder):
        recording = recordings.read(path)
        if recording.header is None or not recording.calls:
            continue
        header, stage = recording.header, path.parent.parent.name
        checked = header.task.id == CHECKED
        if checked and stage not in STAGES:
            continue
        harness = header.task.harness.name
        sessions.append(
            Recorded(
                header.session.id,
                header.task.id,
                harness,
                stage if checked else "",
                tuple(recording.calls),
            )
        )
    if not sessions:
        msg = f"no session below {folder} made a call; record some with tugline harness check"
        raise UsageError(msg)
    return sessions


def record(folder: Path) -> None:
    """Run every harness against a scripted model and keep its sessions in `folder`."""
    command = [str(Path(sys.executable).with_name("tugline")), "harness", "check", "--all"]
    done = subprocess.run([*command, "--keep", str(folder)], stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        note("some checks failed, see `tugline harness check --all`; counting what was recorded")


def make_synthetic(turns: int, base: int, sampled: int, added: int) -> Recorded:
    """Make a session of one exact conversation, with lengths of real tasks."""
    rng = np.random.default_rng(0)
    ids = rng.integers(1, 150_000, base + turns * (sampled + added)).astype(np.int32)
    ids[base + sampled - 1 :: sampled + added] = 0  # every answer ends with an end-of-turn id
    calls = []
    for number in range(turns):
        prompt_length = base + number * (sampled + added)
        calls.append(
            Call(
                session="synthetic",
                number=number,
                parent=number - 1 if number else None,
                dialect=f"{turns} turns",
                messages=(),
                sampling=Sampling(),
                prompt_ids=ids[:prompt_length],
                sampled_ids=ids[prompt_length : prompt_length + sampled],
                logprobs=np.full(sampled, -0.5, np.float32),
                versions=(VersionSpan(0, 0, sampled),),
                finish=Finish.STOP,
                engine="none",
                timings=Timings(0.0),
            )
        )
    return Recorded("synthetic", "synthetic", "(synthetic)", "", tuple(calls))


# --------------------------------------------------------------------------- figures
def make_rows(sessions: Iterable[Recorded]) -> list[Row]:
    """Make a row for each harness, dialect and stage."""
    rows: dict[tuple[str, str, str], Row] = {}
    for session in sessions:
        key = (session.harness, session.calls[0].dialect, session.stage)
        rows.setdefault(key, Row(*key)).add(session)
    return [rows[key] for key in sorted(rows)]


def make_groups(sessions: Iterable[Recorded]) -> list[Group]:
    """Make a group for each task with several sessions."""
    tasks: dict[str, dict[str, list[Trace]]] = defaultdict(dict)
    for session in sessions:
        if session.task != CHECKED:
            traces = find("builder", "prefix_merging")().build(session.calls).traces
            tasks[session.task][session.session] = select_forwarded(traces)
    return [_group(task, tasks[task]) for task in sorted(tasks) if len(tasks[task]) > 1]


def _group(task: str, members: Mapping[str, Sequence[Trace]]) -> Group:
    return Group(
        task=task,
        sessions=len(members),
        prefix_merging=sum(len(trace.ids) for traces in members.values() for trace in traces),
        tree=sum(count_packed(traces) for traces in members.values()),
        forest=count_packed(trace for traces in members.values() for trace in traces),
    )


# --------------------------------------------------------------------------- output
def note(text: str) -> None:
    """Print a line of progress."""
    sys.stderr.write(f"{text}\n")


def show(rows: Sequence[Row], groups: Sequence[Group]) -> None:
    """Print both tables."""
    screen = Console()
    console = Console(width=max(screen.width, WIDTH))
    table = Table(box=None, padding=(0, 1), title="per_request / prefix_merging / packed")
    for name in ("harness", "dialect", "stage"):
        table.add_column(name, no_wrap=True)
    for name in ("calls", "exact", "echo_changes", "traces", "forwarded", "ratio", "trained"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("canonical\ndropped+false", justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            *(row.harness, row.dialect, row.stage, str(row.calls)),
            *(f"{row.exact_turns}/{row.turns}", f"{row.echo_changed_turns}/{row.turns}"),
            " ".join(str(row.traces[builder]) for builder in BUILDERS),
            " ".join(f"{row.forwarded[key]:,}" for key in FORWARDED),
            f"{ratio(row):.2f}",
            f"{row.trained:,}",
            f"{row.canonical_dropped:,}+{row.canonical_false:,}",
        )
    console.print(table)
    if groups:
        console.print(_make_group_table(groups))


def ratio(row: Row) -> float:
    """Tokens forwarded by `per_request` for each one forwarded by `prefix_merging`."""
    merged = row.forwarded["prefix_merging"]
    return row.forwarded["per_request"] / merged if merged else 1.0


def _make_group_table(groups: Sequence[Group]) -> Table:
    table = Table(box=None, padding=(0, 1), title="tokens forwarded for all samples of a task")
    table.add_column("task")
    for name in ("sessions", "prefix_merging", "tree each", "one tree", "ratio"):
        table.add_column(name, justify="right")
    for group in groups:
        times = f"{group.prefix_merging / group.forest:.2f}" if group.forest else "-"
        numbers = (group.sessions, group.prefix_merging, group.tree, group.forest)
        table.add_row(group.task, *(f"{number:,}" for number in numbers), times)
    return table


def show_training(scale: float, folder: Path | None, *, as_json: bool) -> None:
    """Train one step with each builder, and print its figures."""
    from step_cost import device, train  # noqa: PLC0415 - brings torch, which counting does not need

    rows = train(scale, folder)
    if as_json:
        sys.stdout.write(json.dumps({"scale": scale, "device": device(), "rows": rows}) + "\n")
        return
    table = Table(*rows[0], box=None, padding=(0, 1))
    for row in rows:
        table.add_row(
            *(f"{value:,}" if isinstance(value, int) else str(value) for value in row.values())
        )
    Console(width=WIDTH).print(table)


def main() -> None:
    """Parse options, count, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--sessions", type=Path, help="folder with recorded sessions")
    parser.add_argument("--train", action="store_true", help="train on synthetic sessions instead")
    parser.add_argument("--scale", type=float, default=0.1, help="share of their tokens (--train)")
    parser.add_argument("--model", type=Path, help="folder of the model to train (--train)")
    options = parser.parse_args()
    if options.train:
        show_training(options.scale, options.model, as_json=options.json)
        return
    try:
        if options.sessions is not None:
            sessions = read_sessions(options.sessions)
        else:
            with tempfile.TemporaryDirectory() as folder:
                note("recording: every harness against a scripted model, some minutes")
                record(Path(folder) / "sessions")
                sessions = read_sessions(Path(folder) / "sessions")
        rows = [*make_rows(sessions), *make_rows([make_synthetic(**LONG)])]
        groups = make_groups(sessions)
    except TuglineError as error:
        note(f"tugline: {error}")
        sys.exit(2 if isinstance(error, UsageError) else 1)
    if options.json:
        result = {
            "rows": [asdict(row) | {"ratio": round(ratio(row), 3)} for row in rows],
            "groups": [asdict(group) for group in groups],
        }
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        show(rows, groups)


if __name__ == "__main__":
    main()
