"""Which sessions there are and what came of them, kept so that ``kill -9`` loses nothing (I3).

One SQLite file, one writer connection, write-ahead log. Whatever the caller may act upon (a task
is in, a lease is out, a result is kept) is on the disk when the method returns; mere progress is
not waited for. A lease carries an epoch: a result that comes with an older one is refused, so a
session has exactly one result however often it was leased (fencing).

Methods block for one disk write at most and may be called from any thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Self

import zstandard

from tugline.errors import FencedError, TuglineError, UsageError
from tugline.types import (
    TERMINAL,
    TRANSITIONS,
    Boundary,
    Failure,
    Ledger,
    Session,
    Status,
    Task,
    Trajectory,
    decode,
    encode,
)

_VERSION = 1
_SCHEMA = """
CREATE TABLE tasks (id TEXT PRIMARY KEY, body BLOB NOT NULL, created REAL NOT NULL) STRICT;
CREATE TABLE sessions (
    place INTEGER PRIMARY KEY,   -- order of submission
    id TEXT NOT NULL UNIQUE,
    task TEXT NOT NULL REFERENCES tasks (id),
    sample INTEGER NOT NULL,
    attempt INTEGER NOT NULL DEFAULT 0,
    epoch INTEGER NOT NULL DEFAULT 0,
    status TEXT NOT NULL,
    node TEXT,                   -- who holds the lease
    deadline REAL,               -- when the lease ends, Unix seconds
    segment TEXT,                -- where its calls are recorded
    created REAL NOT NULL,
    updated REAL NOT NULL
) STRICT;
CREATE INDEX sessions_by_status ON sessions (status, place);
CREATE INDEX sessions_by_task ON sessions (task);
CREATE TABLE results (
    session TEXT PRIMARY KEY REFERENCES sessions (id), digest TEXT NOT NULL, body BLOB NOT NULL
) STRICT;
"""
_SESSION = "id, task, sample, attempt, epoch, status"
_RUNNING = ", ".join(f"'{status}'" for status in Status if status not in TERMINAL | {Status.QUEUED})


class Store:
    """Tasks, sessions and results in the SQLite file at `path`, which is made if missing.

    A session whose node was lost is tried again until it had `max_attempts` attempts.
    """

    def __init__(self, path: Path, *, max_attempts: int = 3) -> None:
        self._path = path
        self._max_attempts = max_attempts
        self._lock = threading.RLock()
        with self._explained():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            try:
                self._open()
            except BaseException:
                self._db.close()
                raise

    def close(self) -> None:
        """Let go of the file. Idempotent."""
        with self._lock:
            self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    # ------------------------------------------------------------------ tasks in
    def submit(self, task: Task) -> list[Session]:
        """Keep `task` and its sessions; the same task again gives the sessions it has by now.

        Raises `UsageError` when another task has this id.
        """
        if task.samples < 1:
            msg = f"task {task.id!r}: samples is {task.samples}, must be 1 or more"
            raise UsageError(msg)
        data, now = encode(task), time.time()
        with self._transaction():
            known = self._db.execute("SELECT body FROM tasks WHERE id = ?", (task.id,)).fetchone()
            if known is None:
                self._db.execute(
                    "INSERT INTO tasks VALUES (?, ?, ?)", (task.id, _packed(data), now)
                )
                self._db.executemany(
                    "INSERT INTO sessions (id, task, sample, status, created, updated)"
                    " VALUES (?, ?, ?, ?, ?, ?)",
                    [
                        (f"{task.id}-{n}", task.id, n, Status.QUEUED.value, now, now)
                        for n in range(task.samples)
                    ],
                )
            elif decode(_unpacked(known[0]), Task) != decode(data, Task):
                msg = f"task {task.id!r} was submitted before with other content; use another id"
                raise UsageError(msg)
            return self._sessions("task = ? ORDER BY sample", task.id)

    def task(self, task_id: str) -> Task:
        """The task as it was submitted. Raises `UsageError` for an unknown id."""
        with self._transaction():
            row = self._db.execute("SELECT body FROM tasks WHERE id = ?", (task_id,)).fetchone()
        if row is None:
            msg = f"no task {task_id!r}"
            raise UsageError(msg)
        return decode(_unpacked(row[0]), Task)

    # ------------------------------------------------------------------ leases
    def lease(self, n: int, owner: str, ttl_s: float) -> list[Session]:
        """Give up to `n` queued sessions, oldest first, to `owner` for `ttl_s` seconds."""
        now = time.time()
        with self._transaction():
            queued = self._sessions("status = 'queued' ORDER BY place LIMIT ?", n)
            self._db.executemany(
                "UPDATE sessions SET status = 'init', epoch = epoch + 1, node = ?, deadline = ?,"
                " updated = ? WHERE id = ?",
                [(owner, now + ttl_s, now, session.id) for session in queued],
            )
            return [self._session(session.id) for session in queued]

    def renew(self, owner: str, ttl_s: float) -> None:
        """Make all leases of `owner` last `ttl_s` seconds from now."""
        with self._transaction(durable=False):
            self._db.execute(
                f"UPDATE sessions SET deadline = ? WHERE node = ? AND status IN ({_RUNNING})",  # noqa: S608 - constants
                (time.time() + ttl_s, owner),
            )

    def advance(
        self, session_id: str, epoch: int, status: Status, *, segment: Path | None = None
    ) -> None:
        """Note that a leased session is in its next stage, and where its calls are recorded.

        Not waited for on the disk: after a power cut the session may be found a stage earlier.
        Raises `FencedError` for a lost lease, `TuglineError` for a stage that may not follow.
        """
        with self._transaction(durable=False):
            current = self._held(session_id, epoch)
            if status not in TRANSITIONS[current.status] or status in TERMINAL:
                msg = f"session {session_id}: {status} may not follow {current.status}"
                raise TuglineError(msg)
            self._db.execute(
                "UPDATE sessions SET status = ?, segment = COALESCE(?, segment), updated = ?"
                " WHERE id = ?",
                (status.value, str(segment) if segment else None, time.time(), session_id),
            )

    def release(self, session_id: str, epoch: int, why: str) -> Session:
        """Give a session back after an infrastructure failure: queued again, or failed for good.

        Raises `FencedError` for a lost lease.
        """
        with self._transaction():
            self._give_up(self._held(session_id, epoch), why)
            return self._session(session_id)

    def expire(self, now: float | None = None) -> list[Session]:
        """Release every session whose lease has run out; returns them as they are then."""
        at = time.time() if now is None else now
        return self._release_all("deadline < ?", at, "its lease ran out")

    def reclaim(self, owner: str) -> list[Session]:
        """Release every session of an owner that is known to be dead."""
        return self._release_all("node = ?", owner, f"node {owner} was lost")

    # ------------------------------------------------------------------ results out
    def commit(self, session_id: str, epoch: int, trajectory: Trajectory) -> None:
        """Keep a result, once. The same result again is fine, whatever its epoch.

        Raises `FencedError` when the lease was lost or another result is there already.
        """
        if trajectory.session != session_id or trajectory.status not in TERMINAL:
            msg = (
                f"a result of session {session_id} must name it and be final, this one is"
                f" {trajectory.session} {trajectory.status}"
            )
            raise TuglineError(msg)
        data = encode(trajectory)
        digest = hashlib.sha256(data).hexdigest()
        body = _packed(data)
        with self._transaction():
            kept = self._db.execute(
                "SELECT digest FROM results WHERE session = ?", (session_id,)
            ).fetchone()
            if kept is not None and kept[0] == digest:
                return
            self._held(session_id, epoch)
            self._finish(session_id, trajectory.status, digest, body)

    def results(self, task_ids: Iterable[str] | None = None) -> list[Trajectory]:
        """Results of these tasks (None: of all) so far, in order of submission."""
        chosen = None if task_ids is None else json.dumps(list(task_ids))
        with self._transaction():
            rows = self._db.execute(
                "SELECT body FROM results JOIN sessions ON id = session"
                " WHERE ?1 IS NULL OR task IN (SELECT value FROM json_each(?1)) ORDER BY place",
                (chosen,),
            ).fetchall()
        return [decode(_unpacked(body), Trajectory) for (body,) in rows]

    def sessions(self, task_id: str) -> list[Session]:
        """A task's sessions, by sample."""
        with self._transaction():
            return self._sessions("task = ? ORDER BY sample", task_id)

    def counts(self) -> dict[Status, int]:
        """How many sessions there are in each status."""
        with self._transaction():
            rows = self._db.execute("SELECT status, COUNT(*) FROM sessions GROUP BY 1").fetchall()
        return dict.fromkeys(Status, 0) | {Status(status): count for status, count in rows}

    # ------------------------------------------------------------------ within a transaction
    def _sessions(self, where: str, *values: object) -> list[Session]:
        rows = self._db.execute(f"SELECT {_SESSION} FROM sessions WHERE {where}", values)  # noqa: S608 - constants
        return [
            Session(id=i, task=t, sample=n, attempt=a, epoch=e, status=Status(s))
            for i, t, n, a, e, s in rows
        ]

    def _session(self, session_id: str) -> Session:
        found = self._sessions("id = ?", session_id)
        if not found:
            msg = f"no session {session_id!r}"
            raise UsageError(msg)
        return found[0]

    def _held(self, session_id: str, epoch: int) -> Session:
        """The session, if `epoch` is that of a lease which still holds."""
        session = self._session(session_id)
        if session.epoch != epoch or session.status in TERMINAL | {Status.QUEUED}:
            msg = (
                f"session {session_id} is {session.status} at epoch {session.epoch};"
                f" the lease of epoch {epoch} is lost"
            )
            raise FencedError(msg)
        return session

    def _release_all(self, where: str, value: object, why: str) -> list[Session]:
        with self._transaction():
            lost = self._sessions(f"{where} AND status IN ({_RUNNING})", value)
            for session in lost:
                self._give_up(session, why)
            return [self._session(session.id) for session in lost]

    def _give_up(self, session: Session, why: str) -> None:
        if session.attempt + 1 < self._max_attempts:
            self._db.execute(
                "UPDATE sessions SET status = 'queued', attempt = attempt + 1, node = NULL,"
                " deadline = NULL, segment = NULL, updated = ? WHERE id = ?",
                (time.time(), session.id),
            )
            return
        failed = Trajectory(
            session=session.id,
            task=session.task,
            sample=session.sample,
            status=Status.FAILED,
            traces=(),
            ledger=Ledger(),
            failure=Failure(
                Boundary.INFRASTRUCTURE, f"{why} (attempt {session.attempt + 1}, the last)"
            ),
        )
        data = encode(failed)
        digest = hashlib.sha256(data).hexdigest()
        self._finish(session.id, Status.FAILED, digest, _packed(data))

    def _finish(self, session_id: str, status: Status, digest: str, body: bytes) -> None:
        self._db.execute("INSERT INTO results VALUES (?, ?, ?)", (session_id, digest, body))
        self._db.execute(
            "UPDATE sessions SET status = ?, deadline = NULL, updated = ? WHERE id = ?",
            (status.value, time.time(), session_id),
        )

    # ------------------------------------------------------------------ the file
    def _open(self) -> None:
        self._db.execute("PRAGMA busy_timeout = 5000")
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA foreign_keys = ON")
        with self._transaction():
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version == 0:
                for statement in _SCHEMA.split(";\n"):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {_VERSION}")
            elif version != _VERSION:
                msg = f"{self._path} has layout {version}, this version reads {_VERSION}"
                raise UsageError(msg)

    @contextlib.contextmanager
    def _transaction(self, *, durable: bool = True) -> Iterator[None]:
        """All or nothing; on the disk when left, unless `durable` is False."""
        with self._lock, self._explained():
            self._db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            msg = f"store {self._path}: {error}"
            if "full" in str(error):
                msg += "; free some space, nothing that was acknowledged is lost"
            elif "locked" in str(error):
                msg += "; another process is using it"
            raise TuglineError(msg) from error


def _packed(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=3).compress(data)


def _unpacked(body: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(body)
