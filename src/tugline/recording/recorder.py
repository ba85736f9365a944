"""Collect the tokens of an answer while they are sampled.

Arrays are stored as the engine sent them and joined once, so recording costs O(tokens) (I7). Ids,
logprobs and policy versions must cover the same tokens; a gap is an error at once, because a
token without its logprob cannot be trained (I2).
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from tugline.errors import EngineError
from tugline.types import Call, Finish, Ids, Logprobs, VersionSpan


@dataclass(slots=True)
class SampledTokens:
    """The answer so far; a reply is the part that one engine request gave."""

    ids: list[Ids] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)
    finish: Finish | None = None
    stop: str | None = None
    unreported_tokens: int = 0
    """Tokens whose ids the engine did not report."""
    prompt_count: int = 0
    """Tokens of the prompt, where the engine only counts them."""
    length: int = 0
    reply_start: int = 0
    """Index of the current reply's first token."""
    first_at: float | None = None
    last_at: float | None = None

    def add(self, ids: Ids, logprobs: Logprobs, version: int) -> None:
        """Append tokens sampled under one policy version."""
        if len(ids) != len(logprobs):
            msg = f"the engine sent {len(ids)} token ids but {len(logprobs)} logprobs; ask for all"
            raise EngineError(msg)
        if not len(ids):
            return
        self.last_at = time.time()
        self.first_at = self.first_at or self.last_at
        self.ids.append(ids)
        self.logprobs.append(logprobs)
        start, self.length = self.length, self.length + len(ids)
        self._add_span(VersionSpan(version, start, self.length))

    def set_versions(self, spans: Iterable[VersionSpan]) -> None:
        """Set the versions of the current reply; spans count from its first token.

        Raises `EngineError` if they do not cover it.
        """
        shift, before = self.reply_start, self.versions
        self._trim_versions(shift)
        for span in spans:
            end = min(span.end + shift, self.length)
            if span.start + shift < end:
                self._add_span(VersionSpan(span.version, span.start + shift, end))
        covered = self.versions[-1].end if self.versions else 0
        if covered != self.length:
            self.versions = before
            msg = f"the engine's weight_versions cover {covered} of {self.length} sampled tokens"
            raise EngineError(msg)

    def truncate(self, length: int) -> None:
        """Drop the tokens after the first `length`, such as those after a stop string."""
        if length >= self.length:
            return
        ids, logprobs = self.join()
        self.ids, self.logprobs, self.length = [ids[:length]], [logprobs[:length]], length
        self._trim_versions(length)

    def join(self) -> tuple[Ids, Logprobs]:
        """Return all ids (int32) and logprobs (float32), each of shape ``(length,)``."""
        if not self.ids:
            return np.empty(0, np.int32), np.empty(0, np.float32)
        if len(self.ids) > 1:
            self.ids = [np.concatenate(self.ids)]
            self.logprobs = [np.concatenate(self.logprobs)]
        return self.ids[0], self.logprobs[0]

    def _add_span(self, span: VersionSpan) -> None:
        last = self.versions[-1] if self.versions else None
        if last is not None and last.version == span.version and last.end == span.start:
            self.versions[-1] = VersionSpan(span.version, last.start, span.end)
        else:
            self.versions.append(span)

    def _trim_versions(self, length: int) -> None:
        self.versions = [
            VersionSpan(s.version, s.start, min(s.end, length))
            for s in self.versions
            if s.start < length
        ]


def mark_replayed(call: Call, old: Call) -> Call:
    """Return `call` as a replay of `old`, with the sampling and the engine of that call."""
    return msgspec.structs.replace(
        call,
        replayed=True,
        mode=old.mode,
        sampling=old.sampling,
        logprob_meaning=old.logprob_meaning,
        engine=old.engine,
        replicas=old.replicas,
    )
