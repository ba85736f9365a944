"""Collect one answer while it is sampled, and close it into an immutable `Call`.

Arrays are kept as the engine sent them and joined once, so recording costs O(tokens) (I7). Ids,
logprobs and policy versions must cover the same tokens; a gap is an error at once, because a
token without its logprob cannot be trained on later (I2).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from tugline.errors import EngineError
from tugline.types import Finish, Ids, Logprobs, VersionSpan


@dataclass(slots=True)
class Sampled:
    """The answer so far."""

    ids: list[Ids] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)
    finish: Finish | None = None
    length: int = 0
    first_at: float | None = None
    last_at: float | None = None

    def add(self, ids: Ids, logprobs: Logprobs, version: int) -> None:
        """Append tokens sampled under one policy version."""
        if len(ids) != len(logprobs):
            msg = (
                f"the engine sent {len(ids)} token ids but {len(logprobs)} logprobs; "
                "ask it for the logprob of every sampled token"
            )
            raise EngineError(msg)
        if not len(ids):
            return
        self.last_at = time.time()
        self.first_at = self.first_at or self.last_at
        self.ids.append(ids)
        self.logprobs.append(logprobs)
        start, self.length = self.length, self.length + len(ids)
        last = self.versions[-1] if self.versions else None
        if last is not None and last.version == version:
            self.versions[-1] = VersionSpan(version, last.start, self.length)
        else:
            self.versions.append(VersionSpan(version, start, self.length))

    def joined(self) -> tuple[Ids, Logprobs]:
        """All ids (int32) and logprobs (float32), each of shape ``(length,)``."""
        if not self.ids:
            return np.empty(0, np.int32), np.empty(0, np.float32)
        return np.concatenate(self.ids), np.concatenate(self.logprobs)
