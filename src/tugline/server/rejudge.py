"""Judge recorded sessions again: the tasks for it, and trajectories with another verdict in force.

A recorded session is judged by a task with `Task.judges`, which is queued, leased, committed and
retried like any other. Its id is made of what is judged by what, so nothing is judged twice.
"""

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from tugline import protocol
from tugline.errors import Invalid, Missing
from tugline.protocol import ResultView, VerdictView
from tugline.recording.patches import refuse_result
from tugline.recording.trajectories import pack, unpack
from tugline.server.blobs import Blobs, read_blob
from tugline.server.settings import ServerSettings
from tugline.server.store import nodes, results, sessions, tasks, verdicts
from tugline.server.store.base import Tx
from tugline.server.store.database import Database
from tugline.server.store.sessions import decode_view
from tugline.server.store.verdicts import History, Revision
from tugline.server.validation import Check, compute_digest, pack_tasks
from tugline.types import Boundary, Group, PluginSpec, RecordingRef, Status, Task, Trajectory

_MAX_NAME = 100
"""Maximum number of characters of a session's id in the id of a task that judges it."""


def hash_options(spec: PluginSpec) -> str:
    """Return a digest of an evaluator's name and options, without the files that these name."""
    return hashlib.sha256(msgspec.msgpack.encode(spec, order="deterministic")).hexdigest()[:16]


class Recorded(NamedTuple):
    """A session that can be judged again."""

    task: Task
    result: ResultView
    epoch: int
    """Epoch of its recording."""
    node: str
    """Name of the node that ran it."""


def read_recorded(tx: Tx, ids: Sequence[str]) -> tuple[list[Recorded], dict[str, str]]:
    """Return sessions that can be judged again, and why others cannot. Raises `Missing`."""
    rows = {entry.id: entry for entry in sessions.select(tx, "id IN :ids", ids=ids)}
    packed = tx.column("SELECT view FROM results WHERE session IN :ids", ids=ids)
    ended = {view.session: view for view in map(decode_view, packed)}
    found = []
    refused = {}
    for session in dict.fromkeys(ids):
        if session not in rows:
            raise Missing(f"unknown session {session!r}")
        result = ended.get(session)
        if rows[session].judges is not None:
            refused[session] = f"it judges session {rows[session].judges}"
        elif result is None:
            refused[session] = f"it has no result yet: it is {rows[session].status}"
        elif reason := refuse_result(result):
            refused[session] = reason
        elif result.node is None:
            refused[session] = "its node is unknown: it was run by an older version"
        else:
            body = tasks.body(tx, rows[session].task)
            epoch = rows[session].epoch
            found.append(Recorded(body, result, epoch, nodes.name_of(result.node)))
    return found, refused


def make_task(recorded: Recorded, spec: PluginSpec, digest: str, number: int) -> Task:
    """Return the task that judges a session by `spec`, which has this digest, in round `number`."""
    task = recorded.task
    result = recorded.result
    judged = RecordingRef(
        session=result.session,
        epoch=recorded.epoch,
        node=recorded.node,
        digest=digest,
        round=number,
    )
    key = f"{result.session}/{recorded.epoch}/{digest}/{number}"
    unique = hashlib.sha256(key.encode()).hexdigest()[:16]
    return replace(
        task,
        id=f"{result.session[:_MAX_NAME]}.{unique}",
        samples=1,
        evaluator=spec,
        group=Group(attempts=task.group.attempts, retry_s=task.group.retry_s),
        callback=None,
        judges=judged,
    )


# --------------------------------------------------------------------------- in force
def make_first(history: History, trajectory: Trajectory) -> VerdictView:
    """Return the verdict of a session's own evaluation, from its unchanged trajectory."""
    return VerdictView(
        number=1,
        in_force=True,
        at=history.result.created,
        run=history.result.run,
        evaluator=history.evaluator,
        reward=trajectory.reward,
        report=trajectory.report,
    )


