"""Export recordings to files: summarize sessions, select some of them, and write these.

A first pass over the recordings keeps a `SessionSummary` of each, a few megabytes for ten thousand;
selection is a pure function of the summaries. The output is deterministic: it does not depend on
the file system, and the file of a task is chosen by a hash of its name and a seed. Files are
written under a partial name and renamed when all are complete.
"""

import contextlib
import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from tugline.datasets.files import choose_share
from tugline.errors import CaptureError, UsageError
from tugline.exports.base import HINTS, Exporter, RowWriter, SessionExport, SkipReason, TraceFilter
from tugline.recording.file import read
from tugline.recording.trajectories import find_superseded
from tugline.traces.base import make_builder
from tugline.trainers.grpo.advantage import group_advantages
from tugline.types import PluginSpec, Status, is_held_out, name_problem

Progress = Callable[[str, int, int], None]
"""Callback with (phase, done, total)."""
WHOLE = "all"
"""Name of the file of an export without a split."""
_MAX_ERRORS = 20
_JSON_LINES = frozenset({".jsonl", ".ndjson", ".json"})


# --------------------------------------------------------------------------- selection
class SessionSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a session that determine its selection."""

    path: Path
    session: str
    task: str
    problem: str
    """Name of what the task asks for, which is the same in every run and step."""
    held_out: bool
    sample: int
    tags: dict[str, str]
    status: Status | None
    """Status of the result; None if there is none yet."""
    reward: float | None
    tokenizer: str
    """Digest of the tokenizer; the model's name if unknown."""
    answers: bytes
    """Digest of all answers of the model."""

    @property
    def sort_key(self) -> tuple[str, int, str, str]:
        """Sort key that keeps samples of a task together."""
        return self.task, self.sample, self.session, str(self.path)


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """Filters of sessions, in the order in which they apply."""

    held_out: bool = False
    """Whether to keep sessions that evaluated a model while it was trained."""
    status: frozenset[Status] = frozenset()
    """Allowed statuses; empty: any, including sessions without a result."""
    tags: dict[str, str] = {}
    min_reward: float | None = None
    dedupe: bool = False
    best_of: int | None = None
    """Number of best sessions to keep of each task; among equal rewards, the first samples."""

    def check(self, session: SessionSummary, *, needs_reward: bool) -> SkipReason | None:
        """Return the reason why this session alone would be skipped; None if there is none.

        `needs_reward` is whether the format requires rewards.
        """
        if session.held_out and not self.held_out:
            return SkipReason.HELD_OUT
        if self.status and session.status not in self.status:
            return SkipReason.STATUS
        if any(session.tags.get(key) != value for key, value in self.tags.items()):
            return SkipReason.TAG
        by_reward = needs_reward or self.min_reward is not None or self.best_of is not None
        if by_reward and session.reward is None:
            return SkipReason.NO_REWARD
        low = self.min_reward is not None and (session.reward or 0.0) < self.min_reward
        return SkipReason.LOW_REWARD if low else None


def summarize(path: Path) -> SessionSummary | None:
    """Summarize a recording; None if it has no header. Raises `CaptureError`."""
    recording = read(path)
    header = recording.header
    result = recording.result
    if header is None:
        return None
    reward = result.reward if result is not None else None
    answers = hashlib.sha256()
    for call in recording.calls:
        answer = call.sampled_ids.tobytes() or msgspec.json.encode(call.answer)
        answers.update(len(answer).to_bytes(8) + answer)
    task = header.task
    return SessionSummary(
        path=path,
        session=header.session.id,
        task=task.id,
        problem=name_problem(task.id, task.tags),
        held_out=is_held_out(task.id, task.tags),
        sample=header.session.sample,
        tags=header.task.tags,
        status=result.status if result is not None else None,
        reward=reward.value if reward is not None and math.isfinite(reward.value) else None,
        tokenizer=header.tokenizer or header.model,
        answers=answers.digest(),
    )


