"""The example of a provider of one's own, used as a task would, with this machine as the other."""

from __future__ import annotations

import ast
import asyncio
import importlib
import io
import os
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sandboxes import (
    kill_node,
    run_session,
    run_shell,
    running,
    unique_sleep,
    wait_until_gone,
    wait_until_running,
)
from tugline import plugins
from tugline.errors import SandboxError, UsageError
from tugline.sandbox.base import Mount, SandboxSpec
from tugline.sandbox.patch import FileChange, PatchLimits
from tugline.types import Workspace

EXAMPLE = Path(__file__).parents[2] / "examples" / "remote_runtime.py"


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Found by its name, with a folder of its own on the other machine."""
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    (tmp_path / "there").mkdir()
    return plugins.find("runtime", "remote_runtime:Remote")(folder=str(tmp_path / "there"))


async def test_a_session_goes_its_way(remote: Any, tmp_path: Path) -> None:
    """Files in, a program with its output and exit code, changes out, nothing left there."""
    files = {"a.py": "x = 1\n", "pkg/b.py": "y = 2\n"}
    async with remote.open(tmp_path / "sandbox", SandboxSpec(files=files)) as sandbox:
        await run_session(sandbox)
        assert await sandbox.expose("http://127.0.0.1:1/s/x") == "http://127.0.0.1:1/s/x"
    assert list((tmp_path / "there").iterdir()) == []
    assert sorted(path.name for path in (tmp_path / "sandbox").iterdir()) == ["logs"]


async def test_a_patch_is_laid_over_a_new_sandbox(remote: Any, tmp_path: Path) -> None:
    """As an evaluator does it: modes, links, removals, files in the way of folders."""
    files = {"a": "1", "b": "2", "c/d": "3"}
    async with remote.open(tmp_path / "sandbox", SandboxSpec(files=files)) as sandbox:
        patch = {
            "a": None,
            "b": None,
            "b/in": "below",
            "c": b"\0",
            "run.sh": FileChange(b"#!/bin/sh\nexit 5\n", executable=True),
            "link": FileChange(b"run.sh", link=True),
        }
        await sandbox.put(sandbox.workdir, patch)
        assert (await sandbox.run(["./link"], env={}, timeout_s=20)).code == 5
        assert await sandbox.get(sandbox.workdir / "b/in") == b"below"
        assert await sandbox.get(sandbox.workdir / "c") == b"\0"
        assert await sandbox.get(sandbox.workdir / "c", max_bytes=0) is None
        for missing in ("a", "link", "c/d", "none"):
            assert await sandbox.get(sandbox.workdir / missing) is None, missing
        with pytest.raises(UsageError, match="must be relative"):
            await sandbox.put(sandbox.workdir, {"../x": "x"})


async def test_what_outlives_its_time_is_ended_there(remote: Any, tmp_path: Path) -> None:
    """With its children, also when the session is cancelled."""
    async with remote.open(tmp_path / "sandbox") as sandbox:
        sleep = unique_sleep()
        end = await run_shell(sandbox, f"{sleep} & {sleep}", 0.5)
        assert (end.timed_out, end.code) == (True, -9)
        assert not running(sleep)
        task = asyncio.create_task(run_shell(sandbox, sleep))
        await wait_until_running(sleep)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await wait_until_gone(sleep)


async def test_what_a_killed_node_left_there_is_removed(remote: Any, tmp_path: Path) -> None:
    """Found by its note, once."""
    sleep, options = unique_sleep(), {"folder": remote.folder}
    begun = partial(running, sleep)
    node = ("remote_runtime:Remote", options, tmp_path / "sandbox")
    await kill_node(*node, SandboxSpec(), sleep.split(), begun)
    assert (remote.reap(tmp_path), remote.reap(tmp_path)) == (1, 0)
    await wait_until_gone(sleep)
    assert list((tmp_path / "there").iterdir()) == []


async def test_what_it_cannot_give_or_reach_is_told(remote: Any, tmp_path: Path) -> None:
    """A workspace or a mount is refused; a machine that is not there is a fault of the place."""
    for spec in (SandboxSpec(workspace=Workspace(image="x")), SandboxSpec(mounts=(Mount("/x"),))):
        with pytest.raises(UsageError, match="takes files only"):
            async with remote.open(tmp_path / "sandbox", spec):
                pass
    assert remote.check_available() is None
    away = type(remote)(connect=("sh", "-c", "echo no route >&2; exit 255"))
    assert "no route" in away.check_available()
    sandbox = remote.open(tmp_path / "other")
    async with sandbox as opened:
        with pytest.raises(SandboxError, match=r"sh: .*not found"):
            await opened.call("nothing-of-that-name")


def test_it_stays_short_enough_to_be_read() -> None:
    """About sixty statements, beside imports and docstrings."""
    tree = ast.parse(EXAMPLE.read_text())
    statements = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt)
        and not isinstance(node, ast.Import | ast.ImportFrom)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    ]
    assert len(statements) <= 75


BEFORE = {"a.py": "x = 1\n", "pkg/b.py": "y = 2\n", "pkg/c.py": "z = 3\n"}


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The task's files, in a folder beside something secret."""
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    (tmp_path / "secret.txt").write_text("secret")
    root = tmp_path / "work"
    for path, text in BEFORE.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def archive(workdir: Path, *options: str) -> io.BytesIO:
    """A tar of a folder, as a machine elsewhere would make it."""
    argv = ["tar", "-c", *options, "-C", str(workdir), "."]
    return io.BytesIO(subprocess.run(argv, capture_output=True, check=True).stdout)


def test_archives_are_compared_without_unpacking_them(workdir: Path) -> None:
    """The same changes as of a folder; an unchanged large file is not worth a note."""
    (workdir / "large").write_bytes(b"\0" * 5000)
    (workdir / "grows").write_bytes(b"\0")
    before = archive(workdir)
    (workdir / "a.py").write_text("x = 2\n")
    (workdir / "pkg" / "b.py").unlink()
    (workdir / "pkg" / "c.py").chmod(0o755)
    (workdir / "out").symlink_to("../secret.txt")
    (workdir / "same").hardlink_to(workdir / "a.py")
    (workdir / "grows").write_bytes(b"\0" * 6000)
    (workdir / ".git").mkdir()
    (workdir / ".git" / "HEAD").touch()
    os.mkfifo(workdir / "pipe")
    diff_archives = importlib.import_module("archive_diff").diff_archives
    patch = diff_archives(before, archive(workdir), PatchLimits(file_bytes=1000))
    assert patch.files == {
        "a.py": FileChange(b"x = 2\n"),
        "same": FileChange(b"x = 2\n"),
        "pkg/b.py": None,
        "pkg/c.py": FileChange(b"z = 3\n", executable=True),
        "out": FileChange(b"../secret.txt", link=True),
    }
    assert sorted(note.partition(":")[0] for note in patch.notes) == ["grows", "pipe"]


def test_an_archive_that_leads_out_or_is_none_is_refused(workdir: Path) -> None:
    """A hostile machine cannot name files of ours."""
    diff_archives = importlib.import_module("archive_diff").diff_archives
    hostile = archive(workdir, "--transform=s,^./a.py,../../a.py,", "-P")
    patch = diff_archives(io.BytesIO(archive(workdir).getvalue()), hostile)
    assert patch.files == {"a.py": None}
    assert patch.notes == ("../../a.py: a name that leaves its folder",)
    with pytest.raises(SandboxError, match="no tar archive"):
        diff_archives(archive(workdir), io.BytesIO(b"x" * 2000))
