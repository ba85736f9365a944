"""Experts of the tokens of an answer, as the requests for it report them.

An engine may compute tokens a second time with other experts: another replica continues the answer,
or new weights are loaded in the middle of it. A sampled token can be trained only with the experts
of its context at the time. So a new version begins where earlier experts change; the version with
most tokens is kept, and the tokens of the others are masked (I1).
"""

from collections import Counter
from itertools import combinations
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tugline.chat.engines.base import ReportedExperts
from tugline.types import Experts, MaskedSpan, Reason

_MANY = 8
"""Number of tokens that a router with a choice does not send to one expert by chance."""


def check_experts(rows: Experts, shape: tuple[int, int] | None = None) -> str | None:
    """Return what is wrong with reported experts, shape ``(n, layers, top_k)``; None if nothing is.

    `shape` has the layers and the top-k of the model, if they are known.
    """
    if rows.ndim != 3 or rows.dtype.kind != "u":
        return f"experts are {rows.dtype} of {rows.ndim} dimensions, must be unsigned integers of 3"
    if shape is not None and rows.shape[1:] != shape:
        layers, top_k = rows.shape[1:]
        wanted = f"{shape[0]} layers and {shape[1]} experts"
        return f"experts are of {layers} layers and {top_k} a token, must be of {wanted}"
    if not rows.size:
        return "no experts are reported"
    used = rows.any((0, 2))
    if not used.any() and (rows.shape[2] > 1 or len(rows) >= _MANY):
        return "every token has expert 0 only"
    repeated = _find_repeats(rows)[:, used].any(1)  # layers without experts have zeros
    if repeated.any():
        return f"token {int(repeated.argmax())} has the same expert twice in a layer"
    return None


def _find_repeats(rows: Experts) -> npt.NDArray[np.bool_]:
    """Return whether a token has an expert twice, by layer; pairs are faster than sorting."""
    columns = [np.ascontiguousarray(rows[:, :, place]) for place in range(rows.shape[2])]
    repeated = np.zeros(rows.shape[:2], np.bool_)
    for first, second in combinations(columns, 2):
        repeated |= first == second
    return repeated


class _Reported(NamedTuple):
    """Sampled tokens ``[start, end)`` whose context was computed with a version of the experts."""

    start: int
    end: int
    version: int


class AnswerExperts:
    """Experts of the prompt's and the answer's tokens, from the prompt's first token on."""

    def __init__(self) -> None:
        self._prompt = 0
        self._versions: list[Experts] = []
        """The experts from the prompt's first token on; a new version begins where one changed."""
        self._parts: list[Experts] = []
        """Rows after those of the last version."""
        self._known = 0
        """Number of rows of the last version, with those after it."""
        self._spans: list[_Reported] = []
        self._reported = 0
        """Number of sampled tokens that the reports and requests so far are about."""
        self._expected = False
        """Whether tokens without experts are masked."""
        self.fault: str | None = None
        """What was wrong with the first report that was not used."""

    def begin_reply(self, length: int, sampled: int, *, expected: bool) -> None:
        """Begin the next reply, whose prompt has `length` tokens, `sampled` of them sampled.

        If experts are `expected`, tokens without them are masked.
        """
        self._prompt = length - sampled
        self._reported = sampled
        self._expected = self._expected or expected

    def add(self, report: ReportedExperts, shape: tuple[int, int] | None, count: int) -> None:
        """Add a report that came with the tokens up to number `count`.

        It is about those since the last report of the reply. `shape` has the layers and the top-k
        of the model, if they are known.
        """
        self._expected = True
        fault = self._try_add(report, shape)
        if fault is None:
            self._add_span(self._reported, count, len(self._versions) - 1)
        self.fault = fault or self.fault
        self._reported = count

    def _add_span(self, start: int, end: int, version: int) -> None:
        last = self._spans[-1] if self._spans else None
        if last is not None and (last.end, last.version) == (start, version):
            start = self._spans.pop().start
        self._spans.append(_Reported(start, end, version))

    def covers(self, count: int) -> bool:
        """Whether there are reports about `count` sampled tokens, or none are expected."""
        return not self._expected or self._reported >= count

    def _try_add(self, report: ReportedExperts, shape: tuple[int, int] | None) -> str | None:
        """Add rows, or return what is wrong with them."""
        start, rows = report.start, report.rows
        fault = check_experts(rows, shape)
        if fault is not None:
            return fault
        known = self._known
        if start > known:
            return f"experts begin at token {start}, but are known of {known} tokens only"
        if start == known and self._versions:
            self._append(rows)
            return None
        before = self._join()
        if before is not None and before.shape[1:] != rows.shape[1:]:
            return f"experts have the shape {rows.shape[1:]}, after {before.shape[1:]}"
        if before is None or not np.array_equal(before[start:][: len(rows)], rows[: known - start]):
            kept = [] if before is None else [before[:start]]
            self._versions.append(np.concatenate([*kept, rows]))
            self._known = len(self._versions[-1])
        elif len(rows) > known - start:
            self._append(rows[known - start :])
        return None

    def _append(self, rows: Experts) -> None:
        self._parts.append(rows)
        self._known += len(rows)

    def _join(self) -> Experts | None:
        """Return the latest experts of all tokens; None without any."""
        if self._parts:
            self._versions[-1] = np.concatenate([self._versions[-1], *self._parts])
            self._parts.clear()
        return self._versions[-1] if self._versions else None

    def finish(self, count: int) -> tuple[Experts | None, tuple[MaskedSpan, ...]]:
        """Return the experts for `count` sampled tokens, and the tokens that have others or none.

        The experts are those of the leading tokens, at most of all but the last.
        """
        if not self._expected:
            return None, ()
        self._join()
        # token i is sampled with the experts of the prompt and of the i tokens before it
        reaches = [len(rows) - self._prompt + 1 for rows in self._versions]
        spans = [
            span._replace(end=min(span.end, count, reaches[span.version])) for span in self._spans
        ]
        used = Counter[int]()
        for span in spans:
            used[span.version] += max(0, span.end - span.start)
        best = max(used, key=used.__getitem__, default=-1)
        masked = list[MaskedSpan]()
        at = 0
        for start, end, version in spans:
            _mask(masked, Reason.NO_ROUTES, at, min(start, count))
            if version != best:
                _mask(masked, Reason.ROUTES_CHANGED, start, end)
            at = max(at, start, end)
        _mask(masked, Reason.NO_ROUTES, at, count)
        if not used[best]:
            return None, tuple(masked)
        return self._versions[best][: self._prompt + count - 1], tuple(masked)


def _mask(spans: list[MaskedSpan], reason: Reason, start: int, end: int) -> None:
    """Append a span, or extend the last one."""
    if start >= end:
        return
    if spans and spans[-1].reason is reason and spans[-1].end == start:
        start = spans.pop().start
    spans.append(MaskedSpan(reason, start, end))


# --------------------------------------------------------------------------- comparison
_FACTORS = np.random.default_rng(0).integers(-(2**62), 2**62, 1 << 12) | 1
_TOGETHER = 1024


def hash_rows(rows: Experts) -> np.ndarray:
    """Return a hash of each token's experts, int64, shape ``(n,)``; equal for equal values."""
    flat = rows.reshape(len(rows), rows.shape[1] * rows.shape[2])
    factors = np.resize(_FACTORS, flat.shape[1])
    if flat.shape[1] > len(_FACTORS):
        factors = factors * np.arange(1, flat.shape[1] + 1) | 1
    parts = [
        (flat[at : at + _TOGETHER].astype(np.int64) + 1) @ factors
        for at in range(0, len(flat), _TOGETHER)
    ]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)