def select(
    sessions: Iterable[SessionSummary], selection: Selection, *, needs_reward: bool
) -> tuple[list[SessionSummary], Counter[SkipReason]]:
    """Return the sessions to export, sorted, and the number of skipped ones by reason."""
    ranked = sorted(sessions, key=lambda each: each.sort_key)
    checked = [(each, selection.check(each, needs_reward=needs_reward)) for each in ranked]
    skipped = Counter(reason for _, reason in checked if reason is not None)
    chosen = [each for each, reason in checked if reason is None]
    if selection.dedupe:
        first = {(each.task, each.answers): each for each in reversed(chosen)}
        skipped[SkipReason.DUPLICATE] = len(chosen) - len(first)
        chosen = list(first.values())
    if selection.best_of is not None:
        tasks: dict[str, list[SessionSummary]] = defaultdict(list)
        for each in sorted(chosen, key=lambda each: (-(each.reward or 0.0), each.sort_key)):
            tasks[each.task].append(each)
        best = [each for ranked in tasks.values() for each in ranked[: selection.best_of]]
        skipped[SkipReason.NOT_BEST] = len(chosen) - len(best)
        chosen = best
    return sorted(chosen, key=lambda each: each.sort_key), +skipped


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """Split of problems into files; all sessions of a problem are in one file, whatever the step.

    A hash of the problem and the seed chooses the file, so adding problems does not move others.
    """

    shares: Mapping[str, float]
    seed: int = 0

    def choose_file(self, problem: str) -> str:
        """Return the file of a problem."""
        return choose_share(self.shares, f"{self.seed}:{problem}", otherwise=list(self.shares)[-1])


