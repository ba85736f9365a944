from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tugline.errors import Missing
from tugline.server.logs import LogPart, Logs


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


async def _read_all(logs: Logs, session: str, limit: int = 65536) -> bytes:
    data, offset, logs.part = b"", 0, limit
    while True:
        part = await logs.read(session, offset=offset, ended=True)
        data, offset = data + part.data, part.offset
        if part.ended:
            return data


async def test_a_chunk_is_added_once(tmp_path: Path) -> None:
    """Repeated bytes are trimmed; a gap is refused with the current length."""
    logs = Logs(tmp_path)
    assert await logs.append("t-0", 1, 0, b"hello ") == 6
    assert await logs.append("t-0", 1, 0, b"hello ") == 6
    assert await logs.append("t-0", 1, 3, b"lo world") == 11
    assert await logs.append("t-0", 1, 100, b"lost") == 11
    assert await Logs(tmp_path).append("t-0", 1, 11, b"!") == 12, "a restart changes nothing"
    assert await _read_all(logs, "t-0") == b"hello world!"


@pytest.mark.parametrize("chunk", [3, 7, 64, 5000])
async def test_a_log_is_bounded(tmp_path: Path, chunk: int) -> None:
    """The returned length tells the node; another lease has a limit of its own."""
    limit, text = 800, os.urandom(1500)
    logs = Logs(tmp_path, limit)
    for at in range(0, len(text), chunk):
        length = await logs.append("t-0", 1, min(at, limit), text[at : at + chunk])
        assert length == min(at + chunk, limit)
    assert await _read_all(logs, "t-0", limit=50) == text[:limit]
    assert await logs.append("t-0", 2, 0, b"more") == 4


async def test_a_second_lease_appends_to_the_log(tmp_path: Path) -> None:
    """Output of the next lease follows that of the first, after a line that names it."""
    logs = Logs(tmp_path)
    await logs.append("t-0", 1, 0, b"one")
    first = await logs.read("t-0")
    assert await logs.append("t-0", 2, 0, b"two") == 3
    text = b"one\n[lease 2]\ntwo"
    assert await logs.read("t-0", offset=first.offset) == LogPart(text[3:], len(text), ended=False)
    logs.part = 10
    assert (await logs.read("t-0", offset=5)).data == text[5:15], "the line counts, too"
    assert await _read_all(logs, "t-0") == text


async def test_reading_from_the_end(tmp_path: Path) -> None:
    """A negative offset counts from the end, and is 0 for a shorter log."""
    logs = Logs(tmp_path)
    await logs.append("t-0", 1, 0, b"0123456789")
    assert await logs.read("t-0", offset=-3) == LogPart(b"789", 10, ended=False)
    assert await logs.read("t-0", offset=99, ended=True) == LogPart(b"", 10, ended=True)
    assert await logs.read("t-1", offset=-3, ended=True) == LogPart(b"", 0, ended=True)
    logs.part = 4
    assert await logs.read("t-0", offset=-30) == LogPart(b"0123", 4, ended=False)


async def test_old_logs_are_deleted(tmp_path: Path) -> None:
    """Logs are deleted by age, and the oldest first while all together are too large."""
    logs = Logs(tmp_path, keep_s=1000, total=250)
    for n in range(5):
        await logs.append(f"t-{n}", 1, 0, b"x" * 100)
        [path] = [path for path in _files(tmp_path) if path.parent.name == f"t-{n}"]
        age = 5000 if n == 3 else 100 - n
        os.utime(path, (time.time() - age,) * 2)
    assert await logs.sweep() == 3
    assert {path.parent.name for path in _files(tmp_path)} == {"t-2", "t-4"}
    assert await logs.append("t-3", 1, 100, b"late") == 0, "its node is told to begin again"


async def test_session_ids_are_not_paths(tmp_path: Path) -> None:
    """No id leads out of the folder."""
    with pytest.raises(Missing):
        await Logs(tmp_path / "logs").append("../../t-0", 1, 0, b"x")
    assert _files(tmp_path) == []
