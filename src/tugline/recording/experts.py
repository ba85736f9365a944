"""Experts of the tokens of an answer, as the requests for it report them.

An engine may compute tokens a second time with other experts: another replica continues the answer,
or new weights are loaded in the middle of it. A sampled token can be trained only with the experts
of its context at the time. So an answer is divided where earlier experts change; the division with
most tokens is kept, and the tokens of the others are masked (I1).
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np

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
    if not rows.any() and (rows.shape[2] > 1 or len(rows) >= _MANY):
        return "every token has expert 0 only"
    ordered = np.sort(rows, axis=2)
    repeated = (ordered[:, :, 1:] == ordered[:, :, :-1]).any((1, 2))
    if repeated.any():
        return f"token {int(repeated.argmax())} has the same expert twice in a layer"
    return None


class _Division(NamedTuple):
    """Sampled tokens from `start` on whose context was computed with the experts `rows`."""

    start: int
    rows: Experts


class AnswerExperts:
    """Experts of the prompt's and the answer's tokens, from the prompt's first token on."""

    def __init__(self) -> None:
        self._prompt = 0
        self._divisions: list[_Division] = []
        self._parts: list[Experts] = []
        """Rows after those of the last division."""
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
        self.fault = self._try_add(report, shape, self._reported) or self.fault
        self._reported = count

    def _try_add(
        self, report: ReportedExperts, shape: tuple[int, int] | None, first: int
    ) -> str | None:
        start, rows = report.start, report.rows
        fault = check_experts(rows, shape)
        if fault is not None:
            return fault
        known = self._known
        if start > known:
            return f"experts begin at token {start}, but are known of {known} tokens only"
        if start == known and self._divisions:
            self._parts.append(rows)
            return None
        before = self._join()
        if before is not None and before.shape[1:] != rows.shape[1:]:
            return f"experts have the shape {rows.shape[1:]}, after {before.shape[1:]}"
        same = before is not None and np.array_equal(
            before[start : start + len(rows)], rows[: known - start]
        )
        if same:
            self._parts.append(rows[known - start :])
        else:
            kept = [] if before is None else [before[:start]]
            self._divisions.append(_Division(first, np.concatenate([*kept, rows])))
        return None

    @property
    def _known(self) -> int:
        last = len(self._divisions[-1].rows) if self._divisions else 0
        return last + sum(map(len, self._parts))

    def _join(self) -> Experts | None:
        """Return the latest experts of all tokens; None without any."""
        if not self._divisions:
            return None
        if self._parts:
            start, rows = self._divisions[-1]
            self._divisions[-1] = _Division(start, np.concatenate([rows, *self._parts]))
            self._parts.clear()
        return self._divisions[-1].rows

    def finish(self, count: int) -> tuple[Experts | None, tuple[MaskedSpan, ...]]:
        """Return the experts for `count` sampled tokens, and the tokens that have others or none.

        The experts are those of the leading tokens, at most of all but the last.
        """
        if not self._expected:
            return None, ()
        self._join()
        starts = [0, *(min(each.start, count) for each in self._divisions), count]
        rows = [np.empty((0, 0, 0), np.uint8), *(each.rows for each in self._divisions)]
        # token i is sampled with the experts of the prompt and of the i tokens before it
        usable = [
            max(0, min(end, len(known) - self._prompt + 1) - start)
            for (start, end), known in zip(pairwise(starts), rows, strict=True)
        ]
        best = int(np.argmax(usable))
        masked = list[MaskedSpan]()
        for number, (start, end) in enumerate(pairwise(starts)):
            known_end = start + usable[number]
            if number != best:
                _mask(masked, Reason.ROUTES_CHANGED, start, known_end)
            _mask(masked, Reason.NO_ROUTES, known_end, end)
        chosen = rows[best][: max(0, self._prompt + count - 1)]
        return (chosen if len(chosen) else None), tuple(masked)


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
