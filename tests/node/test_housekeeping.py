"""Retention, orphans and the journal of a node."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest

from support.polling import until
from tugline.node import housekeeping
from tugline.node.housekeeping import COMMITTED, Housekeeping, Journal
from tugline.node.settings import NodeSettings
from tugline.node.telemetry import Stats
from tugline.recording.folder import patch_name
from tugline.recording.patches import save_patch
from tugline.rollout.parts import Parts
from tugline.sandbox.local import LocalRuntime
from tugline.sandbox.processes import start_time

KB = 1 << 10


class Disk:
    """Folders of sessions and recordings with given ages and sizes."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.sessions, self.recordings = folder / "sessions", folder / "recordings"
        self.sessions.mkdir()
        self.recordings.mkdir()
        self.needed: set[str] = set()
        self.stats, self.free_gb = Stats(), 1000.0
        limits = NodeSettings(**{"disk_floor_gb": 0.0, **settings})
        self.housekeeping = Housekeeping(
            *(self.sessions, self.recordings, limits, self.stats, self.needed.__contains__),
            read_free_bytes=lambda _folder: int(self.free_gb * (1 << 30)),
        )

    def session(self, name: str, *, age_s: float = 0.0, kb: int = 1, done: bool = True) -> None:
        """Make a session's folder, and its recording of 1 kB."""
        folder = self.sessions / name / "agent"
        folder.mkdir(parents=True)
        (folder / "file").write_bytes(bytes(kb * KB))
        recording = self.recordings / f"{name}.rec"
        recording.write_bytes(bytes(KB))
        then = time.time() - age_s
        os.utime(recording, (then, then))
        if done:
            (self.sessions / name / COMMITTED).touch()
            os.utime(self.sessions / name / COMMITTED, (then, then))

    @property
    def left(self) -> list[str]:
        """Names of what is left."""
        return sorted(path.name for path in (*self.sessions.iterdir(), *self.recordings.iterdir()))


def test_old_sessions_are_deleted(tmp_path: Path) -> None:
    """Folders and recordings are deleted, but not of sessions that run or wait for their commit."""
    disk = Disk(tmp_path, keep_s=100)
    disk.needed.add("live.1")
    for name in ("old.1", "new.1", "live.1", "open.1"):
        disk.session(name, age_s=0 if name == "new.1" else 1000, done=name != "open.1")
    disk.housekeeping.sweep()
    assert disk.left == ["live.1", "live.1.rec", "new.1", "new.1.rec", "open.1"]


def test_the_oldest_sessions_beyond_the_quota_are_deleted(tmp_path: Path) -> None:
    """Sessions are deleted, oldest first, until the rest is within the quota."""
    disk = Disk(tmp_path, quota_gb=250 * KB / (1 << 30))
    for number in range(4):
        disk.session(f"s{number}.1", age_s=100 - number, kb=100)
    disk.housekeeping.sweep()
    assert disk.left == ["s2.1", "s2.1.rec", "s3.1", "s3.1.rec"]
    assert 202 * KB <= disk.stats.disk_bytes < 220 * KB


def test_more_than_a_batch_of_old_sessions_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All due sessions are deleted, oldest first; one that cannot be removed stops nothing."""
    monkeypatch.setattr(housekeeping, "_BATCH", 3)
    remove = housekeeping._remove
    monkeypatch.setattr(
        housekeeping, "_remove", lambda path: None if path.name == "s4.1" else remove(path)
    )
    disk = Disk(tmp_path, keep_s=100)
    for number in range(10):
        disk.session(f"s{number}.1", age_s=1000 - number)
    disk.session("new.1")
    disk.housekeeping.sweep()
    assert disk.left == ["new.1", "new.1.rec", "s4.1"]
    monkeypatch.undo()
    disk.housekeeping.sweep()
    assert disk.left == ["new.1", "new.1.rec"]


def test_a_full_disk_stops_new_work(tmp_path: Path) -> None:
    """What may be deleted is deleted first; work is taken again once there is room."""
    disk = Disk(tmp_path, disk_floor_gb=1.0)
    disk.session("a.1")
    disk.free_gb = 0.5
    disk.housekeeping.sweep()
    assert disk.left == []
    assert disk.stats.disk_low
    disk.free_gb = 2.0
    disk.housekeeping.sweep()
    assert not disk.stats.disk_low


async def test_orphans_of_a_killed_node_are_removed(tmp_path: Path) -> None:
    """Processes are killed; folders stay if committed, or if their result is in the journal."""
    disk = Disk(tmp_path)
    disk.session("done.1")
    disk.session("journaled.1", done=False)
    async with LocalRuntime().open(disk.sessions / "orphan.1" / "agent") as sandbox:
        running = asyncio.create_task(
            sandbox.run(("sh", "-c", "sleep 300 & echo $!; wait"), env={}, timeout_s=60)
        )
        log = sandbox.logs / "agent.log"
        await until(lambda: log.exists() and log.read_text().strip())
        pid = int(log.read_text())
        ended = await asyncio.to_thread(disk.housekeeping.reap, Parts(), ["journaled.1"])
        assert ended >= 2
        await running
    assert start_time(pid) is None or _is_dead(pid)
    assert disk.left == ["done.1", "done.1.rec", "journaled.1", "journaled.1.rec"]


def _is_dead(pid: int) -> bool:
    return " Z " in Path(f"/proc/{pid}/stat").read_text(encoding="ascii")


async def test_the_journal_keeps_results_until_they_are_committed(tmp_path: Path) -> None:
    """Results survive a restart by session and epoch; partial files of a kill are removed."""
    journal = Journal(tmp_path / "journal")
    assert journal.list_pending() == []
    await journal.write("a.b-0.3", b"data")
    (tmp_path / "journal" / "torn.1.part").write_bytes(b"da")
    (tmp_path / "journal" / "not-ours.result").write_bytes(b"?")
    again = Journal(tmp_path / "journal")
    assert again.list_pending() == ["a.b-0.3"]
    assert not (tmp_path / "journal" / "torn.1.part").exists()
    assert again.contains("a.b-0.3")
    assert await again.read("a.b-0.3") == b"data"
    await again.write("c.1", b"x")
    (tmp_path / "session").mkdir()
    again.set_aside("c.1", tmp_path / "session")
    await again.write("d.1", b"y")
    again.set_aside("d.1", tmp_path / "missing")
    again.remove("a.b-0.3")
    again.remove("a.b-0.3")
    assert again.list_pending() == []
    assert (tmp_path / "session" / "result.refused").read_bytes() == b"x"
    assert list((tmp_path / "journal").glob("[cd]*")) == []


async def test_a_failing_journal_does_not_fail_a_result(tmp_path: Path) -> None:
    """The result can still be committed from memory."""
    (tmp_path / "journal").write_text("a file, where the folder should be")
    await Journal(tmp_path / "journal").write("a.1", b"data")


def test_old_patches_are_deleted(tmp_path: Path) -> None:
    """A patch that no session has used for long is deleted, one that was stored again is not."""
    disk = Disk(tmp_path, keep_s=100)
    unused, used = (save_patch(data, disk.recordings) for data in (b"a", b"b"))
    for digest in (unused, used):
        os.utime(disk.recordings / patch_name(digest), (0, 0))
    save_patch(b"b", disk.recordings)
    disk.housekeeping.sweep()
    assert disk.left == [patch_name(used)]
