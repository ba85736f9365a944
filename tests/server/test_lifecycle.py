"""Invariants of the store under random sequences of what nodes, clients and the clock do."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest

from support.tasks import make_task
from tugline.errors import FencedError
from tugline.protocol import (
    CommitOutcome,
    HeldSession,
    NodeRegistration,
    Release,
    Renewal,
    StopKind,
    TaskQuery,
    TaskState,
)
from tugline.server.control import expire
from tugline.server.store import leases, results, sessions, stats, tasks
from tugline.server.store.base import Connection, Driver, Tx
from tugline.server.store.postgres import Postgres
from tugline.server.store.results import End
from tugline.server.store.sqlite import Sqlite
from tugline.types import STAGES, TERMINAL, Boundary, Failure, Group, Session, Stale, Status

LEASE_S = 10.0
T = TypeVar("T")


class Lease(NamedTuple):
    """A lease that a node once had."""

    node: str
    session: str
    epoch: int


class Lifecycle:
    """Clients, nodes whose responses may be lost, and a clock, on one database."""

    def __init__(self, connection: Connection, seed: int) -> None:
        self.connection, self.random = connection, random.Random(seed)
        self.now = 1_000_000.0
        self.numbers = itertools.count()
        self.known: dict[str, set[Lease]] = {}
        """By node: what it believes to hold."""
        self.leases: list[Lease] = []
        """All that were ever given."""
        self.committed: dict[str, End] = {}
        self.cancelled: set[str] = set()
        """Sessions that are not to be leased any more."""
        self.statuses: dict[str, tuple[Status, int]] = {}

    def live(self, steps: int) -> None:
        """Take random steps; then all nodes are lost, a last one joins, and all sessions end."""
        self._join("x")
        for _ in range(steps):
            self.step()
        self._wait(2 * LEASE_S + 100)
        self._wait(LEASE_S + 1)
        self._wait(sessions.MAX_PAUSE_S)
        node = self._join("last")
        give = partial(leases.grant, capacities={node: 50})
        while work := self._do(give).get(node):
            for session in work:
                end = End(Status.COMPLETED, reward=1.0, digest=f"end {next(self.numbers)}")
                self._commit_result(Lease(node, session.id, session.epoch), end)
        self.check()
        listed = self._do(lambda tx: tasks.page(tx, TaskQuery(limit=1000))).tasks
        assert all(task.state is TaskState.RELEASED for task in listed)

    # ------------------------------------------------------------------ what happens
    def step(self) -> None:
        """Take one random step and check the invariants."""
        names = ["grant"] * 5 + ["renew"] * 5 + ["commit"] * 6 + ["submit"] * 3 + ["wait"] * 2
        names += ["join", "commit_again", "release", "cancel", "announce"]
        getattr(self, f"_{self.random.choice(names)}")()
        self.check()

    def _submit(self) -> None:
        """A client submits a task."""
        draw = self.random.choice
        task = make_task(
            f"t{next(self.numbers)}",
            draw([1, 2, 4, 6]),
            tenant=draw(["a", "b"]),
            priority=draw([-1, 0, 1]),
            group=Group(
                min_usable=draw([None, None, 1, 2]),
                deadline_s=draw([None, None, 3.0, 30.0]),
                attempts=draw([1, 2, 3]),
                retry_s=draw([0.0, 5.0]),
                max_staleness=draw([None, 0, 1]),
                on_stale=Stale.ABORT,
            ),
        )
        self._do(partial(tasks.submit, batch=[tasks.pack(task)]))

    def _join(self, name: str = "") -> str:
        """A node starts, or restarts without having left."""
        new = NodeRegistration(name=name or self.random.choice("xy"), slots=2, capacity=4)
        node = self._do(partial(leases.register, registration=new, lease_s=LEASE_S)).node
        self.known[node] = set()
        return node

    def _grant(self) -> None:
        """Nodes get work; sometimes the response is lost."""
        asked = {node: self.random.randint(0, 4) for node in self.known}
        given = self._do(partial(leases.grant, capacities=asked))
        for node, work in given.items():
            assert len(work) <= asked[node]
            self._hold(node, work, lost=self.random.random() < 0.3)

    def _renew(self) -> None:
        """A node renews and follows its orders."""
        if not self.known:
            self._join()
        node = self.random.choice(list(self.known))
        stage = self.random.choice(STAGES)
        held = [HeldSession(lease.session, lease.epoch, stage) for lease in self.known[node]]
        beat = Renewal(held=tuple(held))

        try:
            again, orders = self._do(lambda tx: leases.renew(tx, node, beat, lease_s=LEASE_S))
        except FencedError:
            del self.known[node]
            return
        self._hold(node, again, lost=False)
        has = self._do(lambda tx: sessions.select(tx, "node = :node", node=node))
        mine = {lease[1:] for lease in self.known[node]}
        assert {(entry.id, entry.epoch) for entry in has} <= mine
        for stop in orders.stop:
            lease = Lease(node, stop.session, stop.epoch)
            if stop.reason is StopKind.FENCED:
                self.known[node].discard(lease)
            elif stop.reason is StopKind.STALE or self.random.random() < 0.3:
                self._release_lease(lease, None)
            elif self.random.random() < 0.7:  # the others stop too late
                self._commit_result(lease, End(Status.CANCELLED, digest=f"d{next(self.numbers)}"))

    def _commit(self) -> None:
        """Commit a result for any past lease, also one of a lost node."""
        if not self.leases:
            return
        lease = self.random.choice(self.leases[-12:])
        digest = f"d{next(self.numbers)}"
        end = End(Status.COMPLETED, reward=self.random.choice([None, 0.0, 1.0]), digest=digest)
        if self.random.random() < 0.4:
            failure = Failure(self.random.choice(list(Boundary)), "so it is")
            end = End(Status.FAILED, failure, digest=digest)
        self._commit_result(lease, end)

    def _commit_again(self) -> None:
        """The response to a commit was lost, and it is sent again."""
        if not self.committed:
            return
        session = self.random.choice(sorted(self.committed))
        again = partial(leases.commit, session=session, epoch=0, end=self.committed[session])
        assert self._do(again) is CommitOutcome.ALREADY

    def _release(self) -> None:
        """A node releases a session that it holds, or once held."""
        if self.leases:
            lease = self.random.choice(self.leases[-12:])
            self._release_lease(lease, self.random.choice([None, *Boundary]))

    def _cancel(self) -> None:
        """A client cancels a session or a task."""
        entries = self._do(lambda tx: sessions.select(tx, "1 = 1 ORDER BY place"))
        if not entries:
            return
        entry = self.random.choice(entries)
        if self.random.random() < 0.3:
            response = self._do(partial(results.cancel_task, task=entry.task, by="me"))
        else:
            response = self._do(partial(results.cancel_session, session=entry.id, by="me"))
        self.cancelled |= {*response.ended, *response.stopping}

    def _announce(self) -> None:
        """New weights."""
        version = next(self.numbers)
        self._do(lambda tx: tx.run("UPDATE control SET version = :version", version=version))
        self._do(partial(leases.abort_stale, version=version))

    def _wait(self, seconds: float = 0) -> None:
        """Time passes; leases and deadlines expire."""
        self.now += seconds or self.random.choice([0.5, 2.0, 6.0])
        self._do(partial(expire, lease_s=LEASE_S))

    # ------------------------------------------------------------------ what must hold
    def check(self) -> None:
        """At most one result, none of a stale lease, no session stuck, counts that add up."""
        self._do(self._check)

    def _check(self, tx: Tx) -> None:
        entries = {entry.id: entry for entry in sessions.select(tx, "1 = 1")}
        alive = {node for (node,) in tx.all("SELECT id FROM nodes WHERE state <> 'gone'")}
        page = results.page(tx, 0, 10_000)
        positions = [item.position for item in page.items]
        assert positions == sorted(set(positions))
        over = {item.session: item for item in page.items}
        assert len(over) == len(page.items)
        for entry in entries.values():
            status = Status(entry.status)
            assert (status in TERMINAL) == (entry.id in over)
            assert (entry.node in alive) if entry.leased else entry.node is None
            self._check_order(entry.id, status, entry.epoch)
            if entry.id in self.cancelled and entry.id not in self.committed:
                assert status in {Status.CANCELLED, *STAGES}, "it is not queued again"
        for session, end in self.committed.items():
            assert results.read_digest(tx, session) == end.digest
        for task in tasks.page(tx, TaskQuery(limit=1000)).tasks:
            own = [entry for entry in entries.values() if entry.task == task.id]
            ended = all(Status(entry.status) in TERMINAL for entry in own)
            assert (task.state is TaskState.RELEASED) == ended
            rewarded = {
                over[e.id].sample for e in own if e.id in over and over[e.id].reward is not None
            }
            assert task.usable == len(rewarded)
            assert not ended or set(task.missing) == set(range(task.samples)) - rewarded
        counts = stats.counts(tx).sessions
        for status in Status:
            assert counts.get(status, 0) == sum(e.status == status for e in entries.values())

    def _check_order(self, session: str, status: Status, epoch: int) -> None:
        before, old = self.statuses.get(session, (Status.QUEUED, 0))
        assert epoch >= old
        assert status is before or before not in TERMINAL
        if epoch == old and {before, status} <= {*STAGES}:
            assert STAGES.index(before) <= STAGES.index(status)
        self.statuses[session] = (status, epoch)

    # ------------------------------------------------------------------ below
    def _do(self, op: Callable[[Tx], T]) -> T:
        self.connection.begin(durable=False)
        self.connection.now = self.now
        try:
            value = op(self.connection)
        except BaseException:
            self.connection.rollback()
            raise
        self.connection.commit()
        return value

    def _hold(self, node: str, work: tuple[Session, ...] | list[Session], *, lost: bool) -> None:
        for session in work:
            lease = Lease(node, session.id, session.epoch)
            self.leases.append(lease)
            if not lost:
                self.known[node].add(lease)

    def _commit_result(self, lease: Lease, end: End) -> None:
        current = self._do(partial(sessions.get, session=lease.session))
        holds = current.leased and current.epoch == lease.epoch
        commit = partial(leases.commit, session=lease.session, epoch=lease.epoch, end=end)
        try:
            outcome = self._do(commit)
        except FencedError:
            assert not holds
        else:
            assert holds
            assert outcome is CommitOutcome.COMMITTED or current.stop != StopKind.CANCELLED
            if outcome is CommitOutcome.COMMITTED:
                assert lease.session not in self.committed
                self.committed[lease.session] = end
        self.known.get(lease.node, set()).discard(lease)

    def _release_lease(self, lease: Lease, boundary: Boundary | None) -> None:
        release = Release(epoch=lease.epoch, reason="no more", boundary=boundary)
        before = self._do(partial(sessions.get, session=lease.session))
        try:
            self._do(partial(leases.release, session=lease.session, release=release))
        except FencedError:
            assert not (before.leased and before.epoch == lease.epoch)
        else:
            after = self._do(partial(sessions.get, session=lease.session))
            if boundary is None and before.stop is None:
                assert (after.status, after.attempt) == (Status.QUEUED, before.attempt)
        self.known.get(lease.node, set()).discard(lease)


def _run(store: Driver, seed: int, steps: int) -> None:
    store.prepare()
    with contextlib.closing(store.connect()) as connection:
        try:
            Lifecycle(connection, seed).live(steps)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
    store.release()


def test_lifecycle_on_sqlite(tmp_path: Path) -> None:
    """Random sequences of submissions, leases, losses and results keep all invariants."""
    for seed in range(25):
        _run(Sqlite(tmp_path / f"{seed}.db"), seed, 120)


@pytest.mark.parametrize("seed", [100, 101])
def test_lifecycle_on_postgres(postgres_url: str, seed: int) -> None:
    """A few of the same sequences hold on PostgreSQL."""
    _run(Postgres(postgres_url), seed, 80)
