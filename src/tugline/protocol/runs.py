"""Messages about runs, the verdicts on their sessions, and judging sessions again."""

from enum import StrEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tugline.protocol.clients import Name
from tugline.types import PluginSpec, Reward

FigureName = Annotated[str, Meta(min_length=1, max_length=160)]


class RunStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Figures and notes of a step of a trainer, by name, such as ``rollout/reward``."""

    step: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    figures: Annotated[dict[FigureName, float], Meta(max_length=1000)] = {}
    notes: Annotated[
        dict[FigureName, Annotated[str, Meta(max_length=10_000)]], Meta(max_length=100)
    ] = {}
    """Lines of text, such as the result of an evaluation."""
    rewound: bool = False
    """The run continues from this step: reports of later steps are deleted."""


class RunKind(StrEnum):
    """What a run does with its tasks."""

    TRAIN = "train"
    EVAL = "eval"
    RUN = "run"
    GENERATE = "generate"
    REJUDGE = "rejudge"


By = Annotated[str, Meta(max_length=200, pattern="^[^\\x00]*$")]
"""Who started something, such as ``user@machine``."""


class RunStart(msgspec.Struct, frozen=True, kw_only=True):
    """Start of a run, or its continuation, which may have another configuration."""

    kind: RunKind
    configuration: dict[str, Any] = {}
    parent: Name | None = None
    """Run that it continues, or whose sessions it judges."""
    by: By = ""


class RunView(msgspec.Struct, frozen=True, kw_only=True):
    """A run: a training, an evaluation, a generation, a rejudging, or other tasks."""

    name: str
    kind: RunKind
    created: float
    updated: float
    """Last start, end or report."""
    ended: float | None = None
    """None while it runs, and if it was killed."""
    parent: str | None = None
    by: str = ""
    step: int | None = None
    """Latest reported step of a trainer; 0 for another run that has reported its cost."""
    configuration: dict[str, Any] = {}
    """Left out of lists."""


class VerdictView(msgspec.Struct, frozen=True, kw_only=True):
    """A verdict on a session."""

    number: int
    """1 for that of its evaluation."""
    in_force: bool
    """Whether the session's result has its reward."""
    at: float
    by: str = ""
    """Who had the session judged again."""
    run: str | None = None
    """Run that judged it."""
    evaluator: str
    """Name of the evaluator."""
    digest: str = ""
    """Digest of the evaluator's options and files; empty for verdict 1."""
    round: int = 1
    """2 for the second verdict of the same evaluator."""
    reward: Reward | None
    """None if the evaluation failed, which only verdict 1 can have."""
    report: dict[str, Any] = {}


class VerdictChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Choice of the verdicts that are in force."""

    sessions: Annotated[
        dict[Name, Annotated[int, Meta(ge=1, le=2**31 - 1)]], Meta(min_length=1, max_length=1000)
    ]
    """Number of the verdict on each session."""


class RejudgeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request to judge recorded sessions again, on the nodes that have the recordings."""

    run: Name
    """Run to which the work belongs, of kind ``rejudge``."""
    sessions: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=1000)]
    evaluator: PluginSpec | None = None
    """None: that of each task."""
    rounds: Annotated[int, Meta(ge=1, le=10)] = 1
    """Verdicts on each session."""


class Rejudging(msgspec.Struct, frozen=True, kw_only=True):
    """Work of a `RejudgeRequest`, which is queued once for each session, evaluator and round."""

    tasks: dict[str, tuple[str, ...]]
    """Tasks that judge each session, by round."""
    digests: dict[str, str]
    """Digest of the evaluator for each of these sessions."""
    refused: dict[str, str] = {}
    """Why other sessions cannot be judged."""
