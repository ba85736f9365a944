"""Records of a recording: a header, then calls and events, and at the end the result.

They contain everything that a trainer, the viewer or a replay needs, without the server: the task
and its harness, the template of prompts, every call, and the outcome.
"""

import time
from array import array
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any

import msgspec
import numpy as np

from tugline.errors import EngineError
from tugline.recording.experts import AnswerExperts
from tugline.types import (
    Call,
    Cause,
    Failure,
    Finish,
    Ids,
    Kept,
    Ledger,
    Logprobs,
    Mode,
    Reward,
    Session,
    SpentLimit,
    Status,
    Task,
    VersionSpan,
)
from tugline.types.task import INT32

MAX_KEPT = 1 << 24
"""Maximum number of ids in the kept sets of an answer: 64 MiB."""


class Header(msgspec.Struct, frozen=True, kw_only=True, tag="header"):
    """First record of a recording: the session, its task, and how prompts were made."""

    session: Session
    task: Task
    created: float
    """Unix seconds."""
    tugline: str
    """Version of the package that wrote the recording."""
    model: str = ""
    """Name of the model, as the engine reports it."""
    window: int = 0
    """Context window in tokens; 0 if the engine does not report it."""
    engine: str = ""
    """Engine format, such as ``vllm``."""
    mode: Mode = Mode.EXACT
    template: str = ""
    """Name of the chat template of exact mode (see `docs/templates.md`); else empty."""
    thinking_retention: str = ""
    special_tokens_in_contents: str = ""
    """Encoding of special tokens in contents (``text`` or ``tokens``); empty if the engine renders
    prompts, or in recordings before this field, which have ``tokens``."""
    tokenizer: str = ""
    """SHA-256, in hex, of the ``tokenizer.json`` beside the recordings (see
    `tugline.recording.tokenizer_file`); empty if the engine renders prompts."""
    workdir: str = ""
    """The agent's working folder inside its sandbox; a replay uses the same path."""
    home: str = ""
    forked_from: str = ""
    """``session@call`` if this session replays another one and samples from that call on; else
    empty."""


class RecordedEventKind(StrEnum):
    """Kinds of events other than model calls."""

    REFUSED = "refused"
    """A request was answered with an error before anything was sampled; `detail` has the status,
    the class of the error and the field named in it."""
    REPEATED = "repeated"
    """A repeated request received the answer to `call`, while it was sampled or afterwards."""
    REPAIRED = "repaired"
    """Invalid Unicode in the request of `call`, named in `detail`, was repaired."""
    ENGINE_FAULT = "engine_fault"
    """A replica failed during `call`, which failed over to another replica or ended; `detail`
    has the address and the number of tokens so far. Or the experts or kept sets that it reported
    are wrong, and are not used; `detail` says how."""
    PAUSED = "paused"
    """New calls are held; `detail` has the policy for calls in flight."""
    RESUMED = "resumed"
    WEIGHTS = "weights"
    """The engine serves the policy version in `detail`."""


class RecordedEvent(msgspec.Struct, frozen=True, tag="event"):
    """An event at `at` (Unix seconds), about `call` if it is not None."""

    kind: RecordedEventKind
    at: float
    call: int | None = None
    detail: str = ""


class RecordedExit(msgspec.Struct, frozen=True):
    """Exit of the agent's program, without its output."""

    code: int
    """Exit code; the negative signal number for a program that was killed."""
    timed_out: bool
    seconds: float
    cause: Cause | None = None
    """Set if the sandbox's memory or disk limit was exceeded."""


class RecordedVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Origin of a verdict that `tugline rejudge` put in force."""

    at: float
    """Unix seconds of the evaluation."""
    by: str
    """User and machine."""
    evaluator: str
    digest: str
    """Digest of the evaluator's options and of the files that they name."""


class RecordedResult(msgspec.Struct, frozen=True, kw_only=True, tag="result"):
    """The outcome of a session: a trajectory without traces, which a builder can rebuild."""

    status: Status
    builder: str
    """Name of the builder that made the ledger."""
    ledger: Ledger
    reward: Reward | None = None
    report: dict[str, Any] = {}
    failure: Failure | None = None
    spent: SpentLimit | None = None
    seconds: dict[str, float] = {}
    """Wall-clock time by stage."""
    engine_s: float | None = None
    """Seconds in which at least one of its model calls was at the engine; None in recordings of
    older releases."""
    prompt_tokens: int | None = None
    """Tokens of the prompts of its model calls; None in recordings of older releases."""
    patch: str = ""
    """SHA-256, in hex, of what the agent changed (see `tugline.recording.patches`); empty if the
    session ended before, and in recordings before this field."""
    exit: RecordedExit | None = None
    """None if there is no patch."""
    verdict: RecordedVerdict | None = None
    """None for the verdict of the session's own evaluation."""


