"""Whatever nodes, clients and the clock do, and in which order: what must hold, holds."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psycopg
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tugline.errors import FencedError
from tugline.protocol import HandBack, Hello, Kept, StopWhy, TaskState
from tugline.protocol import Held as Holding
from tugline.server.database import groups, leases, nodes, results, sessions, tasks
from tugline.server.database.base import Store, Tx
from tugline.server.database.groups import End
from tugline.server.database.postgres import Postgres
from tugline.server.database.sqlite import Sqlite
from tugline.server.timers import expire
from tugline.types import (
    TERMINAL,
    TRANSITIONS,
    Boundary,
    Failure,
    Group,
    Part,
    Session,
    Stale,
    Status,
    Task,
)

LEASE_S = 10.0
T = TypeVar("T")


class Lease(NamedTuple):
    """What some node once held."""

    node: str
    session: str
    epoch: int


class Lifecycle(RuleBasedStateMachine):
    """Clients, nodes with answers that get lost, and a clock, on one database."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        store.prepare()
        self.store, self.connection = store, store.connect()
        self.now = 1_000_000.0
        self.numbers = itertools.count()
        self.known: dict[str, set[Lease]] = {}
        """By node: what it believes to hold."""
        self.leases: list[Lease] = []
        """All that were ever given."""
        self.kept: dict[str, End] = {}
        self.statuses: dict[str, tuple[Status, int]] = {}

    def teardown(self) -> None:
        """Whatever was going on, it comes to an end."""
        self._wait(2 * LEASE_S + 100)
        self._wait(LEASE_S + 1)
        node = self._join("last")
        for _ in range(200):
            for session in self._do(partial(leases.give, rooms={node: 50}, now=self.now)).get(
                node, []
            ):
                end = End(Status.COMPLETED, reward=1.0, digest=f"end {next(self.numbers)}")
                self._commit(Lease(node, session.id, session.epoch), end)
        self.everything_is_in_order()
        found = self._do(lambda tx: tasks.page(tx, **_ALL, state=None)).tasks
        assert all(task.state is TaskState.RELEASED for task in found)
        self.connection.close()
        self.store.release()

    # ------------------------------------------------------------------ what happens
    @rule(
        samples=st.integers(1, 4),
        enough=st.none() | st.integers(1, 2),
        deadline_s=st.none() | st.floats(1, 30),
        attempts=st.integers(1, 3),
        stale=st.none() | st.integers(0, 1),
        tenant=st.sampled_from(["a", "b"]),
        priority=st.integers(-1, 1),
    )
    def submit(
        self, stale: int | None, tenant: str, priority: int, samples: int, **bounds: Any
    ) -> None:
        """A client submits a task."""
        group = Group(**bounds, max_staleness=stale, on_stale=Stale.ABORT)
        task = Task(
            id=f"t{next(self.numbers)}",
            instruction="",
            harness=Part("shell"),
            evaluator=Part("tests"),
            samples=samples,
            tenant=tenant,
            priority=priority,
            group=group,
        )
        self._do(partial(tasks.submit, batch=[tasks.pack(task)], now=self.now))

    @rule(name=st.sampled_from(["x", "y"]))
    def join(self, name: str) -> None:
        """A node starts, or starts again without having said goodbye."""
        self._join(name)

    @rule(rooms=st.lists(st.integers(0, 4), min_size=3, max_size=3), lost=st.booleans())
    def give(self, rooms: list[int], lost: bool) -> None:  # noqa: FBT001 - drawn
        """Nodes get work; the answer may get lost on its way."""
        asked = dict(zip(self.known, rooms, strict=False))
        given = self._do(partial(leases.give, rooms=asked, now=self.now))
        for node, work in given.items():
            assert len(work) <= asked[node]
            self._hold(node, work, lost=lost)

    @rule(data=st.data())
    def hear(self, data: st.DataObject) -> None:
        """A node renews, and does as it is told."""
        if not self.known:
            return
        node = data.draw(st.sampled_from(sorted(self.known)))
        stage = data.draw(st.sampled_from(sessions.STAGES))
        held = [Holding(lease.session, lease.epoch, stage) for lease in self.known[node]]

        def op(tx: Tx) -> leases.Heard:
            heard = leases.hear(tx, node, held, advance_at=self.now)
            nodes.renew(tx, node, 0, now=self.now, lease_s=LEASE_S)
            return heard

        try:
            heard = self._do(op)
        except FencedError:
            del self.known[node]
            return
        self._hold(node, heard.again, lost=False)
        for stop in heard.stop:
            lease = Lease(node, stop.session, stop.epoch)
            if stop.why is StopWhy.FENCED:
                self.known[node].discard(lease)
            elif stop.why is StopWhy.STALE:
                self._hand_back(lease, None)
            else:
                self._commit(lease, End(Status.CANCELLED, digest=f"d{next(self.numbers)}"))

    @rule(data=st.data(), reward=st.none() | st.floats(0, 1), boundary=st.sampled_from(Boundary))
    def commit(self, data: st.DataObject, reward: float | None, boundary: Boundary) -> None:
        """A result comes for any lease that there ever was, also from a node that was lost."""
        if not self.leases:
            return
        lease = data.draw(st.sampled_from(self.leases[-8:]))
        digest = f"d{next(self.numbers)}"
        end = End(Status.COMPLETED, reward=reward, digest=digest)
        if reward is None:
            end = End(Status.FAILED, Failure(boundary, "so it is"), digest=digest)
        self._commit(lease, end)

    @rule(data=st.data())
    def commit_again(self, data: st.DataObject) -> None:
        """An answer to a commit was lost, and it is sent once more, by whoever."""
        if not self.kept:
            return
        session = data.draw(st.sampled_from(sorted(self.kept)))
        again = partial(leases.commit, session=session, epoch=0, end=self.kept[session])
        assert self._do(partial(again, now=self.now)) is Kept.ALREADY

    @rule(data=st.data(), boundary=st.none() | st.sampled_from(Boundary))
    def hand_back(self, data: st.DataObject, boundary: Boundary | None) -> None:
        """A node gives something back that it has, or had."""
        if self.leases:
            self._hand_back(data.draw(st.sampled_from(self.leases[-8:])), boundary)

    @rule(data=st.data(), whole=st.booleans())
    def cancel(self, data: st.DataObject, whole: bool) -> None:  # noqa: FBT001 - drawn
        """A client cancels a session or a task."""
        found = self._do(lambda tx: sessions.select(tx, "1 = 1"))
        if not found:
            return
        entry = data.draw(st.sampled_from(sorted(found)))
        if whole:
            self._do(partial(groups.cancel_task, task=entry.task, by="me", now=self.now))
        else:
            self._do(partial(groups.cancel_session, session=entry.id, by="me", now=self.now))

    @rule(version=st.integers(0, 3))
    def announce(self, version: int) -> None:
        """New weights."""

        def op(tx: Tx) -> None:
            tx.run("UPDATE control SET version = :version", version=version)
            leases.abort_stale(tx, version, self.now)

        self._do(op)

    @rule(seconds=st.sampled_from([1.0, 4.0, 11.0]))
    def wait(self, seconds: float) -> None:
        """Time passes, and what is due happens."""
        self._wait(seconds)

    # ------------------------------------------------------------------ what must hold
    @invariant()
    def everything_is_in_order(self) -> None:
        """One result at most, none from a stale lease, nothing stuck, the books balance."""
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
            self._follows(entry.id, status, entry.epoch)
        for session, end in self.kept.items():
            assert results.digest_of(tx, session) == end.digest
        for task in tasks.page(tx, **_ALL, state=None).tasks:
            own = [entry for entry in entries.values() if entry.task == task.id]
            ended = all(Status(entry.status) in TERMINAL for entry in own)
            assert (task.state is TaskState.RELEASED) == ended
            judged = {
                over[e.id].sample for e in own if e.id in over and over[e.id].reward is not None
            }
            assert task.usable == len(judged)
            assert not ended or set(task.missing) == set(range(task.samples)) - judged
        tally = sessions.tally(tx)
        for status in Status:
            assert tally.get(status, 0) == sum(e.status == status for e in entries.values())

    def _follows(self, session: str, status: Status, epoch: int) -> None:
        before, old = self.statuses.get(session, (Status.QUEUED, 0))
        assert epoch >= old
        if epoch == old:
            assert status is before or status in _after(before)
        elif before in TERMINAL:
            assert status is before
        self.statuses[session] = (status, epoch)

    # ------------------------------------------------------------------ below
    def _do(self, op: Callable[[Tx], T]) -> T:
        tx = self.connection.begin(durable=False)
        try:
            value = op(tx)
        except BaseException:
            self.connection.rollback()
            raise
        self.connection.commit()
        return value

    def _join(self, name: str) -> str:
        node = f"{name}.{next(self.numbers)}"

        def op(tx: Tx) -> None:
            for before in nodes.named(tx, name):
                leases.lose(tx, before, "another came", self.now)
            hello = Hello(name=name, slots=2, room=4)
            nodes.add(tx, node, hello, node, now=self.now, lease_s=LEASE_S)

        self._do(op)
        self.known[node] = set()
        return node

    def _hold(self, node: str, work: tuple[Session, ...] | list[Session], *, lost: bool) -> None:
        for session in work:
            lease = Lease(node, session.id, session.epoch)
            self.leases.append(lease)
            if not lost:
                self.known[node].add(lease)

    def _commit(self, lease: Lease, end: End) -> None:
        current = self._do(partial(sessions.get, session=lease.session))
        holds = current.leased and current.epoch == lease.epoch
        commit = partial(leases.commit, session=lease.session, epoch=lease.epoch, end=end)
        try:
            kept = self._do(partial(commit, now=self.now))
        except FencedError:
            assert not holds
        else:
            assert holds
            if kept is Kept.COMMITTED:
                assert lease.session not in self.kept
                self.kept[lease.session] = end
        self.known.get(lease.node, set()).discard(lease)

    def _hand_back(self, lease: Lease, boundary: Boundary | None) -> None:
        back = HandBack(epoch=lease.epoch, why="no more", boundary=boundary)
        before = self._do(partial(sessions.get, session=lease.session))
        try:
            self._do(partial(leases.hand_back, session=lease.session, back=back, now=self.now))
        except FencedError:
            assert not (before.leased and before.epoch == lease.epoch)
        else:
            after = self._do(partial(sessions.get, session=lease.session))
            if boundary is None and before.stop is None:
                assert (after.status, after.attempt) == (Status.QUEUED, before.attempt)
        self.known.get(lease.node, set()).discard(lease)

    def _wait(self, seconds: float) -> None:
        self.now += seconds
        self._do(partial(expire, now=self.now, lease_s=LEASE_S))


_ALL: dict[str, Any] = {"tenant": None, "tag": None, "after": None, "limit": 1000}


def _after(status: Status) -> set[Status]:
    """All that may ever follow."""
    reached: set[Status] = set()
    left = [status]
    while left:
        for following in TRANSITIONS[left.pop()] - reached:
            reached.add(following)
            left.append(following)
    return reached


def _run(store: Callable[[], Store], examples: int, steps: int) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        lambda: Lifecycle(store()),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_lifecycle_on_sqlite(tmp_path: Path) -> None:
    """No order of submissions, leases, losses, results and clocks breaks an invariant."""
    numbers = itertools.count()
    _run(lambda: Sqlite(tmp_path / f"{next(numbers)}.db"), 30, 40)


def test_lifecycle_on_postgres(postgres_url: str) -> None:
    """The same on PostgreSQL, a few times."""

    def fresh() -> Store:
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
        return Postgres(postgres_url)

    _run(fresh, 4, 30)
