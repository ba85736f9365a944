from __future__ import annotations

import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tugline.errors import FencedError, TuglineError, UsageError
from tugline.server.store import Store
from tugline.types import (
    Boundary,
    Ledger,
    Part,
    Reward,
    Session,
    Span,
    Status,
    Task,
    Trace,
    Trajectory,
)


def a_task(name: str = "t", samples: int = 2, **changes: str) -> Task:
    """A task with some content."""
    return Task(
        id=name,
        instruction=changes.get("instruction", "Fix it"),
        harness=Part("shell", {"command": ["a", "b"]}),
        evaluator=Part("tests"),
        samples=samples,
    )


def a_result(session: Session, reward: float = 1.0) -> Trajectory:
    """A trajectory with arrays in it."""
    trace = Trace(
        ids=np.arange(5, dtype=np.int32),
        mask=np.array([0, 0, 0, 1, 1], np.bool_),
        logprobs=np.array([0, 0, 0, -0.5, -1.5], np.float32),
        spans=(Span(0, 3, 5, 7),),
    )
    return Trajectory(
        session=session.id,
        task=session.task,
        sample=session.sample,
        status=Status.COMPLETED,
        traces=(trace,),
        ledger=Ledger(sampled=2, trained=2),
        reward=Reward(reward),
    )


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A new store."""
    with Store(tmp_path / "new" / "store.db", max_attempts=2) as store:
        yield store


def test_a_task_goes_in_once(store: Store) -> None:
    """The same task again is answered with its sessions; another one of that id is refused."""
    first = store.submit(a_task())
    assert [session.id for session in first] == ["t-0", "t-1"]
    assert store.submit(a_task()) == first
    assert store.task("t") == a_task()
    assert store.counts()[Status.QUEUED] == 2
    with pytest.raises(UsageError, match="other content"):
        store.submit(a_task(instruction="Break it"))
    with pytest.raises(UsageError, match="samples is 0"):
        store.submit(a_task("u", samples=0))
    with pytest.raises(UsageError, match="no task 'v'"):
        store.task("v")


def test_leases_go_out_oldest_first_and_once(store: Store) -> None:
    """Each session is held by one owner; its epoch says which lease it is."""
    store.submit(a_task("a"))
    store.submit(a_task("b"))
    one, two = store.lease(3, "n1", 60), store.lease(3, "n2", 60)
    assert [session.id for session in one + two] == ["a-0", "a-1", "b-0", "b-1"]
    assert {(s.epoch, s.status, s.attempt) for s in one + two} == {(1, Status.INIT, 0)}
    assert store.lease(3, "n3", 60) == []


def test_stages_follow_the_table(store: Store) -> None:
    """A stage that may not follow, or comes with an old epoch, is refused."""
    store.submit(a_task())
    (session,) = store.lease(1, "n", 60)
    for stage in (Status.READY, Status.RUN, Status.BUILD, Status.EVAL):
        store.advance(session.id, 1, stage, segment=Path("x.seg"))
    with pytest.raises(TuglineError, match="run may not follow eval"):
        store.advance(session.id, 1, Status.RUN)
    with pytest.raises(TuglineError, match="completed may not follow"):
        store.advance(session.id, 1, Status.COMPLETED)
    with pytest.raises(FencedError, match="epoch 0 is lost"):
        store.advance(session.id, 0, Status.COMPLETED)


def test_a_result_is_kept_once_and_comes_back_whole(store: Store) -> None:
    """The same result again is fine, another one is fenced."""
    store.submit(a_task())
    (session,) = store.lease(1, "n", 60)
    result = a_result(session)
    store.commit(session.id, 1, result)
    store.commit(session.id, 1, result)
    with pytest.raises(FencedError, match="completed at epoch 1"):
        store.commit(session.id, 1, a_result(session, 0.0))
    (back,) = store.results(["t"])
    assert back.reward == result.reward
    assert back.traces[0].spans == result.traces[0].spans
    assert np.array_equal(back.traces[0].logprobs, result.traces[0].logprobs)
    assert store.results(["u"]) == []
    assert len(store.results()) == 1
    assert store.counts()[Status.COMPLETED] == 1


def test_a_result_must_be_this_sessions_and_final(store: Store) -> None:
    """A mixed-up commit is refused before it is kept."""
    store.submit(a_task())
    one, two = store.lease(2, "n", 60)
    with pytest.raises(TuglineError, match="must name it"):
        store.commit(one.id, 1, a_result(two))


def test_a_lost_lease_fences_its_result(store: Store) -> None:
    """The first owner's late result is refused, the second owner's is kept."""
    store.submit(a_task(samples=1))
    (old,) = store.lease(1, "dead", 0.0)
    assert [s.status for s in store.expire(time.time() + 1)] == [Status.QUEUED]
    (new,) = store.lease(1, "alive", 60)
    assert (new.epoch, new.attempt) == (2, 1)
    with pytest.raises(FencedError, match="lease of epoch 1 is lost"):
        store.commit(old.id, old.epoch, a_result(old, 0.0))
    store.commit(new.id, new.epoch, a_result(new, 1.0))
    assert [result.reward for result in store.results()] == [Reward(1.0)]


def test_renewed_leases_last(store: Store) -> None:
    """A living owner keeps what it has; a lease that still runs is not expired."""
    store.submit(a_task())
    store.lease(1, "n", 5.0)
    store.renew("n", 60.0)
    assert store.expire(time.time() + 30) == []
    assert len(store.expire(time.time() + 90)) == 1


def test_attempts_run_out(store: Store) -> None:
    """After the last attempt the session fails as infrastructure, with a result to wait for."""
    store.submit(a_task(samples=1))
    (first,) = store.lease(1, "n", 60)
    assert store.release(first.id, 1, "disk full").status is Status.QUEUED
    store.lease(1, "n", 60)
    assert [s.status for s in store.reclaim("n")] == [Status.FAILED]
    (result,) = store.results(["t"])
    assert result.failure is not None
    assert result.failure.boundary is Boundary.INFRASTRUCTURE
    assert "node n was lost (attempt 2, the last)" in result.failure.message
    assert store.lease(1, "n", 60) == []


def test_everything_is_there_after_reopening(tmp_path: Path) -> None:
    """A store is a file, nothing else."""
    with Store(tmp_path / "s.db") as store:
        store.submit(a_task())
        (session,) = store.lease(1, "n", 60)
        store.commit(session.id, 1, a_result(session))
    with Store(tmp_path / "s.db") as store:
        assert len(store.results(["t"])) == 1
        assert [s.status for s in store.sessions("t")] == [Status.COMPLETED, Status.QUEUED]


def test_threads_share_a_store(store: Store) -> None:
    """Leases taken from several threads at once never overlap."""
    store.submit(a_task(samples=40))
    taken: list[str] = []

    def take(owner: str) -> None:
        while got := store.lease(3, owner, 60):
            taken.extend(session.id for session in got)

    threads = [threading.Thread(target=take, args=(f"n{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(taken) == len(set(taken)) == 40


def test_what_is_no_store_is_said_in_one_line(tmp_path: Path) -> None:
    """A foreign file, a newer layout and a folder are errors that name the file."""
    foreign = tmp_path / "foreign.db"
    foreign.write_text("hello " * 1000)
    with pytest.raises(TuglineError, match=r"foreign\.db: file is not a database"):
        Store(foreign)
    newer = tmp_path / "newer.db"
    with sqlite3.connect(newer) as db:
        db.execute("PRAGMA user_version = 9")
    db.close()
    with pytest.raises(UsageError, match="layout 9, this version reads 1"):
        Store(newer)
    with pytest.raises(TuglineError, match="unable to open"):
        Store(tmp_path)


def test_a_full_disk_is_one_clear_error_and_loses_nothing(store: Store) -> None:
    """What was acknowledged before stays; once there is room the store works on."""
    store.submit(a_task("a"))
    (pages,) = store._db.execute("PRAGMA page_count").fetchone()
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    big = "".join(chr(33 + (n * n * 7919 + n // 3) % 90000) for n in range(60_000))
    with pytest.raises(TuglineError, match="full; free some space"):
        store.submit(a_task("b", instruction=big.encode("utf-8", "ignore").decode()))
    store._db.execute(f"PRAGMA max_page_count = {pages + 1000}")
    assert len(store.sessions("a")) == 2
    assert store.sessions("b") == []
    store.submit(a_task("c"))


def test_kill_9_loses_nothing_acknowledged_and_doubles_nothing(tmp_path: Path) -> None:
    """A process that leases and commits in a loop is killed, again and again."""
    path = tmp_path / "s.db"
    total = 400
    with Store(path, max_attempts=100) as store:
        store.submit(a_task(samples=total))
    worker = textwrap.dedent(f"""
        import sys, pathlib
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_store import Store, a_result
        store = Store(pathlib.Path({str(path)!r}), max_attempts=100)
        store.reclaim("n")
        while got := store.lease(4, "n", 60):
            for session in got:
                store.commit(session.id, session.epoch, a_result(session))
                print(session.id, flush=True)
    """)
    acknowledged: list[str] = []
    for kill_after in (7, 23, 40, None):
        with subprocess.Popen(
            [sys.executable, "-c", worker], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            for count, line in enumerate(process.stdout, 1):
                acknowledged.append(line.strip())
                if count == kill_after:
                    process.kill()
        assert process.returncode == (0 if kill_after is None else -9)
    with Store(path) as store:
        kept = [result.session for result in store.results()]
    assert len(kept) == len(set(kept)) == total
    assert set(acknowledged) <= set(kept)
    assert len(acknowledged) == len(set(acknowledged)) >= total - 3
