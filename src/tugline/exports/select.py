"""Select the sessions to export and split them into files.

A first pass over the recordings keeps a `SessionSummary` of each, so ten thousand take a few
megabytes; everything else here is a pure function of those. The order does not depend on the file
system or on chance: the file of a task depends on a hash of its name and a seed.
"""

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from tugline.exports.base import SkipReason
from tugline.recording.file import read
from tugline.types import Status


class SessionSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a session that selection depends on."""

    path: Path
    session: str
    task: str
    sample: int
    epoch: int
    tags: dict[str, str]
    status: Status | None
    """None while there is no result."""
    reward: float | None
    tokenizer: str
    """Digest of its tokenizer, or the model's name if that is unknown."""
    answers: bytes
    """Digest of all answers of the model."""

    @property
    def sort_key(self) -> tuple[str, int, str, str]:
        """Sorts samples of a task together."""
        return self.task, self.sample, self.session, str(self.path)


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """Filters of sessions, in the order in which they apply."""

    status: frozenset[Status] = frozenset()
    """Empty: any, including sessions without a result."""
    tags: dict[str, str] = {}
    needs_reward: bool = False
    """Set if the format needs one."""
    min_reward: float | None = None
    dedupe: bool = False
    best_of: int | None = None
    """How many of the best sessions of each task are kept; of equals the first samples."""

    def check(self, session: SessionSummary) -> SkipReason | None:
        """Return why this session is skipped regardless of the others; None if it is not."""
        if self.status and session.status not in self.status:
            return SkipReason.STATUS
        if any(session.tags.get(key) != value for key, value in self.tags.items()):
            return SkipReason.TAG
        by_reward = self.needs_reward or self.min_reward is not None or self.best_of is not None
        if by_reward and session.reward is None:
            return SkipReason.NO_REWARD
        low = self.min_reward is not None and (session.reward or 0.0) < self.min_reward
        return SkipReason.LOW_REWARD if low else None


def summarize(path: Path) -> SessionSummary | None:
    """Summarize a recording; None if it has no header. Raises `CaptureError`."""
    recording = read(path, bodies=False)
    header, result = recording.header, recording.result
    if header is None:
        return None
    reward = result.reward if result is not None else None
    answers = hashlib.sha256()
    for call in recording.calls:
        answer = call.sampled_ids.tobytes() or msgspec.json.encode(call.answer)
        answers.update(len(answer).to_bytes(8) + answer)
    return SessionSummary(
        path=path,
        session=header.session.id,
        task=header.task.id,
        sample=header.session.sample,
        epoch=header.session.epoch,
        tags=header.task.tags,
        status=result.status if result is not None else None,
        reward=reward.value if reward is not None and math.isfinite(reward.value) else None,
        tokenizer=header.tokenizer or header.model,
        answers=answers.digest(),
    )


def select(
    sessions: Iterable[SessionSummary], selection: Selection
) -> tuple[list[SessionSummary], Counter[SkipReason]]:
    """Return the sessions to export, sorted, and how many are skipped for which reason."""
    skipped: Counter[SkipReason] = Counter()
    chosen: list[SessionSummary] = []
    for session in sorted(_latest_attempts(sessions, skipped), key=lambda each: each.sort_key):
        reason = selection.check(session)
        if reason is None:
            chosen.append(session)
        else:
            skipped[reason] += 1
    if selection.dedupe:
        chosen = _first_of_each(
            chosen, lambda each: (each.task, each.answers), 1, skipped, SkipReason.DUPLICATE
        )
    if selection.best_of is not None:
        ranked = sorted(chosen, key=lambda each: -(each.reward or 0.0))
        chosen = _first_of_each(
            ranked, lambda each: each.task, selection.best_of, skipped, SkipReason.NOT_BEST
        )
    return sorted(chosen, key=lambda each: each.sort_key), skipped


def _latest_attempts(
    sessions: Iterable[SessionSummary], skipped: Counter[SkipReason]
) -> list[SessionSummary]:
    """Return the last attempt of each session of a folder."""
    latest: dict[tuple[Path, str], SessionSummary] = {}
    for session in sessions:
        key = (session.path.parent, session.session)
        if key in latest:
            skipped[SkipReason.SUPERSEDED] += 1
        if key not in latest or session.epoch > latest[key].epoch:
            latest[key] = session
    return list(latest.values())


def _first_of_each(
    sessions: Sequence[SessionSummary],
    key: Callable[[SessionSummary], object],
    count: int,
    skipped: Counter[SkipReason],
    reason: SkipReason,
) -> list[SessionSummary]:
    """Return the first `count` sessions of each `key`."""
    seen: Counter[object] = Counter()
    kept = []
    for session in sessions:
        seen[key(session)] += 1
        if seen[key(session)] <= count:
            kept.append(session)
        else:
            skipped[reason] += 1
    return kept


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """How tasks are split into files; all samples of a task go to the same one.

    The hash of a task's id and the seed decides, so it stays where it is when tasks are added.
    """

    shares: Mapping[str, float]
    seed: int = 0

    def choose_file(self, task: str) -> str:
        """Return the file of a task."""
        digest = hashlib.sha256(f"{self.seed}:{task}".encode()).digest()
        fraction = int.from_bytes(digest[:7]) / 256**7
        ends = zip(self.shares, itertools.accumulate(self.shares.values()), strict=True)
        return next((name for name, end in ends if fraction < end), list(self.shares)[-1])
