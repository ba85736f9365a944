"""Messages about the results of runs by problem, and how they changed.

A problem is what the submissions of one task to a run have in common, such as those of each step
of a training: the tag ``instance``, or the task's id without its step.
"""

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from tugline.protocol.clients import Name

_Version = Annotated[int, Meta(ge=0, le=2**53 - 1)]


class Estimate(msgspec.Struct, frozen=True):
    """A mean over tasks with its 95 % interval."""

    value: float
    low: float
    high: float
    tasks: int


class ProblemQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Part of the sessions of a run."""

    first: _Version | None = None
    """First version of the weights, when the session was leased."""
    last: _Version | None = None
    """Last version of the weights."""
    held_out: bool | None = None
    """Only sessions of held-out tasks, or only the others."""


class ProblemScore(msgspec.Struct, frozen=True, kw_only=True):
    """Ended sessions of a problem, without cancelled ones."""

    problem: str
    tags: dict[str, str]
    """Those of one of its tasks, without ``instance`` and ``held_out``."""
    held_out: bool
    sessions: int
    rewarded: int
    """Sessions with a reward."""
    solved: int
    reward: float | None
    """Mean of the rewards."""


class Measure(StrEnum):
    """What is compared of the sessions of a problem that have a reward."""

    SOLVED = "solved"
    """Share of solved sessions."""
    REWARD = "reward"
    """Mean reward."""


class ChangeQuery(ProblemQuery, frozen=True, kw_only=True):
    """Two parts of the sessions of runs: before, and now.

    Without any version and `held_out`, the parts are those of the runs' evaluations: of a training,
    the held-out tasks at the last version that they were tried with; of another run, everything.
    The two parts must differ.
    """

    before: Name | None = None
    """Run to compare with; by default the same."""
    before_first: _Version | None = None
    """First version of the weights of the part before."""
    before_last: _Version | None = None
    """Last version of the weights of the part before."""
    measure: Measure = Measure.SOLVED
    """What is compared: the share of solved sessions, or the mean reward."""
    limit: Annotated[int, Meta(ge=1, le=1000)] = 50
    """Maximum number of problems in each list."""


class RunPart(msgspec.Struct, frozen=True, kw_only=True):
    """What was compared of a run."""

    run: str
    first: int | None
    """First version; None: from the first on."""
    last: int | None
    held_out: bool | None
    problems: int
    """Problems with a reward."""
    sessions: int
    rewarded: int
    value: float | None
    """Mean of the problems."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """Values of a problem or a tag: before, and now."""

    name: str
    """Problem, or tag as ``name=value``."""
    before: float | None
    """None without a reward."""
    now: float | None
    problems: tuple[int, int]
    """Problems with a reward."""
    sessions: tuple[int, int]
    rewarded: tuple[int, int]
    pair: tuple[str, str] | None
    """Sessions with rewards near both values, of the same problem if possible."""


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of two parts of runs."""

    before: RunPart
    now: RunPart
    difference: Estimate | None
    """Now minus before, mean over the problems of both parts; None if there is none."""
    pair: tuple[str, str] | None
    """Sessions with rewards near the means of both parts, of the same problem if possible."""
    tags: tuple[Change, ...]
    """Tags that not every problem has, the largest change first. A mean is over the problems of
    both parts if these are at least half of either, and otherwise over those of each part."""
    better: tuple[Change, ...]
    """Problems with a higher value now, the largest change first."""
    worse: tuple[Change, ...]
    unrewarded: tuple[Change, ...]
    """Problems that had rewards, and whose sessions have none now."""
    counts: dict[str, int]
    """Number of problems that are ``better``, ``worse``, ``unrewarded`` and ``same``."""
