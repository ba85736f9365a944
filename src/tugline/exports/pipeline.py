"""Export recordings to files: summarize each session, select, then write one after the other.

Files are written under a partial name and renamed when all are complete. Memory holds one session,
and a summary of each other one.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from tugline.errors import CaptureError, UsageError
from tugline.exports.base import Exporter, RowWriter, SessionExport, SkipReason, TraceFilter
from tugline.exports.select import Selection, SessionSummary, Split, select, summarize
from tugline.recording.file import read
from tugline.traces.base import make_builder
from tugline.trainers.grpo.advantage import group_advantages
from tugline.types import PluginSpec

Progress = Callable[[str, int, int], None]
"""Called with (phase, done, total)."""
WHOLE = "all"
"""Name of the one file of an export that is not split."""
_MAX_ERRORS = 20


class Export(msgspec.Struct, frozen=True, kw_only=True):
    """What to export, and how."""

    exporter: Exporter
    out: Path
    """A file; with a split, a folder of files."""
    selection: Selection = Selection()
    filter: TraceFilter = TraceFilter()
    builder: PluginSpec | None = None
    """None: each task's own."""
    split: Split | None = None
    force: bool = False


class FileSummary(msgspec.Struct):
    """The contents of one file."""

    path: str
    tasks: int = 0
    sessions: int = 0
    rows: int = 0
    tokens: int = 0
    trained: int = 0
    """Tokens that a trainer learns from; sampled ones for chat and for the table of calls."""


class ExportSummary(msgspec.Struct):
    """The result of an export."""

    recordings: int
    """Recordings."""
    exported: int = 0
    """Sessions with a row in a file."""
    left_out: dict[SkipReason, int] = {}
    """Recordings that have none, by reason; ``recordings == exported + sum(left_out)``."""
    rows_left_out: dict[SkipReason, int] = {}
    """Traces or conversations, by reason."""
    files: dict[str, FileSummary] = {}
    """By split; a single one is `WHOLE`."""
    errors: list[str] = []
    """Of the first damaged recordings."""


def run(export: Export, paths: Sequence[Path], on_progress: Progress) -> ExportSummary:
    """Write the files. Raises `UsageError` if one exists, or if nothing is left to write."""
    names = list(export.split.shares) if export.split is not None else []
    suffix = export.exporter.suffix
    targets = {name: export.out / f"{name}{suffix}" for name in names} or {WHOLE: export.out}
    for target in targets.values():
        if target.exists() and not export.force:
            msg = f"{target} is there already; choose another --out, or give --force"
            raise UsageError(msg)
        target.parent.mkdir(parents=True, exist_ok=True)
    running = _RunningExport(export, targets, len(paths))
    try:
        running.write_files(paths, on_progress)
    finally:
        running.clean_up()
    return running.summary


