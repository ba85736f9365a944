"""The contract of an export format: from one session to rows, and from rows to a file.

`Exporter` is the whole of it for a format that has a row per trace and writes JSON lines; others
override `rows` or `open`. A format never holds more than one session, and where something becomes
no row it says why, so that nothing is left out without a reason (I2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from tugline.errors import ConfigError
from tugline.recording.file import Recording
from tugline.recording.records import Header
from tugline.traces.base import Builder, Built
from tugline.types import Trace, TraceKind


class Left(StrEnum):
    """Why a session, or a row of it, is not in the file; `docs/export.md` has them in words."""

    DAMAGED = "damaged"
    NO_HEADER = "no_header"
    SUPERSEDED = "superseded"
    STATUS = "status"
    TAG = "tag"
    NO_REWARD = "no_reward"
    LOW_REWARD = "low_reward"
    DUPLICATE = "duplicate"
    NOT_BEST = "not_best"
    NOT_DRAWN = "not_drawn"
    EMPTY = "empty"
    KIND = "kind"
    INEXACT = "inexact"
    TOO_LONG = "too_long"
    UNTRAINED = "untrained"
    SHORTER = "shorter"
    UNANSWERED = "unanswered"
    IMAGES = "images"


class Wanted(msgspec.Struct, frozen=True):
    """Which traces or conversations of a session are written."""

    kinds: frozenset[TraceKind] = frozenset()
    """Empty: those that the format takes by itself."""
    exact_only: bool = False
    max_length: int | None = None
    """Tokens."""

    def refuses(
        self, kind: TraceKind, *, exact: bool, length: int, usual: frozenset[TraceKind]
    ) -> Left | None:
        """Why something like this is left out; None if it is not."""
        if kind not in (self.kinds or usual):
            return Left.KIND
        if self.exact_only and not exact:
            return Left.INEXACT
        return Left.TOO_LONG if self.max_length is not None and length > self.max_length else None


@dataclass(frozen=True)
class Item:
    """One session on its way to a file."""

    header: Header
    recording: Recording
    builder_name: str
    builder: Builder
    wanted: Wanted
    number: int
    """Place of the session among those exported."""
    group: int
    """Place of its task among those exported."""
    advantage: float | None
    """(reward - mean) / std over the chosen sessions of its task; None without a reward."""

    @cached_property
    def built(self) -> Built:
        """Its traces and ledger. Raises `CaptureError` on calls that cannot be built."""
        return self.builder.build(self.recording.calls)

    @property
    def reward(self) -> float | None:
        """The session's outcome; None if it has none."""
        result = self.recording.result
        return result.reward.value if result is not None and result.reward is not None else None


class Row(NamedTuple):
    """One line of a file, column by column, and what it counts for in the summary."""

    values: Mapping[str, object]
    tokens: int
    trained: int


class Sink(Protocol):
    """An open file. Equal rows make equal bytes."""

    def write(self, values: Mapping[str, object]) -> None:
        """Take one row."""
        ...

    def close(self) -> None:
        """Write what is left and release the file."""
        ...


class NoOptions(msgspec.Struct, frozen=True):
    """Of a format that can be told nothing."""


class Exporter:
    """One format; its options come by keyword, as values or as text."""

    suffix = ".jsonl"
    """Of its files."""
    needs_reward = True
    """Whether a session without a reward has no place in it."""
    trains = True
    """Whether rows are for a trainer of token ids: of one tokenizer, each with tokens to train on,
    without pictures."""
    Options: type[msgspec.Struct] = NoOptions

    def __init__(self, **options: object) -> None:
        name, known = type(self).__name__.lower(), self.Options.__struct_fields__
        for key, value in options.items():
            if key not in known:
                msg = f"export {name!r} has no option {key!r} (known: {', '.join(known) or 'none'})"
                raise ConfigError(msg)
            try:
                msgspec.convert({key: value}, self.Options, strict=False)
            except msgspec.ValidationError as error:
                msg = f"export {name!r}: {key} is {value!r}: {str(error).partition(' - at')[0]}"
                raise ConfigError(msg) from error
        self.options: Any = msgspec.convert(options, self.Options, strict=False)

    def rows(self, item: Item) -> Iterator[Row | Left]:
        """What a session becomes; a `Left` says why something of it is no row."""
        for index, trace in enumerate(item.built.traces):
            size, every = len(trace.ids), frozenset(TraceKind)
            left = item.wanted.refuses(trace.kind, exact=trace.exact, length=size, usual=every)
            if left is None and self.trains and not trace.mask.any():
                left = Left.UNTRAINED
            if left is None and self.trains and trace.images:
                left = Left.IMAGES
            found = self.row(item, index, trace) if left is None else left
            yield found if isinstance(found, Left) else Row(found, size, int(trace.mask.sum()))

    def row(self, item: Item, index: int, trace: Trace) -> Mapping[str, object] | Left:
        """The columns of the trace at `index`."""
        raise NotImplementedError

    def open(self, path: Path) -> Sink:
        """A new file at `path`."""
        return JsonLines(path)


class JsonLines:
    """A sink of one JSON object per line; an array is written as a list."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")

    def write(self, values: Mapping[str, object]) -> None:
        """Append one line."""
        self._file.write(msgspec.json.encode(values, enc_hook=np.ndarray.tolist) + b"\n")

    def close(self) -> None:
        """Release the file."""
        self._file.close()
