from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tugline.errors import SandboxError
from tugline.sandbox.base import SandboxSpec
from tugline.sandbox.bubblewrap import Bubblewrap


async def test_a_sandbox_is_taken_where_there_is_one(tmp_path: Path) -> None:
    """Nothing is said then, and the sandbox is one."""
    if Bubblewrap().check_available():
        pytest.skip("no bubblewrap here")
    with capture_logs() as output:
        async with Bubblewrap(memory_mb=512).open(
            tmp_path, SandboxSpec(files={"a": "1"})
        ) as sandbox:
            assert str(sandbox.workdir) == "/workspace"
            assert (await sandbox.run(("cat", "a"), env={}, timeout_s=5)).code == 0
    assert not output


async def test_without_one_it_refuses_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent gets the rights of the node's user only where its task says so."""
    which = shutil.which
    monkeypatch.setattr("shutil.which", lambda _name: None)
    runtime = Bubblewrap(memory_mb=512, open_files=100)
    with pytest.raises(SandboxError, match=r"apt install bubblewrap.*`runtime: local`"):
        async with runtime.open(tmp_path / "a"):
            pytest.fail("it was opened")
    with pytest.raises(SandboxError, match="apt install bubblewrap"):
        runtime.list_weaknesses()
    assert not (tmp_path / "a" / "work").exists()
    assert runtime.reap(tmp_path) == 0
    monkeypatch.setattr("shutil.which", which)
    if runtime.check_available():
        pytest.skip("no bubblewrap here")
    async with runtime.open(tmp_path / "b"):
        assert runtime.list_weaknesses() == Bubblewrap().list_weaknesses()
