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
from typing import ClassVar, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from tugline import plugins
from tugline.exports.forms import find_truncated
from tugline.recording.file import Recording
from tugline.recording.records import Header
from tugline.traces.base import Builder, Built
from tugline.types import Kept, PluginSpec, Trace, TraceKind


class SkipReason(StrEnum):
    """Reason why a session or one of its rows is not in the file; see `docs/formats.md`."""

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
    EXPERTS = "experts"
    KEPT = "kept"


HINTS = {
    SkipReason.EXPERTS: (
        "experts: the format cannot hold them; --with experts=false writes these rows without"
    ),
    SkipReason.KEPT: (
        "kept: the format cannot hold the part of the vocabulary that each token was sampled from, "
        "or it is not known; --with kept=false leaves tokens of top-p, top-k and min-p untrained"
    ),
}
"""Ways to export what was left out for a reason."""


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
            fitted = self.fit(trace) if skip is None else skip
            if isinstance(fitted, SkipReason):
                yield fitted
                continue
            row = self.row(session, index, fitted)
            yield row if isinstance(row, SkipReason) else ExportRow(row, size, fitted.trained)

    def fit(self, trace: Trace) -> Trace | SkipReason:
        """Return the trace as the format can hold it, or the reason why it cannot."""
        if self.trains and not trace.trained:
            return SkipReason.UNTRAINED
        return SkipReason.IMAGES if self.trains and trace.images else trace

    def row(
        self, session: SessionExport, index: int, trace: Trace
    ) -> Mapping[str, object] | SkipReason:
        """Return the columns of the trace at `index`."""
        raise NotImplementedError

    def open(self, path: Path) -> RowWriter:
        """Create the file at `path`."""
        return RowWriter(path)


@dataclass(kw_only=True, eq=False)
class TrainerExporter(Exporter):
    """Base of formats of trainers, with options for what a trainer may have no form for.

    Rows with experts or kept sets that the format cannot hold are skipped. Without `experts`, rows
    have none. Without `kept`, they have no sets, and the tokens that need one are not trained.
    """

    experts: bool = True
    kept: bool = True
    holds_experts: ClassVar[bool] = False
    holds_kept: ClassVar[bool] = False

    def fit(self, trace: Trace) -> Trace | SkipReason:
        """See `Exporter.fit`; `Trace.kept` has a set for each trained token, or is None."""
        if trace.trained and self.experts and not self.holds_experts and trace.experts is not None:
            return SkipReason.EXPERTS
        truncated = find_truncated(trace)
        held = np.zeros(len(trace.ids), np.bool_)
        sets = trace.kept or Kept.none(len(trace.ids))
        if self.kept and self.holds_kept:
            held = truncated & sets.contains(trace.ids)
        # a format with sets has one for each trained token
        lost = trace.mask & ~held if held.any() else truncated
        if self.kept and lost.any():
            return SkipReason.KEPT
        kept = sets.select(held) if held.any() else None
        experts = trace.experts if self.experts else None
        return super().fit(replace(trace, mask=trace.mask & ~lost, experts=experts, kept=kept))


def make_exporter(spec: PluginSpec) -> Exporter:
    """Make an exporter. Raises `UsageError` for an unknown name or option."""
    return plugins.make("export", spec, Exporter)
