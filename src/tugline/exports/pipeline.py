"""From recordings to files: look at each session once, choose, then write one after the other.

Files are written beside their place and moved there when all are whole, so nothing half written
ever has the name that was asked for. Memory holds one session, and a line about each other one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from tugline.errors import CaptureError, UsageError
from tugline.exports.base import Exporter, Item, Left, Sink, Wanted
from tugline.exports.select import Entry, Selection, Split, select, survey
from tugline.plugins import find
from tugline.recording.file import read
from tugline.traces.base import Builder
from tugline.trainers.grpo.advantage import group_advantages
from tugline.types import PluginSpec

Progress = Callable[[str, int, int], None]
"""Told what is being done, and how many of how many are."""
WHOLE = "all"
"""The one file of an export that is not split."""
_ERRORS = 20


class Export(msgspec.Struct, frozen=True, kw_only=True):
    """What to export, and how."""

    exporter: Exporter
    out: Path
    """A file; with a split, a folder of files."""
    selection: Selection = Selection()
    wanted: Wanted = Wanted()
    builder: PluginSpec | None = None
    """None: each task's own."""
    split: Split | None = None
    force: bool = False


class Written(msgspec.Struct):
    """What is in one file."""

    path: str
    tasks: int = 0
    sessions: int = 0
    rows: int = 0
    tokens: int = 0
    trained: int = 0
    """Tokens that a trainer learns from; sampled ones for chat and for the table of calls."""


class Summary(msgspec.Struct):
    """What came of an export."""

    found: int
    """Recordings."""
    kept: int = 0
    """Sessions with a row in a file."""
    left_out: dict[Left, int] = {}
    """Recordings that have none, by reason; ``found == kept + sum(left_out)``."""
    rows_left_out: dict[Left, int] = {}
    """Traces or conversations, by reason."""
    files: dict[str, Written] = {}
    """By split; a single one is `WHOLE`."""
    errors: list[str] = []
    """Of the first damaged recordings."""


def run(export: Export, paths: Sequence[Path], tell: Progress) -> Summary:
    """Write the files. Raises `UsageError` if one is in the way, or if nothing is left to write."""
    names = list(export.split.shares) if export.split is not None else []
    suffix = export.exporter.suffix
    targets = {name: export.out / f"{name}{suffix}" for name in names} or {WHOLE: export.out}
    for target in targets.values():
        if target.exists() and not export.force:
            msg = f"{target} is there already; choose another --out, or give --force"
            raise UsageError(msg)
        target.parent.mkdir(parents=True, exist_ok=True)
    writing = _Writing(export, targets, len(paths))
    try:
        writing.go(paths, tell)
    finally:
        writing.clean()
    return writing.summary


class _Writing:
    """One export under way: the open files and the books."""

    def __init__(self, export: Export, targets: Mapping[str, Path], found: int) -> None:
        self.export = export
        self.targets = targets
        self.sinks: dict[str, Sink] = {}
        self.summary = Summary(found, files={n: Written(str(p)) for n, p in targets.items()})
        self.left: Counter[Left] = Counter()
        self.rows_left: Counter[Left] = Counter()
        self.builder = _builder(export.builder) if export.builder is not None else None

    def go(self, paths: Sequence[Path], tell: Progress) -> None:
        """Look, choose, write, and give the files their names."""
        needed = self.export.exporter.needs_reward or self.export.selection.needs_reward
        selection = msgspec.structs.replace(self.export.selection, needs_reward=needed)
        kept, dropped = select(self._survey(paths, tell), selection)
        self.left += dropped
        vocabularies = len({entry.ids for entry in kept})
        if self.export.exporter.trains and vocabularies > 1:
            msg = f"the sessions' token ids are of {vocabularies} tokenizers; export one at a time"
            raise UsageError(msg)
        dealt = self.export.split.deal(kept) if self.export.split is not None else {}
        for name, path in self.targets.items():
            self.sinks[name] = self.export.exporter.open(_partial(path))
        groups = {task: i for i, task in enumerate(dict.fromkeys(one.task for one in kept))}
        tasks: dict[str, set[str]] = defaultdict(set)
        for number, (entry, advantage) in enumerate(zip(kept, _advantages(kept), strict=True)):
            name = dealt.get(entry.task, WHOLE)
            if self._write(entry, name, (number, groups[entry.task], advantage)):
                tasks[name].add(entry.task)
                self.summary.files[name].tasks = len(tasks[name])
                self.summary.files[name].sessions += 1
                self.summary.kept += 1
            tell("writing", number + 1, len(kept))
        self.summary.left_out = dict(sorted((+self.left).items()))
        self.summary.rows_left_out = dict(sorted((+self.rows_left).items()))
        self._finish()

    def _survey(self, paths: Sequence[Path], tell: Progress) -> Iterator[Entry]:
        for number, path in enumerate(paths, 1):
            try:
                entry = survey(path)
            except CaptureError as error:
                self._damaged(error)
            else:
                if entry is None:
                    self.left[Left.NO_HEADER] += 1
                else:
                    yield entry
            tell("reading", number, len(paths))

    def _write(self, entry: Entry, name: str, place: tuple[int, int, float | None]) -> bool:
        """Whether the session has a row now."""
        file, rows = self.summary.files[name], 0
        try:
            for row in self.export.exporter.rows(self._item(entry, place)):
                if isinstance(row, Left):
                    self.rows_left[row] += 1
                    continue
                self.sinks[name].write(row.values)
                rows += 1
                file.tokens += row.tokens
                file.trained += row.trained
        except CaptureError as error:  # of the builder, before the first row
            self._damaged(error)
            return False
        file.rows += rows
        self.left[Left.EMPTY] += not rows
        return bool(rows)

    def _item(self, entry: Entry, place: tuple[int, int, float | None]) -> Item:
        recording = read(entry.path, bodies=False)
        if recording.header is None:
            msg = f"{entry.path} was cut off while it was exported"
            raise CaptureError(msg)
        part = self.export.builder or recording.header.task.builder
        builder = self.builder or _builder(part)
        wanted = self.export.wanted
        return Item(recording.header, recording, part.name, builder, wanted, *place)

    def _damaged(self, error: CaptureError) -> None:
        self.left[Left.DAMAGED] += 1
        if len(self.summary.errors) < _ERRORS:
            self.summary.errors.append(str(error))

    def _finish(self) -> None:
        if not self.summary.kept:
            why = ", ".join(f"{count} {left}" for left, count in self.summary.left_out.items())
            first = f" ({self.summary.errors[0]})" if self.summary.errors else ""
            msg = f"nothing is left to export: of {self.summary.found} recordings, {why}{first}"
            raise UsageError(msg)
        self._close()
        for path in self.targets.values():
            _partial(path).replace(path)

    def _close(self) -> None:
        while self.sinks:
            self.sinks.popitem()[1].close()

    def clean(self) -> None:
        """Leave nothing that is open or half written."""
        self._close()
        for path in self.targets.values():
            _partial(path).unlink(missing_ok=True)


def _builder(part: PluginSpec) -> Builder:
    made: Builder = find("builder", part.name)(**part.options)
    return made


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


def _advantages(kept: Sequence[Entry]) -> list[float | None]:
    """Return the advantage of each session within its task; None without a reward."""
    groups: dict[str, list[float]] = defaultdict(list)
    for entry in kept:
        if entry.reward is not None:
            groups[entry.task].append(entry.reward)
    advantages = {task: iter(group_advantages(rewards)) for task, rewards in groups.items()}
    return [None if one.reward is None else next(advantages[one.task]) for one in kept]
