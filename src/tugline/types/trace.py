"""Traces to train on, the ledger of their tokens (I1, I2), and flat arrays for a trainer."""

from enum import StrEnum

import msgspec

from tugline.types.arrays import Ids, Logprobs, Mask
from tugline.types.call import LogprobMeaning, TraceKind


class Reason(StrEnum):
    """Why a sampled token is not trained on. The list is closed."""

    CLIENT_GONE = "client_gone"
    """The harness disconnected and never received the response."""
    ABORTED = "aborted"
    """The engine was told to stop before the response was complete."""
    OVER_LENGTH = "over_length"
    """Beyond the trainer's longest sequence."""
    UNMERGED = "unmerged"
    """The builder's merging rule could not place the call."""
    SESSION_FAILED = "session_failed"
    """The session's outcome says nothing about the policy (see `Boundary`)."""
    STALE = "stale"
    """Sampled under a policy version older than the trainer accepts."""
    NO_SIGNAL = "no_signal"
    """All sessions of the group have the same reward, so the trainer leaves them out."""
    TRUNCATED = "truncated"
    """The session hit one of its limits, and the trainer leaves such sessions out."""
    NON_FINITE = "non_finite"
    """The update was skipped: its loss or gradient was not finite."""
    UNREPRODUCIBLE = "unreproducible"
    """No forward pass reproduces its logprob; see `Distribution.forward_temperature`."""
    NO_TOKEN_IDS = "no_token_ids"  # noqa: S105 - no secret
    """The engine reported text only."""
    BEHIND_STOP = "behind_stop"
    """Behind a stop string that the client asked for, and no part of the answer."""
    SIDE_CALL = "side_call"
    """A title, a routing decision or a summary beside the task."""
    CONSTRAINED = "constrained"
    """A grammar or a token ban constrained the response; see `Call.constrained`."""
    REPLAYED = "replayed"
    """Sampled in the session that this one was forked from, and trained on there."""


class Ledger(msgspec.Struct, frozen=True):
    """Conservation of tokens (I2): ``sampled == trained + masked + dropped``."""

    sampled: int = 0
    trained: int = 0
    masked: dict[Reason, int] = {}
    """In a trace as context, without loss."""
    dropped: dict[Reason, int] = {}
    """In no trace."""

    @property
    def balanced(self) -> bool:
        """Whether every sampled token is accounted for exactly once."""
        return self.sampled == (
            self.trained + sum(self.masked.values()) + sum(self.dropped.values())
        )


class Distribution(msgspec.Struct, frozen=True):
    """What tokens were sampled from, and which distribution their logprobs belong to."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """1 disables it."""
    top_k: int = 0
    """0 disables it."""
    logprobs: LogprobMeaning = LogprobMeaning.PROCESSED

    @property
    def forward_temperature(self) -> float | None:
        """Temperature at which a forward pass gives the captured logprobs; None if none does.

        Raw logprobs are those at 1. Processed ones are those at `temperature`, unless sampling was
        greedy or cut off by top-p or top-k: then they depend on which tokens an engine left.
        """
        if self.logprobs is LogprobMeaning.RAW:
            return 1.0
        if self.temperature == 0 or self.top_p < 1 or self.top_k > 0:
            return None
        return self.temperature


class Span(msgspec.Struct, frozen=True):
    """Trace tokens ``[start, end)`` were sampled by `call` under policy `version`."""

    call: int
    start: int
    end: int
    version: int
    masked: Reason | None = None
    distribution: Distribution = Distribution()
    engine: str = ""
    """Kind of engine that sampled them; empty where it is not known."""


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """One token sequence to train on; arrays all have shape ``(n,)``.

    ``logprobs[i]`` is the captured log probability of ``ids[i]`` given ``ids[:i]`` where a span
    covers ``i``, and 0 elsewhere. ``mask[i]`` is True where ``ids[i]`` is trained on.
    """

    ids: Ids
    mask: Mask
    logprobs: Logprobs
    spans: tuple[Span, ...]
    kind: TraceKind = TraceKind.MAIN
    parent: int | None = None
    """Index in the trajectory of the trace that this one forked from or was started by."""
    shared: int = 0
    """Number of leading ids shared with the parent, whose computation can be reused."""
    thread: str | None = None
    """The harness's own conversation id, if it sends one."""
    thinking_retention: str = ""
    """How long reasoning stayed in the context; empty where the engine decided."""
    exact: bool = True
    """Whether the context is, id for id, the one that was sampled in (I1)."""
    images: tuple[str, ...] = ()
    """SHA-256 in hex of the images in the context, in order; the recording has their data."""


# --------------------------------------------------------------------------- for trainers
class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """Flat arrays for a trainer, one per trace; shapes ``(n,)``.

    `advantages` is 0 where nothing is trained, `versions` -1 where nothing was sampled.
    `logprobs` are those of a forward pass whose logits are divided by `temperatures`.
    """

    input_ids: Ids
    loss_mask: Mask
    logprobs: Logprobs
    versions: Ids
    advantages: Logprobs
    temperatures: Logprobs
    group: str
    session: str
    engine: str = ""
    """Kind of engine that sampled it; empty where it is not known."""
    harness: str = ""
    """Name of the harness that it was sampled for; empty where it is not known."""
    reward: float | None = None
    """Of the session; None for text that no policy sampled."""
    reward_parts: dict[str, float] = {}