# --------------------------------------------------------------------------- answers
class SampledTokens(msgspec.Struct, gc=False):
    """Sampled tokens of an answer so far; a reply is the part from one engine request.

    Tokens are appended to arrays in place, which costs O(tokens) (I7) and no garbage collection.
    Ids, logprobs and policy versions must cover the same tokens; a gap is an error at once,
    because a token without its logprob cannot be trained (I2).
    """

    ids: "array[int]" = msgspec.field(default_factory=lambda: array("i"))
    logprobs: "array[float]" = msgspec.field(default_factory=lambda: array("f"))
    versions: list[VersionSpan] = []
    experts: AnswerExperts = msgspec.field(default_factory=AnswerExperts)
    kept_ids: "array[int]" = msgspec.field(default_factory=lambda: array("i"))
    """Ids that were left to choose from, token after token."""
    kept_sizes: "array[int]" = msgspec.field(default_factory=lambda: array("i"))
    """Number of `kept_ids` of each token; of fewer tokens if the last ones have none."""
    kept_fault: str | None = None
    """What was wrong with the first set that was not used."""
    finish: Finish | None = None
    stop: str | None = None
    unreported_tokens: int = 0
    """Tokens whose ids the engine did not report."""
    cut_tokens: int = 0
    """Tokens dropped by `truncate`."""
    prompt_count: int = 0
    """Number of prompt tokens if the engine does not report their ids."""
    reply_start: int = 0
    """Index of the current reply's first token."""
    first_at: float | None = None
    last_at: float | None = None

    @property
    def length(self) -> int:
        """Number of tokens with ids."""
        return len(self.ids)

    def add(self, ids: list[int], logprobs: list[float], version: int) -> None:
        """Append tokens sampled under one policy version. Raises `EngineError` for invalid ones."""
        if len(ids) != len(logprobs):
            msg = (
                f"the engine sent {len(ids)} token ids but {len(logprobs)} logprobs; there "
                "must be one for each"
            )
            raise EngineError(msg)
        if not ids:
            return
        if not (min(ids) >= 0 and max(ids) <= INT32):
            wrong = next(token for token in ids if not 0 <= token <= INT32)
            raise EngineError(f"the engine sent an invalid token id: {wrong}")
        self.last_at = time.time()
        self.first_at = self.first_at or self.last_at
        start = len(self.ids)
        self.ids.fromlist(ids)
        self.logprobs.fromlist(logprobs)
        self._add_span(version, start, len(self.ids))

    def add_kept(self, sets: Sequence[Sequence[int]]) -> None:
        """Add the sets of the tokens that were added last; one that cannot be right is left out."""
        ids = self.ids[self.length - len(sets) :]
        if len(ids) != len(sets):
            self.kept_fault = self.kept_fault or f"{len(sets)} kept sets of {len(ids)} tokens"
            return
        self.kept_sizes.extend([0] * (self.length - len(sets) - len(self.kept_sizes)))
        for token, kept in zip(ids, sets, strict=True):
            fault = None
            if kept and token not in kept:
                fault = f"a kept set of {len(kept)} ids is without the sampled id {token}"
            elif len(kept) + len(self.kept_ids) > MAX_KEPT:
                fault = f"the kept sets of the answer have more than {MAX_KEPT} ids"
            self.kept_fault = self.kept_fault or fault
            used = [] if fault else sorted(kept)
            self.kept_ids.extend(used)
            self.kept_sizes.append(len(used))

    def join_kept(self) -> Kept | None:
        """Return the set of each token; None if no token has one."""
        if not self.kept_ids:
            return None
        sizes = np.zeros(self.length, np.int32)
        sizes[: len(self.kept_sizes)] = self.kept_sizes
        offsets = np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
        return Kept(offsets, np.array(self.kept_ids, np.int32))

    def set_versions(self, spans: Iterable[VersionSpan]) -> None:
        """Set the versions of the current reply; spans are relative to its first token.

        Raises `EngineError` if the spans do not cover the reply.
        """
        shift = self.reply_start
        before = self.versions
        self._trim_versions(shift)
        for span in spans:
            end = min(span.end + shift, self.length)
            if span.start + shift < end:
                self._add_span(span.version, span.start + shift, end)
        covered = self.versions[-1].end if self.versions else 0
        if covered != self.length:
            self.versions = before
            msg = f"the engine's weight_versions cover {covered} of {self.length} sampled tokens"
            raise EngineError(msg)

    def truncate(self, length: int) -> None:
        """Drop the tokens after the first `length`, such as those after a stop string."""
        if length >= self.length:
            return
        self.cut_tokens += self.length - length
        del self.ids[length:], self.logprobs[length:]
        del self.kept_ids[sum(self.kept_sizes[:length]) :], self.kept_sizes[length:]
        self._trim_versions(length)

    def join(self) -> tuple[Ids, Logprobs]:
        """Return all ids (int32) and logprobs (float32), each of shape ``(length,)``."""
        return np.array(self.ids, np.int32), np.array(self.logprobs, np.float32)

    def _add_span(self, version: int, start: int, end: int) -> None:
        last = self.versions[-1] if self.versions else None
        if last is not None and last.version == version and last.end == start:
            self.versions[-1] = VersionSpan(version, last.start, end)
        else:
            self.versions.append(VersionSpan(version, start, end))

    def _trim_versions(self, length: int) -> None:
        self.versions = [
            VersionSpan(s.version, s.start, min(s.end, length))
            for s in self.versions
            if s.start < length
        ]


def mark_replayed(call: Call, old: Call) -> Call:
    """Return `call` marked as a replay of `old`, with that call's sampling and engine."""
    return msgspec.structs.replace(
        call,
        replayed=True,
        mode=old.mode,
        sampling=old.sampling,
        logprob_meaning=old.logprob_meaning,
        engine=old.engine,
        replicas=old.replicas,
    )