def revise(history: History, number: int, data: bytes) -> tuple[Revision, bytes] | None:
    """Return a revision of the encoded trajectory `data`; None if the verdict is in force already.

    Raises `Missing` for an unknown verdict, and `Invalid` for one without a reward.
    """
    session = history.result.session
    before = unpack(data)
    first = None if history.has_first else make_first(history, before)
    verdicts = {each.number: each for each in (*history.verdicts, *([first] if first else []))}
    if number not in verdicts:
        raise Missing(f"session {session!r} has no verdict {number}; the last is {max(verdicts)}")
    chosen = verdicts[number]
    if chosen.reward is None:
        msg = f"number is {number}, but verdict {number} on session {session!r} has no reward"
        raise Invalid(f"{msg}: its evaluation failed", field="number")
    if chosen.in_force:
        return None
    repaired = before.failure is not None and before.failure.boundary is Boundary.EVALUATOR
    is_changed = chosen.reward != before.reward
    after = replace(
        before,
        reward=chosen.reward,
        report=chosen.report,
        revision=history.result.revision + is_changed,
        status=Status.COMPLETED if repaired else before.status,
        failure=None if repaired else before.failure,
    )
    packed = pack(after)
    digest = compute_digest(packed)
    revision = Revision(
        session=session,
        number=number,
        replaces=history.digest,
        first=first,
        digest=digest,
        blob=f"{session}.{history.epoch}.{digest[:12]}",
        bytes=len(packed),
        reward=chosen.reward,
        status=after.status,
        failure=after.failure,
        is_changed=is_changed,
    )
    return revision, packed


class Verdicts:
    """Verdicts on sessions: asking for further ones, their history, and the one in force."""

    def __init__(
        self,
        database: Database,
        blobs: Blobs,
        settings: ServerSettings,
        check: Check,
        fingerprint: Callable[[PluginSpec], str],
    ) -> None:
        """`check` and `fingerprint` are as for `ControlPlane`."""
        self._database = database
        self._blobs = blobs
        self._settings = settings
        self._check = check
        self._fingerprint = fingerprint

    async def rejudge(self, request: protocol.RejudgeRequest) -> protocol.Rejudging:
        """Queue the judging of recorded sessions, unless queued before.

        Raises `Invalid` for an evaluator that is unknown or cannot judge recorded sessions,
        `Missing` for an unknown run or session, and `QuotaExceeded`.
        """
        found, refused = await self._database.read(read_recorded, request.sessions)
        batch: list[tasks.Packed] = []
        ids: dict[str, tuple[str, ...]] = {}
        digests = {}
        known: dict[bytes, str] = {}
        for recorded in found:
            session = recorded.result.session
            spec = request.evaluator or recorded.task.evaluator
            key = msgspec.msgpack.encode(spec, order="deterministic")
            if key not in known:  # it reads files
                known[key] = await asyncio.to_thread(self._fingerprint, spec)
            rounds = range(1, request.rounds + 1)
            judging = [make_task(recorded, spec, known[key], number) for number in rounds]
            try:
                batch += await asyncio.to_thread(pack_tasks, judging, self._check)
            except Invalid as error:
                if request.evaluator is not None:
                    raise
                refused[session] = str(error)
                continue
            ids[session] = tuple(task.id for task in judging)
            digests[session] = known[key]
        await self._database.write(tasks.submit, batch, self._settings, request.run)
        return protocol.Rejudging(tasks=ids, digests=digests, refused=refused)

    async def read(self, session: str) -> list[protocol.VerdictView]:
        """Return the verdicts on a session, by number. Raises `Missing`."""
        history = await self._database.read(verdicts.read_history, session)
        if history.has_first or not history.blob:
            return [*history.verdicts]
        data = await read_blob(self._blobs, history.blob, history.digest)
        first = make_first(history, await asyncio.to_thread(unpack, data))
        return [first, *history.verdicts]

    async def use(self, numbers: Mapping[str, int]) -> list[protocol.ResultView]:
        """Put the verdicts of these numbers in force, all or none; return the results.

        Raises `Missing`, and `Invalid` for a verdict without a reward.
        """
        while True:
            revisions = [
                revision
                for session, number in numbers.items()
                if (revision := await self._revise(session, number)) is not None
            ]
            # None if a result has changed meanwhile; each repetition follows a change by others.
            if await self._database.write(verdicts.put_in_force, revisions) is not None:
                break
        return await self._database.read(lambda tx: [results.get(tx, each) for each in numbers])

    async def _revise(self, session: str, number: int) -> Revision | None:
        """Store a trajectory with another verdict in force; retention removes an unused one."""
        history = await self._database.read(verdicts.read_history, session)
        if not history.blob:
            raise Missing(f"session {session!r} has no verdict, because it never ran")
        data = await read_blob(self._blobs, history.blob, history.digest)
        revised = await asyncio.to_thread(revise, history, number, data)
        if revised is None:
            return None
        revision, packed = revised
        await self._blobs.put(revision.blob, packed)
        return revision
