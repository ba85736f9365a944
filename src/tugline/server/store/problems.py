"""Results of runs by problem, from the columns of sessions: no result is read.

The index ``sessions_by_problem`` has all that is summed.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from tugline.protocol import ProblemScore, RunKind
from tugline.server.store import runs
from tugline.server.store.base import Tx
from tugline.types import HELD_OUT, INSTANCE, PASS

_ENDED = "run = :run AND status IN ('completed', 'failed', 'timed_out')"
"""Condition of the index."""
_BATCH = 500
_OWN = {HELD_OUT, INSTANCE}
"""Tags that a problem has itself."""


class Scope(NamedTuple):
    """Scope of the sessions of a run."""

    run: str
    first: int | None = None
    last: int | None = None
    held_out: bool | None = None


def find_evaluation(tx: Tx, run: str) -> Scope:
    """Return the last evaluation of a training, or all of another run. Raises `Missing`."""
    if runs.get(tx, run).kind is not RunKind.TRAIN:
        return Scope(run)
    query = f"SELECT MAX(version) FROM sessions WHERE {_ENDED} AND held_out = 1"  # noqa: S608 - constants
    version = tx.fetch_value(query, run=run)
    return Scope(run, version, version, held_out=True)


def list_scores(tx: Tx, scope: Scope) -> list[ProblemScore]:
    """Return the problems of a part of a run, by name. Raises `Missing`."""
    runs.require(tx, scope.run)
    where, values = _match(scope)
    rows = tx.all(
        "SELECT p.problem, t.tags, p.held_out, p.sessions, p.rewarded, p.solved, p.total FROM ("  # noqa: S608 - constants
        " SELECT problem, MAX(held_out) AS held_out, COUNT(*) AS sessions,"
        " COUNT(reward) AS rewarded, SUM(reward) AS total, MIN(place) AS place,"
        " SUM(CASE WHEN reward >= :passing THEN 1 ELSE 0 END) AS solved"
        f" FROM sessions WHERE {where} GROUP BY problem) AS p"
        " JOIN sessions s ON s.place = p.place JOIN tasks t ON t.id = s.task ORDER BY p.problem",
        passing=PASS,
        **values,
    )
    decode = msgspec.json.decode
    return [
        ProblemScore(
            problem=problem,
            tags={name: text for name, text in decode(tags).items() if name not in _OWN},
            held_out=bool(held_out),
            sessions=sessions,
            rewarded=rewarded,
            solved=int(solved),
            reward=total / rewarded if rewarded else None,
        )
        for problem, tags, held_out, sessions, rewarded, solved, total in rows
    ]


def list_rewards(
    tx: Tx, scope: Scope, problems: Sequence[str]
) -> Iterator[tuple[str, float | None, int]]:
    """Yield each reward of some problems, with the place of the first session that has it."""
    where, values = _match(scope)
    query = (
        f"SELECT problem, reward, MIN(place) FROM sessions WHERE {where}"  # noqa: S608 - constants
        " AND problem IN :problems GROUP BY problem, reward"
    )
    for start in range(0, len(problems), _BATCH):
        yield from tx.all(query, problems=problems[start : start + _BATCH], **values)


def name_sessions(tx: Tx, places: Sequence[int]) -> dict[int, str]:
    """Return the ids of sessions by their places."""
    ids: dict[int, str] = {}
    for start in range(0, len(places), _BATCH):
        some = places[start : start + _BATCH]
        ids |= dict(tx.all("SELECT place, id FROM sessions WHERE place IN :places", places=some))
    return ids


def _match(scope: Scope) -> tuple[str, dict[str, object]]:
    """Return the condition of a part, and its values."""
    values = {
        "run": scope.run,
        "first": scope.first or 0,
        "last": 2**62 if scope.last is None else scope.last,
        "held_out": (0, 1) if scope.held_out is None else (int(scope.held_out),),
    }
    return f"{_ENDED} AND held_out IN :held_out AND version BETWEEN :first AND :last", values
