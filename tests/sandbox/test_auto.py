from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tugline.errors import ConfigError
from tugline.plugins import find
from tugline.sandbox.auto import Auto
from tugline.sandbox.base import SandboxSpec
from tugline.sandbox.bubblewrap import Bubblewrap


async def test_a_sandbox_is_taken_where_there_is_one(tmp_path: Path) -> None:
    """Nothing is said then, and the sandbox is one."""
    if Bubblewrap().check_available():
        pytest.skip("no bubblewrap here")
    with capture_logs() as said:
        async with Auto(memory_mb=512).open(tmp_path, SandboxSpec(files={"a": "1"})) as sandbox:
            assert str(sandbox.workdir) == "/workspace"
            assert (await sandbox.run(("cat", "a"), env={}, timeout_s=5)).code == 0
    assert not said


async def test_without_one_it_says_once_what_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line: why, what is not contained, which options are of no use."""
    monkeypatch.setenv("PATH", "/no-such-folder:/bin")
    monkeypatch.setattr("shutil.which", lambda _name: None)
    runtime = Auto(memory_mb=512, open_files=100)
    with capture_logs() as said:
        for name in ("a", "b"):
            async with runtime.open(tmp_path / name) as sandbox:
                assert sandbox.workdir == tmp_path / name / "work"
                done = await sandbox.run(("sh", "-c", "ulimit -n"), env={}, timeout_s=5)
                assert done.code == 0
                assert (sandbox.logs / "agent.log").read_text() == "100\n"
    assert [entry["event"] for entry in said] == ["no isolation here"]
    assert said[0]["ignored"] == ["memory_mb"]
    assert "apt install bubblewrap" in said[0]["problem"]
    assert "the network is open" in said[0]["so"]
    assert runtime.list_weaknesses()
    assert runtime.reap(tmp_path) == 0


def test_options_are_checked_where_a_task_comes_in() -> None:
    """An unknown one names the nearest, a wrong one says what would be right."""
    assert find("runtime", "auto") is Auto
    with pytest.raises(ConfigError, match="unknown key 'memory'; did you mean 'memory_mb'"):
        Auto(memory=1)
    with pytest.raises(ConfigError, match="memory_mb is -1"):
        Auto(memory_mb=-1)
