"""Which sessions are exported, and into which file: decided once, from a line about each.

A first pass over the recordings keeps only an `Entry` per session, so ten thousand of them are a
few megabytes; everything here is a pure function of those. Order never depends on the file system
or on chance: what is drawn is drawn by hashes of names and a seed.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from tugline.errors import UsageError
from tugline.exports.base import Left
from tugline.recording.file import Recording, read
from tugline.types import Status


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """What decides about a session."""

    path: Path
    session: str
    task: str
    sample: int
    epoch: int
    tags: dict[str, str]
    status: Status | None
    """None while there is no result."""
    reward: float | None
    ids: str
    """Whose token ids these are: a tokenizer's digest, or a model's name where that is unknown."""
    said: bytes
    """Digest of everything the model said."""

    @property
    def order(self) -> tuple[str, int, str, str]:
        """Samples of a task stand together."""
        return self.task, self.sample, self.session, str(self.path)


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """Filters of sessions, in the order in which they apply."""

    status: frozenset[Status] = frozenset()
    """Empty: any, and also sessions that have no result yet."""
    tags: dict[str, str] = {}
    needs_reward: bool = False
    """Set where the format does."""
    min_reward: float | None = None
    dedupe: bool = False
    best_of: int | None = None
    """How many of the best sessions of each task are kept; of equals the first samples."""
    one_per_task: bool = False
    seed: int = 0

    def refuses(self, entry: Entry) -> Left | None:
        """Why this session alone is left out; None if it is not."""
        if self.status and entry.status not in self.status:
            return Left.STATUS
        if any(entry.tags.get(key) != value for key, value in self.tags.items()):
            return Left.TAG
        by_reward = self.needs_reward or self.min_reward is not None or self.best_of is not None
        if by_reward and entry.reward is None:
            return Left.NO_REWARD
        low = self.min_reward is not None and (entry.reward or 0.0) < self.min_reward
        return Left.LOW_REWARD if low else None


def survey(path: Path) -> Entry | None:
    """What a recording says of its session; None if it has no header. Raises `CaptureError`."""
    recording = read(path, bodies=False)
    header, result = recording.header, recording.result
    if header is None:
        return None
    reward = result.reward if result is not None else None
    return Entry(
        path=path,
        session=header.session.id,
        task=header.task.id,
        sample=header.session.sample,
        epoch=header.session.epoch,
        tags=header.task.tags,
        status=result.status if result is not None else None,
        reward=reward.value if reward is not None and math.isfinite(reward.value) else None,
        ids=header.tokenizer or header.model,
        said=_said(recording),
    )


def _said(recording: Recording) -> bytes:
    digest = hashlib.sha256()
    for call in recording.calls:
        said = call.sampled_ids.tobytes() or msgspec.json.encode(call.answer)
        digest.update(len(said).to_bytes(8) + said)
    return digest.digest()


def select(entries: Iterable[Entry], selection: Selection) -> tuple[list[Entry], Counter[Left]]:
    """The sessions to export, in their order, and how many are left out for which reason."""
    left: Counter[Left] = Counter()
    kept: list[Entry] = []
    for entry in sorted(_latest(entries, left), key=lambda one: one.order):
        reason = selection.refuses(entry)
        if reason is None:
            kept.append(entry)
        else:
            left[reason] += 1
    if selection.dedupe:
        kept = _first_of(kept, lambda one: (one.task, one.said), 1, left, Left.DUPLICATE)
    if selection.best_of is not None:
        best_first = sorted(kept, key=lambda one: -(one.reward or 0.0))
        kept = _first_of(best_first, lambda one: one.task, selection.best_of, left, Left.NOT_BEST)
    if selection.one_per_task:
        drawn = sorted(kept, key=lambda one: place(f"{one.session} {one.sample}", selection.seed))
        kept = _first_of(drawn, lambda one: one.task, 1, left, Left.NOT_DRAWN)
    return sorted(kept, key=lambda one: one.order), left


def _latest(entries: Iterable[Entry], left: Counter[Left]) -> list[Entry]:
    """The last attempt of each session of a folder."""
    latest: dict[tuple[Path, str], Entry] = {}
    for entry in entries:
        key = (entry.path.parent, entry.session)
        if key in latest:
            left[Left.SUPERSEDED] += 1
        if key not in latest or entry.epoch > latest[key].epoch:
            latest[key] = entry
    return list(latest.values())


def _first_of(
    entries: Sequence[Entry],
    key: Callable[[Entry], object],
    count: int,
    left: Counter[Left],
    reason: Left,
) -> list[Entry]:
    """The first `count` entries of each `key`."""
    seen: Counter[object] = Counter()
    kept = []
    for entry in entries:
        seen[key(entry)] += 1
        if seen[key(entry)] <= count:
            kept.append(entry)
        else:
            left[reason] += 1
    return kept


def place(name: str, seed: int) -> float:
    """A number in [0, 1) that `name` and `seed` decide, on every machine alike."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:7]) / 256**7


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """How tasks are dealt to files; all samples of a task go to the same one."""

    shares: Mapping[str, float]
    stratify: str | None = None
    """A tag: each of its values is dealt in the same shares."""
    seed: int = 0

    def deal(self, entries: Iterable[Entry]) -> dict[str, str]:
        """The file of each task.

        Without a tag a task's own hash decides, so it stays where it is when tasks are added. With
        one, the tasks of a value are put in the order of their hashes and cut at the shares.
        """
        strata: dict[str, set[str]] = defaultdict(set)
        for entry in entries:
            if self.stratify is not None and self.stratify not in entry.tags:
                msg = f"--stratify {self.stratify}: task {entry.task} has no such tag"
                raise UsageError(msg)
            strata[entry.tags[self.stratify] if self.stratify else ""].add(entry.task)
        dealt: dict[str, str] = {}
        for tasks in strata.values():
            places = {task: place(task, self.seed) for task in tasks}
            if self.stratify is not None:
                ranked = sorted(tasks, key=places.__getitem__)
                places = {task: (i + 0.5) / len(ranked) for i, task in enumerate(ranked)}
            dealt |= {task: self._share_at(where) for task, where in places.items()}
        return dealt

    def _share_at(self, where: float) -> str:
        end = 0.0
        for name, share in self.shares.items():
            end += share
            if where < end:
                return name
        return name