# --------------------------------------------------------------------------- writing
class Export(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of an export."""

    exporter: Exporter
    out: Path
    """Output file; with a split, a folder of files."""
    selection: Selection = Selection()
    filter: TraceFilter = TraceFilter()
    builder: PluginSpec | None = None
    """Builder of all sessions; None: each task's own."""
    split: Split | None = None
    force: bool = False


class FileSummary(msgspec.Struct):
    """Counts of one file."""

    path: str
    tasks: int = 0
    sessions: int = 0
    rows: int = 0
    tokens: int = 0
    trained: int = 0
    """Number of trained tokens; for chats, of sampled tokens."""


class ExportSummary(msgspec.Struct):
    """Result of an export."""

    recordings: int
    """Number of recordings."""
    exported: int = 0
    """Number of sessions with a row in a file."""
    left_out: dict[SkipReason, int] = {}
    """Recordings without a row, by reason; ``recordings == exported + sum(left_out)``."""
    rows_left_out: dict[SkipReason, int] = {}
    """Skipped traces or conversations, by reason."""
    files: dict[str, FileSummary] = {}
    """Files by split; a single file is `WHOLE`."""
    errors: list[str] = []
    """Errors of the first damaged recordings."""

    @property
    def hints(self) -> list[str]:
        """Ways to export rows that were left out."""
        return [HINTS[reason] for reason in self.rows_left_out if reason in HINTS]


def run(export: Export, paths: Sequence[Path], on_progress: Progress) -> ExportSummary:
    """Write the files. Raises `UsageError` if one exists, or if nothing is left to write."""
    names = list(export.split.shares) if export.split is not None else []
    suffix = export.exporter.suffix
    targets = {name: export.out / f"{name}{suffix}" for name in names} or {WHOLE: export.out}
    for target in targets.values():
        _check_suffix(export.exporter, target)
        if target.exists() and not export.force:
            raise UsageError(
                f"{target} already exists; choose another --out, or overwrite it with --force"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
    running = _RunningExport(export, targets, len(paths))
    try:
        with contextlib.ExitStack() as files:
            running.write_files(paths, on_progress, files)
        for target in targets.values():
            _partial(target).replace(target)
    finally:
        for target in targets.values():
            _partial(target).unlink(missing_ok=True)
    return running.summary


class _RunningExport:
    """Open files and counts of a running export."""

    def __init__(self, export: Export, targets: Mapping[str, Path], session_count: int) -> None:
        self.export, self.targets = export, targets
        self.writers: dict[str, RowWriter] = {}
        files = {name: FileSummary(str(path)) for name, path in targets.items()}
        self.summary = ExportSummary(session_count, files=files)
        self.skipped: Counter[SkipReason] = Counter()
        self.skipped_rows: Counter[SkipReason] = Counter()
        self.builder = make_builder(export.builder) if export.builder is not None else None

    def write_files(
        self, paths: Sequence[Path], on_progress: Progress, files: contextlib.ExitStack
    ) -> None:
        needs_reward = self.export.exporter.needs_reward
        sessions = self._summarize_all(paths, on_progress)
        chosen, skipped = select(sessions, self.export.selection, needs_reward=needs_reward)
        self.skipped += skipped
        tokenizers = len({session.tokenizer for session in chosen})
        if self.export.exporter.trains and tokenizers > 1:
            msg = (
                f"the sessions have token ids of {tokenizers} tokenizers; export the sessions "
                "of one at a time"
            )
            raise UsageError(msg)
        for name, path in self.targets.items():
            writer = contextlib.closing(_open(self.export.exporter, path))
            self.writers[name] = files.enter_context(writer)
        groups = {task: i for i, task in enumerate(dict.fromkeys(s.task for s in chosen))}
        tasks: dict[str, set[str]] = defaultdict(set)
        for index, (session, advantage) in enumerate(zip(chosen, _advantages(chosen), strict=True)):
            split = self.export.split
            name = WHOLE if split is None else split.choose_file(session.problem)
            if self._write_session(session, name, (index, groups[session.task], advantage)):
                tasks[name].add(session.task)
                self.summary.files[name].tasks = len(tasks[name])
                self.summary.files[name].sessions += 1
                self.summary.exported += 1
            on_progress("writing", index + 1, len(chosen))
        self.summary.left_out = dict(sorted((+self.skipped).items()))
        self.summary.rows_left_out = dict(sorted((+self.skipped_rows).items()))
        if not self.summary.exported:
            reasons = ", ".join(f"{n} {reason}" for reason, n in self.summary.left_out.items())
            first = f" ({self.summary.errors[0]})" if self.summary.errors else ""
            hints = "".join(f"; {hint}" for hint in self.summary.hints)
            msg = (
                f"no sessions to export: of {self.summary.recordings} recordings, "
                f"{reasons}{first}{hints}"
            )
            raise UsageError(msg)

    def _summarize_all(
        self, paths: Sequence[Path], on_progress: Progress
    ) -> Iterator[SessionSummary]:
        superseded = find_superseded(paths)
        self.skipped[SkipReason.SUPERSEDED] += len(superseded)
        for number, path in enumerate(paths, 1):
            try:
                if path in superseded:
                    continue
                if (session := summarize(path)) is not None:
                    yield session
                else:
                    self.skipped[SkipReason.NO_HEADER] += 1
            except CaptureError as error:
                self._count_damaged(error)
            on_progress("reading", number, len(paths))

    def _write_session(
        self, session: SessionSummary, name: str, position: tuple[int, int, float | None]
    ) -> bool:
        """Write the rows of a session; return whether it has any."""
        file = self.summary.files[name]
        rows = 0
        try:
            for row in self.export.exporter.rows(self._load(session, position)):
                if isinstance(row, SkipReason):
                    self.skipped_rows[row] += 1
                    continue
                self.writers[name].write(row.values)
                rows += 1
                file.tokens += row.tokens
                file.trained += row.trained
        except CaptureError as error:  # raised by the builder, before the first row
            self._count_damaged(error)
            return False
        file.rows += rows
        self.skipped[SkipReason.EMPTY] += not rows
        return bool(rows)

    def _load(
        self, session: SessionSummary, position: tuple[int, int, float | None]
    ) -> SessionExport:
        recording = read(session.path)
        header = recording.header
        if header is None:
            raise CaptureError(f"{session.path} was truncated during the export")
        spec = self.export.builder or header.task.builder
        builder = self.builder or make_builder(spec)
        return SessionExport(header, recording, spec.name, builder, self.export.filter, *position)

    def _count_damaged(self, error: CaptureError) -> None:
        self.skipped[SkipReason.DAMAGED] += 1
        if len(self.summary.errors) < _MAX_ERRORS:
            self.summary.errors.append(str(error))


def _check_suffix(exporter: Exporter, path: Path) -> None:
    """Raise `UsageError` if the name of a file says another format than can be written."""
    known = sorted(_JSON_LINES | {exporter.suffix})
    if path.suffix and path.suffix not in known:
        raise UsageError(f"--out {path}: the name must end in {', '.join(known)}")


def _open(exporter: Exporter, path: Path) -> RowWriter:
    """Open a file in the format that its name says, by default the exporter's."""
    if path.suffix in _JSON_LINES:
        return RowWriter(_partial(path))
    return exporter.open(_partial(path))


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


def _advantages(sessions: Sequence[SessionSummary]) -> list[float | None]:
    """Return the advantage of each session within its task; None without a reward."""
    groups: dict[str, list[float]] = defaultdict(list)
    for session in sessions:
        if session.reward is not None:
            groups[session.task].append(session.reward)
    advantages = {task: iter(group_advantages(rewards)) for task, rewards in groups.items()}
    return [None if s.reward is None else next(advantages[s.task]) for s in sessions]
