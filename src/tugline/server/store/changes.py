"""What changed between two parts of runs, by problem and by tag."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from statistics import fmean
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from tugline.errors import Invalid
from tugline.estimates import compare_rates, estimate_difference
from tugline.protocol import Change, ChangeQuery, Changes, Estimate, Measure, ProblemScore, RunPart
from tugline.server.store import problems
from tugline.server.store.base import Tx
from tugline.server.store.problems import Scope

_OVERALL = "overall"
_SAME = 1e-6
"""Difference of mean rewards that is rounding."""
Scores = Mapping[str, ProblemScore]
_Rewarded = tuple[float | None, int]
"""Reward and place of a session."""


class _Side(NamedTuple):
    """One of two parts."""

    scope: Scope
    scores: Scores
    values: Mapping[str, float]
    """Values of the problems with a reward."""


class _Draft(NamedTuple):
    """A change without its pair of sessions."""

    change: Change
    problems: tuple[str, str] | None
    """Of which the sessions are."""


class _Comparison(NamedTuple):
    difference: Estimate | None
    counts: dict[str, int]
    drafts: dict[str, list[_Draft]]
    """By the name of their list."""


def find(tx: Tx, run: str, query: ChangeQuery) -> Changes:
    """Compare two parts of runs. Raises `Missing`, and `Invalid` if both parts are the same."""
    other = query.before or run
    part = (query.first, query.last, query.before_first, query.before_last, query.held_out)
    if all(each is None for each in part):
        now = problems.find_evaluation(tx, run)
        before = problems.find_evaluation(tx, other)
    else:
        now = Scope(run, query.first, query.last, query.held_out)
        before = Scope(other, query.before_first, query.before_last, query.held_out)
    if now._replace(first=now.first or 0) == before._replace(first=before.first or 0):
        msg = (
            f"before is {other!r}, and its versions are those of the part that it is compared with;"
            " set before to another run, or before_first and before_last to other versions than"
            " first and last"
        )
        raise Invalid(msg, field="before")
    sides = (_read(tx, before, query.measure), _read(tx, now, query.measure))
    found = _compare(sides, query)
    listed = _add_pairs(tx, sides, found.drafts)
    [overall] = listed.pop(_OVERALL)
    return Changes(
        before=_summarize(sides[0]),
        now=_summarize(sides[1]),
        difference=found.difference,
        counts=found.counts,
        pair=overall.pair,
        **listed,
    )


def _read(tx: Tx, scope: Scope, measure: Measure) -> _Side:
    scores = {score.problem: score for score in problems.list_scores(tx, scope)}
    values = {name: _value(score, measure) for name, score in scores.items() if score.rewarded}
    return _Side(scope, scores, values)


def _value(score: ProblemScore, measure: Measure) -> float:
    if measure is Measure.REWARD:
        return score.reward or 0.0
    return score.solved / score.rewarded


def _compare(sides: tuple[_Side, _Side], query: ChangeQuery) -> _Comparison:
    """Compare problems and tags, the largest change first."""
    before, now = sides
    shared = [name for name in now.values if name in before.values]
    gaps = {name: now.values[name] - before.values[name] for name in shared}
    if query.measure is Measure.REWARD:
        gaps = {name: gap if abs(gap) > _SAME else 0.0 for name, gap in gaps.items()}
    order = sorted(shared, key=lambda name: -abs(gaps[name]))
    lost = [name for name in before.values if name in now.scores and name not in now.values]
    lists = {
        "better": [name for name in order if gaps[name] > 0],
        "worse": [name for name in order if gaps[name] < 0],
        "unrewarded": lost,
    }
    counts = {name: len(found) for name, found in lists.items()}
    everything = [*{**before.scores, **now.scores}]
    drafts = {
        name: [_draft(sides, each, (each,)) for each in found[: query.limit]]
        for name, found in lists.items()
    }
    return _Comparison(
        difference=_estimate(sides, gaps, query.measure),
        counts=counts | {"same": len(shared) - counts["better"] - counts["worse"]},
        drafts=drafts | {"tags": _compare_tags(sides), _OVERALL: [_draft(sides, "", everything)]},
    )


def _summarize(side: _Side) -> RunPart:
    return RunPart(
        **side.scope._asdict(),
        problems=len(side.values),
        sessions=sum(score.sessions for score in side.scores.values()),
        rewarded=sum(score.rewarded for score in side.scores.values()),
        value=_mean(side.values.values()),
    )


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return fmean(known) if known else None


def _estimate(
    sides: tuple[_Side, _Side], gaps: Mapping[str, float], measure: Measure
) -> Estimate | None:
    """Return the mean of the problems' differences, as `tugline eval` does."""
    if not gaps:
        return None
    before, now = (
        {name: (side.scores[name].rewarded, side.scores[name].solved) for name in gaps}
        for side in sides
    )
    if measure is Measure.SOLVED:
        return compare_rates(now, before).difference
    attempts = min(each[0] for counts in (before, now) for each in counts.values())
    return estimate_difference(np.array(list(gaps.values())), 1 / attempts)


