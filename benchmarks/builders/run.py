"""What each builder makes of recorded sessions of real harnesses: traces, and tokens to compute.

The sessions are those that ``tugline harness check --all`` records, or any folder of recordings. A
trainer forwards every token of every trace that trains something; with tree packing it forwards
what traces begin with alike once. What is trained is the same with each builder.
`docs/benchmarks.md` says what each figure means.

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
"""The last is `prefix_merging` with tree packing."""
CHECKED = "check"
"""The task of ``tugline harness check``; its stages are the folders above ``recordings``."""
STAGES = ("plain", "team", "title")
"""Those that say something about building; the others end early or repeat themselves."""
LONG = {"turns": 40, "base": 8000, "sampled": 300, "added": 300}
"""The made-up session beside the recorded ones, in tokens a turn."""
WIDTH = 132
"""Columns that the table needs; a narrow terminal breaks lines rather than lose figures."""


@dataclass(frozen=True)
class Recorded:
    """The calls of one session, and whose they are."""

    session: str
    task: str
    harness: str
    stage: str
    calls: tuple[Call, ...]


@dataclass
class Row:
    """One harness, dialect and stage; sums over its sessions."""

    harness: str
    dialect: str
    stage: str
    sessions: int = 0
    calls: int = 0
    turns: int = 0
    """Calls that go on with a conversation, so those that could be exact or not."""
    exact_turns: int = 0
    echo_changed_turns: int = 0
    """Exact ones in which the harness had changed the echo of an answer."""
    traces: dict[str, int] = field(default_factory=lambda: dict.fromkeys(BUILDERS, 0))
    forwarded: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FORWARDED, 0))
    sampled: int = 0
    trained: int = 0
    canonical_dropped: int = 0
    """Sampled tokens that the published rule leaves out."""
    canonical_false: int = 0
    """Tokens that it trains in another context than they were sampled in."""

    def add(self, one: Recorded) -> None:
        """Count a session. Raises `UsageError` if builders disagree on what is trained."""
        self.sessions += 1
        self.calls += len(one.calls)
        turns = [c for c in one.calls if c.parent is not None and c.branch is not Branch.NEW_THREAD]
        self.turns += len(turns)
        self.exact_turns += sum(turn.branch is None for turn in turns)
        self.echo_changed_turns += sum(
            turn.branch is None and bool(turn.echo_changes) for turn in turns
        )
        trained = set()
        for builder in BUILDERS:
            traces, ledger, _ = find("builder", builder)().build(one.calls)
            kept = worth_computing(traces)
            self.traces[builder] += len(traces)
            self.forwarded[builder] += sum(len(trace.ids) for trace in kept)
            if builder == "prefix_merging":
                self.forwarded["packed"] += count_packed(kept)
            trained.add(ledger.trained)
        if len(trained) > 1:
            msg = f"session {one.session}: builders train {sorted(trained)} tokens, not the same"
            raise UsageError(msg)
        self.sampled += ledger.sampled
        self.trained += trained.pop()
        self._canonical(one.calls)

    def _canonical(self, calls: Sequence[Call]) -> None:
        traces, ledger, _ = Canonical().build(calls)
        by_number = {call.number: call for call in calls}
        self.canonical_dropped += ledger.dropped.get(Reason.UNMERGED, 0)
        for trace in traces:
            for span in trace.spans:
                made_by = by_number[span.call]
                given = np.concatenate([made_by.prompt_ids, made_by.sampled_ids])[: span.end]
                if span.masked is None and not np.array_equal(trace.ids[: span.end], given):
                    self.canonical_false += span.end - span.start


@dataclass
class Group:
    """The samples of one task, each packed alone and all packed together."""

    task: str
    sessions: int
    prefix_merging: int
    """Tokens that a trainer forwards."""
    tree: int
    """The same with a tree for each session."""
    forest: int
    """The same with one tree for all of them."""


def worth_computing(traces: Iterable[Trace]) -> list[Trace]:
    """Those that train something, which are all that a trainer computes."""
    return [trace for trace in traces if trace.mask.any()]


def count_packed(traces: Iterable[Trace]) -> int:
    """Tokens of one forward pass with tree packing: ids that several traces begin with count once.

    As the trainer does it, by ids alone: each trace keeps loss terms of its own.
    """
    count, last = 0, np.empty(0, np.int32)
    for ids in sorted((trace.ids for trace in traces), key=lambda ids: ids.astype(">i4").tobytes()):
        count += len(ids) - shared_prefix(last, ids)
        last = ids
    return count


# --------------------------------------------------------------------------- sessions
def recorded(folder: Path) -> list[Recorded]:
    """Every session below `folder` that made calls and says something about building."""
    found = []
    for path in list_recordings(folder):
        recording = recordings.read(path)
        if recording.header is None or not recording.calls:
            continue
        header, stage = recording.header, path.parent.parent.name
        checked = header.task.id == CHECKED
        if checked and stage not in STAGES:
            continue
        harness = header.task.harness.name
        found.append(
            Recorded(
                header.session.id,
                header.task.id,
                harness,
                stage if checked else "",
                tuple(recording.calls),
            )
        )
    if not found:
        msg = f"no session below {folder} made a call; record some with tugline harness check"
        raise UsageError(msg)
    return found


def record(folder: Path) -> None:
    """Run every harness against a scripted model and keep its sessions in `folder`."""
    command = [str(Path(sys.executable).with_name("tugline")), "harness", "check", "--all"]
    done = subprocess.run([*command, "--keep", str(folder)], stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        note("some checks failed, see `tugline harness check --all`; counting what was recorded")


def made_up(turns: int, base: int, sampled: int, added: int) -> Recorded:
    """A session of one exact conversation, as long as those of real tasks."""
    rng = np.random.default_rng(0)
    held = rng.integers(1, 150_000, base + turns * (sampled + added)).astype(np.int32)
    held[base + sampled - 1 :: sampled + added] = 0  # every answer ends with an end-of-turn id
    calls = []
    for number in range(turns):
        prompt_length = base + number * (sampled + added)
        calls.append(
            Call(
                session="made-up",
                number=number,
                parent=number - 1 if number else None,
                dialect=f"{turns} turns",
                messages=(),
                sampling=Sampling(),
                prompt_ids=held[:prompt_length],
                sampled_ids=held[prompt_length : prompt_length + sampled],
                logprobs=np.full(sampled, -0.5, np.float32),
                versions=(VersionSpan(0, 0, sampled),),
                finish=Finish.STOP,
                engine="none",
                timings=Timings(0.0),
            )
        )
    return Recorded("made-up", "made-up", "(made up)", "", tuple(calls))


# --------------------------------------------------------------------------- figures
def rows_of(sessions: Iterable[Recorded]) -> list[Row]:
    """A row per harness, dialect and stage."""
    rows: dict[tuple[str, str, str], Row] = {}
    for one in sessions:
        key = (one.harness, one.calls[0].dialect, one.stage)
        rows.setdefault(key, Row(*key)).add(one)
    return [rows[key] for key in sorted(rows)]


def groups_of(sessions: Iterable[Recorded]) -> list[Group]:
    """Each task that was attempted several times."""
    tasks: dict[str, dict[str, list[Trace]]] = defaultdict(dict)
    for one in sessions:
        if one.task != CHECKED:
            traces = find("builder", "prefix_merging")().build(one.calls).traces
            tasks[one.task][one.session] = worth_computing(traces)
    return [_group(task, tasks[task]) for task in sorted(tasks) if len(tasks[task]) > 1]


def _group(task: str, members: Mapping[str, Sequence[Trace]]) -> Group:
    return Group(
        task=task,
        sessions=len(members),
        prefix_merging=sum(len(trace.ids) for traces in members.values() for trace in traces),
        tree=sum(count_packed(traces) for traces in members.values()),
        forest=count_packed(trace for traces in members.values() for trace in traces),
    )


# --------------------------------------------------------------------------- telling
def note(text: str) -> None:
    """A line of progress."""
    sys.stderr.write(f"{text}\n")


def show(rows: Sequence[Row], groups: Sequence[Group]) -> None:
    """Both tables."""
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
        console.print(_forests(groups))


def ratio(row: Row) -> float:
    """How many times as much `per_request` computes as `prefix_merging`."""
    merged = row.forwarded["prefix_merging"]
    return row.forwarded["per_request"] / merged if merged else 1.0


def _forests(groups: Sequence[Group]) -> Table:
    table = Table(box=None, padding=(0, 1), title="tokens forwarded for all samples of a task")
    table.add_column("task")
    for name in ("sessions", "prefix_merging", "tree each", "one tree", "ratio"):
        table.add_column(name, justify="right")
    for one in groups:
        times = f"{one.prefix_merging / one.forest:.2f}" if one.forest else "-"
        numbers = (one.sessions, one.prefix_merging, one.tree, one.forest)
        table.add_row(one.task, *(f"{number:,}" for number in numbers), times)
    return table


def show_training(scale: float, folder: Path | None, *, as_json: bool) -> None:
    """One step of training with each builder."""
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
    """Parse options, count, and tell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--sessions", type=Path, help="folder with recorded sessions")
    parser.add_argument("--train", action="store_true", help="train on made-up sessions instead")
    parser.add_argument("--scale", type=float, default=0.1, help="of their tokens (--train)")
    parser.add_argument("--model", type=Path, help="folder of the model to train (--train)")
    options = parser.parse_args()
    if options.train:
        show_training(options.scale, options.model, as_json=options.json)
        return
    try:
        if options.sessions is not None:
            sessions = recorded(options.sessions)
        else:
            with tempfile.TemporaryDirectory() as folder:
                note("recording: every harness against a scripted model, some minutes")
                record(Path(folder) / "sessions")
                sessions = recorded(Path(folder) / "sessions")
        rows = [*rows_of(sessions), *rows_of([made_up(**LONG)])]
        groups = groups_of(sessions)
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
