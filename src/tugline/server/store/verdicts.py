"""Verdicts on sessions: their history, and the choice of the one in force.

Judging a session again only adds to the history. Once another verdict is put in force, the
session's result has its reward; if that changes the reward, the result moves to a new position, so
that every consumer gets it, once, wherever it is. A released group moves behind it.

Verdict 1 is that of the session's evaluation. It is in the trajectory until another one replaces
it, and then in the table.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from tugline.errors import Missing
from tugline.protocol import EventKind, ResultView, VerdictView
from tugline.server.store import events, runs, sessions, tasks
from tugline.server.store.base import Tx, to_struct
from tugline.server.store.sessions import SessionRow, decode_view
from tugline.types import Failure, Reward, Status

_COLUMNS = "number, in_force, at, by, run, evaluator, digest, round, reward, report"
_ROWS = _COLUMNS.replace("by", "judged_by")
_encode = msgspec.msgpack.encode


class History(NamedTuple):
    """Result of a session, and its verdicts in the table."""

    result: ResultView
    blob: str
    """Name of its trajectory's blob."""
    digest: str
    """Digest of its trajectory."""
    epoch: int
    evaluator: str
    """Name of the evaluator of its task."""
    verdicts: tuple[VerdictView, ...]

    @property
    def has_first(self) -> bool:
        """Whether verdict 1 is in the table, and not in the trajectory."""
        return any(each.number == 1 for each in self.verdicts)


class Revision(NamedTuple):
    """A trajectory with another verdict in force."""

    session: str
    number: int
    replaces: str
    """Digest of the trajectory that it is made from."""
    first: VerdictView | None
    """Verdict 1, if it is not in the table."""
    digest: str
    blob: str
    bytes: int
    reward: Reward
    status: Status
    failure: Failure | None
    is_changed: bool
    """Whether the reward is another one."""


def add(tx: Tx, judging: SessionRow, reward: Reward, report: dict[str, Any]) -> None:
    """Add a verdict on a recorded session, unless that has run again since, or is deleted."""
    task = tasks.body(tx, judging.task)
    judged = task.judges
    query = "SELECT epoch FROM sessions WHERE id = :session"
    if judged is None or tx.fetch_value(query, session=judged.session) != judged.epoch:
        return
    query = "SELECT MAX(number) FROM verdicts WHERE session = :session"
    last = tx.fetch_value(query, session=judged.session) or 1
    view = VerdictView(
        number=last + 1,
        in_force=False,
        at=tx.now,
        by=runs.get(tx, judging.run).by if judging.run else "",
        run=judging.run,
        evaluator=task.evaluator.name,
        digest=judged.digest,
        round=judged.round,
        reward=reward,
        report=report,
    )
    _insert(tx, judged.session, view)


def _insert(tx: Tx, session: str, view: VerdictView) -> None:
    row = msgspec.structs.asdict(view) | {"session": session, "in_force": int(view.in_force)}
    row["judged_by"] = row.pop("by")
    row["reward"] = None if view.reward is None else _encode(view.reward)
    tx.insert("verdicts", {**row, "report": _encode(view.report)})


def read_history(tx: Tx, session: str) -> History:
    """Read the verdicts on a session. Raises `Missing`, also without a result."""
    entry = sessions.get(tx, session)
    missing = Missing(f"session {session!r} has no result yet")
    query = "SELECT view, blob, digest FROM results WHERE session = :session"
    view, blob, digest = tx.require_one(query, missing, session=session)
    rows = tx.all(
        f"SELECT {_ROWS} FROM verdicts WHERE session = :session ORDER BY number",  # noqa: S608 - constants
        session=session,
    )
    verdicts = tuple(
        to_struct(
            VerdictView,
            _COLUMNS,
            row,
            in_force=bool(row[1]),
            reward=None if row[8] is None else msgspec.msgpack.decode(row[8], type=Reward),
            report=msgspec.msgpack.decode(row[9]),
        )
        for row in rows
    )
    name = tasks.body(tx, entry.task).evaluator.name
    return History(decode_view(view), blob, digest, entry.epoch, name, verdicts)


# --------------------------------------------------------------------------- in force
def put_in_force(tx: Tx, revisions: Sequence[Revision]) -> list[ResultView] | None:
    """Put verdicts in force together; return the results. None if a result has changed meanwhile.

    A group is released again once, behind all of its results.
    """
    for each in revisions:
        query = "SELECT digest FROM results WHERE session = :session"
        if tx.fetch_value(query, session=each.session) != each.replaces:
            return None
    views = [_revise(tx, each) for each in revisions]
    changed = {view.task for view, each in zip(views, revisions, strict=True) if each.is_changed}
    _release_again(tx, changed)
    return views


def _revise(tx: Tx, revision: Revision) -> ResultView:
    session = revision.session
    if revision.first is not None:
        _insert(tx, session, replace(revision.first, in_force=False))
    tx.run(
        "UPDATE verdicts SET in_force = CASE WHEN number = :number THEN 1 ELSE 0 END"
        " WHERE session = :session",
        session=session,
        number=revision.number,
    )
    query = "SELECT view FROM results WHERE session = :session"
    before = decode_view(tx.fetch_value(query, session=session))
    view = replace(
        before,
        reward=revision.reward.value,
        status=revision.status,
        failure=revision.failure,
        bytes=revision.bytes,
    )
    tx.update("sessions", session, reward=view.reward)
    if revision.is_changed:
        view = _move(tx, view, revision.number)
    tx.run(
        "UPDATE results SET position = :position, digest = :digest, blob = :blob, view = :view"
        " WHERE session = :session",
        session=session,
        position=view.position,
        digest=revision.digest,
        blob=revision.blob,
        view=_encode(view),
    )
    if before.reward is None:
        _count_usable(tx, before, view)
    return view


def _move(tx: Tx, view: ResultView, number: int) -> ResultView:
    """Return a result with another reward at the position of a new event."""
    view = replace(view, revision=view.revision + 1)
    detail: dict[str, str | int | float] = {"verdict": number, "revision": view.revision}
    if view.reward is not None:
        detail["reward"] = view.reward
    note = events.Note(view.task, view.session, view.node, detail)
    position = events.add(tx, EventKind.REVISED, note)
    query = "SELECT callback FROM tasks WHERE id = :task"
    if callback := tx.fetch_value(query, task=view.task):
        kind = EventKind.RESULT
        events.replace_delivery(tx, view.position, position, view.task, kind, callback)
    tx.notify("results")
    return replace(view, position=position)


def _count_usable(tx: Tx, before: ResultView, now: ResultView) -> None:
    """Count a session whose evaluation had failed as one with a reward."""
    tx.update("sessions", now.session, status=now.status.value, usable=1)
    tx.run("UPDATE tasks SET usable = usable + 1 WHERE id = :task", task=now.task)
    tx.advance(before.status.value, -1)
    tx.advance(now.status.value)


def _release_again(tx: Tx, changed: Iterable[str]) -> None:
    """Move released tasks behind their changed results."""
    for task, usable, callback, before in tx.all(
        "SELECT id, usable, callback, released FROM tasks WHERE id IN :ids AND released IS NOT NULL"
        " ORDER BY released",
        ids=sorted(changed),
    ):
        note = events.Note(task, detail={"usable": usable})
        position = events.add(tx, EventKind.RELEASED, note)
        tx.update("tasks", task, released=position)
        tx.notify("releases")
        if callback:
            kind = EventKind.RELEASED
            events.replace_delivery(tx, before, position, task, kind, callback)