def _compare_tags(sides: tuple[_Side, _Side]) -> list[_Draft]:
    """Return the change of each tag that tells problems apart, the largest first."""
    scores = {**sides[0].scores, **sides[1].scores}
    groups: dict[tuple[str, str], list[str]] = {}
    for name, score in scores.items():
        for tag in score.tags.items():
            groups.setdefault(tag, []).append(name)
    sharing = {tag for (tag, _), names in groups.items() if len(names) > 1}
    drafts = [
        _draft(sides, f"{tag}={value}", names)
        for (tag, value), names in groups.items()
        if tag in sharing and len(names) < len(scores)
    ]
    return sorted(drafts, key=lambda draft: _size(draft.change), reverse=True)


def _size(change: Change) -> float:
    """Return the size of a change; that of losing all rewards is the largest."""
    if change.before is None or change.now is None:
        lost = change.before is not None and change.sessions[1]
        return math.inf if lost else -1.0
    return abs(change.now - change.before)


def _draft(sides: tuple[_Side, _Side], name: str, names: Sequence[str]) -> _Draft:
    """Compare these problems: those of both parts if they are at least half of either."""
    rewarded = [[each for each in names if each in side.values] for side in sides]
    shared = [each for each in rewarded[0] if each in sides[1].values]
    if 2 * len(shared) >= min(map(len, rewarded)) and shared:
        rewarded = [shared, shared]
    before, now = (
        _mean(side.values[each] for each in known)
        for side, known in zip(sides, rewarded, strict=True)
    )
    scores = [[side.scores[each] for each in names if each in side.scores] for side in sides]
    change = Change(
        name=name,
        before=before,
        now=now,
        problems=(len(rewarded[0]), len(rewarded[1])),
        sessions=(_sum(scores[0], "sessions"), _sum(scores[1], "sessions")),
        rewarded=(_sum(scores[0], "rewarded"), _sum(scores[1], "rewarded")),
        pair=None,
    )
    return _Draft(change, _choose(sides, names, change))


def _sum(scores: Iterable[ProblemScore], field: str) -> int:
    return sum(getattr(score, field) for score in scores)


# --------------------------------------------------------------------------- pairs of sessions
def _choose(
    sides: tuple[_Side, _Side], names: Sequence[str], change: Change
) -> tuple[str, str] | None:
    """Choose a problem that shows the change, or one of each part; None without sessions."""
    before, now = (side.values for side in sides)
    shared = [name for name in names if name in before and name in now]
    if shared:
        sign = 1.0 if (change.now or 0.0) > (change.before or 0.0) else -1.0
        best = max(shared, key=lambda name: sign * (now[name] - before[name]))
        return best, best
    for name in names:
        if name in sides[0].scores and name in sides[1].scores:
            return name, name
    nearest = [
        min(
            (name for name in names if name in side.scores),
            key=lambda name: abs(side.values.get(name, math.inf) - (value or 0.0)),
            default="",
        )
        for side, value in zip(sides, (change.before, change.now), strict=True)
    ]
    return (nearest[0], nearest[1]) if all(nearest) else None


def _add_pairs(
    tx: Tx, sides: tuple[_Side, _Side], drafts: Mapping[str, Sequence[_Draft]]
) -> dict[str, tuple[Change, ...]]:
    """Add a pair of sessions to each change."""
    every = [draft for listed in drafts.values() for draft in listed]
    rewards = [_read_rewards(tx, side, every, at) for at, side in enumerate(sides)]
    pairs = [_find_pair(sides, draft, rewards) for draft in every]
    ids = problems.name_sessions(tx, sorted({place for pair in pairs for place in pair}))
    changes = (
        replace(draft.change, pair=(ids[pair[0]], ids[pair[1]]) if pair else None)
        for draft, pair in zip(every, pairs, strict=True)
    )
    return {name: tuple(islice(changes, len(listed))) for name, listed in drafts.items()}


def _read_rewards(
    tx: Tx, side: _Side, drafts: Sequence[_Draft], at: int
) -> dict[str, list[_Rewarded]]:
    """Return the rewards of the problems that were chosen for a side."""
    chosen = {draft.problems[at] for draft in drafts if draft.problems is not None}
    rewards: dict[str, list[_Rewarded]] = {name: [] for name in chosen}
    for name, reward, place in problems.list_rewards(tx, side.scope, sorted(chosen)):
        rewards[name].append((reward, place))
    return rewards


def _find_pair(
    sides: tuple[_Side, _Side], draft: _Draft, rewards: Sequence[Mapping[str, Sequence[_Rewarded]]]
) -> tuple[int, ...]:
    """Find the sessions nearest to the means; of two as near, those that differ more."""
    change = draft.change
    if draft.problems is None:
        return ()
    rises = (change.now or 0.0) > (change.before or 0.0)
    return tuple(
        _find_nearest(known[name], side.scores[name].reward or 0.0, highest=highest)
        for known, name, side, highest in zip(
            rewards, draft.problems, sides, (not rises, rises), strict=True
        )
    )


def _find_nearest(known: Sequence[_Rewarded], mean: float, *, highest: bool) -> int:
    def distance(session: _Rewarded) -> tuple[float, float]:
        reward = session[0]
        if reward is None:
            return math.inf, 0.0
        return round(abs(reward - mean), 9), -reward if highest else reward

    return min(known, key=distance)[1]