class _RunningExport:
    """The open files and the counts of one export."""

    def __init__(self, export: Export, targets: Mapping[str, Path], session_count: int) -> None:
        self.export = export
        self.targets = targets
        self.writers: dict[str, RowWriter] = {}
        self.summary = ExportSummary(
            session_count, files={n: FileSummary(str(p)) for n, p in targets.items()}
        )
        self.skipped: Counter[SkipReason] = Counter()
        self.skipped_rows: Counter[SkipReason] = Counter()
        self.builder = make_builder(export.builder) if export.builder is not None else None

    def write_files(self, paths: Sequence[Path], on_progress: Progress) -> None:
        needed = self.export.exporter.needs_reward or self.export.selection.needs_reward
        selection = msgspec.structs.replace(self.export.selection, needs_reward=needed)
        kept, skipped = select(self._summarize_all(paths, on_progress), selection)
        self.skipped += skipped
        tokenizers = len({session.tokenizer for session in kept})
        if self.export.exporter.trains and tokenizers > 1:
            msg = f"the sessions' token ids are of {tokenizers} tokenizers; export one at a time"
            raise UsageError(msg)
        for name, path in self.targets.items():
            self.writers[name] = self.export.exporter.open(_partial(path))
        groups = {task: i for i, task in enumerate(dict.fromkeys(one.task for one in kept))}
        tasks: dict[str, set[str]] = defaultdict(set)
        for index, (session, advantage) in enumerate(zip(kept, _advantages(kept), strict=True)):
            split = self.export.split
            name = WHOLE if split is None else split.choose_file(session.task)
            if self._write_session(session, name, (index, groups[session.task], advantage)):
                tasks[name].add(session.task)
                self.summary.files[name].tasks = len(tasks[name])
                self.summary.files[name].sessions += 1
                self.summary.exported += 1
            on_progress("writing", index + 1, len(kept))
        self.summary.left_out = dict(sorted((+self.skipped).items()))
        self.summary.rows_left_out = dict(sorted((+self.skipped_rows).items()))
        self._rename_files()

    def _summarize_all(
        self, paths: Sequence[Path], on_progress: Progress
    ) -> Iterator[SessionSummary]:
        for number, path in enumerate(paths, 1):
            try:
                session = summarize(path)
            except CaptureError as error:
                self._count_damaged(error)
            else:
                if session is None:
                    self.skipped[SkipReason.NO_HEADER] += 1
                else:
                    yield session
            on_progress("reading", number, len(paths))

    def _write_session(
        self, session: SessionSummary, name: str, position: tuple[int, int, float | None]
    ) -> bool:
        """Write the rows of a session; returns whether it has any."""
        file, rows = self.summary.files[name], 0
        try:
            for row in self.export.exporter.rows(self._load(session, position)):
                if isinstance(row, SkipReason):
                    self.skipped_rows[row] += 1
                    continue
                self.writers[name].write(row.values)
                rows += 1
                file.tokens += row.tokens
                file.trained += row.trained
        except CaptureError as error:  # of the builder, before the first row
            self._count_damaged(error)
            return False
        file.rows += rows
        self.skipped[SkipReason.EMPTY] += not rows
        return bool(rows)

    def _load(
        self, session: SessionSummary, position: tuple[int, int, float | None]
    ) -> SessionExport:
        recording = read(session.path, bodies=False)
        header = recording.header
        if header is None:
            msg = f"{session.path} was cut off while it was exported"
            raise CaptureError(msg)
        spec = self.export.builder or header.task.builder
        builder = self.builder or make_builder(spec)
        return SessionExport(header, recording, spec.name, builder, self.export.filter, *position)

    def _count_damaged(self, error: CaptureError) -> None:
        self.skipped[SkipReason.DAMAGED] += 1
        if len(self.summary.errors) < _MAX_ERRORS:
            self.summary.errors.append(str(error))

    def _rename_files(self) -> None:
        if not self.summary.exported:
            why = ", ".join(f"{count} {reason}" for reason, count in self.summary.left_out.items())
            first = f" ({self.summary.errors[0]})" if self.summary.errors else ""
            msg = f"nothing is left to export: of {self.summary.recordings}, {why}{first}"
            raise UsageError(msg)
        self._close_writers()
        for path in self.targets.values():
            _partial(path).replace(path)

    def _close_writers(self) -> None:
        while self.writers:
            self.writers.popitem()[1].close()

    def clean_up(self) -> None:
        """Close open files and remove partial ones."""
        self._close_writers()
        for path in self.targets.values():
            _partial(path).unlink(missing_ok=True)


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


def _advantages(sessions: Sequence[SessionSummary]) -> list[float | None]:
    """Return the advantage of each session within its task; None without a reward."""
    groups: dict[str, list[float]] = defaultdict(list)
    for session in sessions:
        if session.reward is not None:
            groups[session.task].append(session.reward)
    advantages = {task: iter(group_advantages(rewards)) for task, rewards in groups.items()}
    return [None if one.reward is None else next(advantages[one.task]) for one in sessions]
