"""Interface of export formats: convert sessions to rows, and write rows to a file.

A format with a row per trace that writes JSON lines implements `Exporter.row`; others override
`rows` or `open`. A format holds one session in memory at a time and gives a reason for everything
that does not become a row, so that nothing is omitted silently (I2).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from tugline import plugins
from tugline.recording.file import Recording
from tugline.recording.records import Header
from tugline.traces.base import Builder, Built
from tugline.types import PluginSpec, Trace, TraceKind


class SkipReason(StrEnum):
    """Reason why a session or one of its rows is not in the file; see `docs/export.md`."""

    DAMAGED = "damaged"
    NO_HEADER = "no_header"
    SUPERSEDED = "superseded"
    HELD_OUT = "held_out"
    STATUS = "status"
    TAG = "tag"
    NO_REWARD = "no_reward"
    LOW_REWARD = "low_reward"
    DUPLICATE = "duplicate"
    NOT_BEST = "not_best"
    EMPTY = "empty"
    KIND = "kind"
    INEXACT = "inexact"
    TOO_LONG = "too_long"
    UNTRAINED = "untrained"
    SHORTER = "shorter"
    UNANSWERED = "unanswered"
    IMAGES = "images"
    RAW_PROMPT = "raw_prompt"


class TraceFilter(msgspec.Struct, frozen=True):
    """Filter of the traces or conversations of a session."""

    kinds: frozenset[TraceKind] = frozenset()
    """Kinds to write; empty: the format's default kinds."""
    exact_only: bool = False
    max_length: int | None = None
    """Maximum length in tokens."""

    def check(
        self, kind: TraceKind, *, exact: bool, length: int, default: frozenset[TraceKind]
    ) -> SkipReason | None:
        """Return the reason why such a trace is skipped; None if it is written."""
        if kind not in (self.kinds or default):
            return SkipReason.KIND
        if self.exact_only and not exact:
            return SkipReason.INEXACT
        too_long = self.max_length is not None and length > self.max_length
        return SkipReason.TOO_LONG if too_long else None


@dataclass(frozen=True)
class SessionExport:
    """A session to export."""

    header: Header
    recording: Recording
    builder_name: str
    builder: Builder
    filter: TraceFilter
    index: int
    """Position of the session among the exported ones."""
    group: int
    """Position of its task among the exported ones."""
    advantage: float | None
    """(reward - mean) / std over the selected sessions of its task; None without a reward."""

    @cached_property
    def built(self) -> Built:
        """Traces and ledger of the session. Raises `CaptureError` on incomplete calls."""
        return self.builder.build(self.recording.calls)

    @property
    def reward(self) -> float | None:
        """Reward of the session; None if it has none."""
        result = self.recording.result
        return result.reward.value if result is not None and result.reward is not None else None


class ExportRow(NamedTuple):
    """Columns of a row, and its token counts for the summary."""

    values: Mapping[str, object]
    tokens: int
    trained: int


class RowWriter:
    """Writer of a file, by default of JSON lines with arrays as lists; deterministic."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")

    def write(self, values: Mapping[str, object]) -> None:
        """Write one row."""
        self._file.write(msgspec.json.encode(values, enc_hook=np.ndarray.tolist) + b"\n")

    def close(self) -> None:
        """Write buffered rows and close the file."""
        self._file.close()


class Exporter:
    """Base of formats; the keyword arguments of `__init__` are the format's options."""

    suffix = ".jsonl"
    """Suffix of files."""
    needs_reward = True
    """Whether sessions without a reward are skipped."""
    trains = True
    """Whether rows are for a trainer of token ids: one tokenizer, trained tokens in every row, and
    no images."""

    def rows(self, session: SessionExport) -> Iterator[ExportRow | SkipReason]:
        """Yield the rows of a session, and a reason for every skipped row."""
        every = frozenset(TraceKind)
        for index, trace in enumerate(session.built.traces):
            size = len(trace.ids)
            skip = session.filter.check(trace.kind, exact=trace.exact, length=size, default=every)
            trained = int(trace.mask.sum())
            if skip is None and self.trains and not trained:
                skip = SkipReason.UNTRAINED
            if skip is None and self.trains and trace.images:
                skip = SkipReason.IMAGES
            row = self.row(session, index, trace) if skip is None else skip
            yield row if isinstance(row, SkipReason) else ExportRow(row, size, trained)

    def row(
        self, session: SessionExport, index: int, trace: Trace
    ) -> Mapping[str, object] | SkipReason:
        """Return the columns of the trace at `index`."""
        raise NotImplementedError

    def open(self, path: Path) -> RowWriter:
        """Create the file at `path`."""
        return RowWriter(path)


def make_exporter(spec: PluginSpec) -> Exporter:
    """Make an exporter. Raises `UsageError` for an unknown name or option."""
    return plugins.make("export", spec, Exporter)
