"""The cache of workspaces, with real repositories."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from repositories import Clone, git
from tugline.errors import UsageError, WorkspaceError
from tugline.sandbox import repos
from tugline.sandbox.cache import WorkspaceCache
from tugline.sandbox.local import LocalRuntime
from tugline.sandbox.overlay import OverlayWorkspace
from tugline.types import Workspace


@pytest.fixture
def repo(tmp_path: Path) -> Clone:
    """One whose future is the fix that nobody may see."""
    return Clone(tmp_path / "repo")


def python(script: str, *argv: str) -> subprocess.Popen[str]:
    """Another process with a cache."""
    begin = "import asyncio, sys\nfrom pathlib import Path\nfrom tugline import log\n"
    begin += "log.configure()\n"
    begin += (
        "from tugline.sandbox.cache import WorkspaceCache\nfrom tugline.types import Workspace\n"
    )
    argv = (sys.executable, "-c", begin + script + "\nasyncio.run(main())", *argv)
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def bases(tmp_path: Path) -> WorkspaceCache:
    """An empty cache."""
    return WorkspaceCache(tmp_path / "cache")


@pytest.mark.parametrize("prefix", ["", "file://"])
@pytest.mark.parametrize(
    ("name", "text"),
    [("v2", "present"), ("hash", "present"), ("other", "future"), (None, "present")],
)
async def test_a_commit_is_what_it_is_named_by(
    repo: Clone, bases: WorkspaceCache, prefix: str, name: str | None, text: str
) -> None:
    """A tag, a full hash, a branch or the head, of a path or a URL."""
    where = f"{prefix}{repo.folder}"
    asked = repo.present if name == "hash" else name
    async with bases.open(Workspace(repo=where, commit=asked)) as base:
        assert (base / "file").read_text() == text
        assert os.access(base / "file", os.X_OK)
        assert git(base, "status", "--porcelain") == ""
        assert git(base, "rev-parse", "HEAD") == getattr(repo, text)


async def test_nothing_that_came_later_can_be_found(repo: Clone, bases: WorkspaceCache) -> None:
    """History ends at the commit: no fix, no branch, no tag, no remote, no reflog, no object."""
    async with bases.open(Workspace(repo=f"file://{repo.folder}", commit="v2")) as base:
        assert git(base, "log", "--all", "--format=%s").splitlines() == ["present", "past"]
        assert git(base, "for-each-ref", "--format=%(refname)") == "refs/heads/main"
        assert git(base, "remote") == git(base, "reflog") == ""
        objects = git(base, "cat-file", "--batch-all-objects", "--batch-check")
        assert repo.future not in objects
        assert len(objects.splitlines()) == 6  # two commits, two trees, two files
        for path in (base / ".git").rglob("*"):
            if path.is_file():
                assert b"other" not in path.read_bytes(), path
                assert str(repo.folder).encode() not in path.read_bytes(), path


async def test_many_at_once_make_it_once(repo: Clone, tmp_path: Path) -> None:
    """In one process and in several, and nothing is left of the making."""
    script = (
        "async def main():\n"
        "  async with WorkspaceCache(Path(sys.argv[1])).open(Workspace(repo=sys.argv[2])) as b:\n"
        "    print(b.stat().st_ino)"
    )
    others = [python(script, str(tmp_path / "cache"), f"file://{repo.folder}") for _ in range(2)]
    bases = WorkspaceCache(tmp_path / "cache")

    async def one() -> str:
        async with bases.open(Workspace(repo=f"file://{repo.folder}")) as base:
            return str(base.stat().st_ino)

    mine = set(await asyncio.gather(*(one() for _ in range(8))))
    theirs = {(await asyncio.to_thread(other.communicate))[0].strip() for other in others}
    assert mine == theirs
    assert len(mine) == 1
    folders = [path.name[:4] for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert sorted(folders) == ["git-", "mirr"]


async def test_what_cannot_be_had_says_what_and_why(
    repo: Clone, bases: WorkspaceCache, tmp_path: Path
) -> None:
    """A typed fault that names repository and commit; secrets in a URL are not repeated."""
    none = "0123456789012345678901234567890123456789"
    cases = {
        "has no 'v9': give a full hash, a tag": Workspace(repo=str(repo.folder), commit="v9"),
        f"has no commit '{none}'": Workspace(repo=f"file://{repo.folder}", commit=none),
        "none' is no folder on this node": Workspace(repo=str(tmp_path / "none"), commit="v9"),
        "git says: .*does not appear to be a git": Workspace(repo=str(tmp_path), commit="v1"),
        r"'https://\*\*\*@127.0.0.1:9/x'.*git says": Workspace(
            repo="https://me:word@127.0.0.1:9/x", commit="v1"
        ),
        "folder is '/none', which is no folder": Workspace(folder="/none"),
    }
    for said, workspace in cases.items():
        with pytest.raises(WorkspaceError, match=said) as caught:
            async with bases.open(workspace):
                pass
        assert "word" not in str(caught.value)
    assert len(await LocalRuntime().prefetch(cases.values())) == len(cases)
    assert not [
        path for path in bases.folder.iterdir() if path.name.startswith("git-") and path.is_dir()
    ]


@pytest.mark.parametrize(
    ("workspace", "expected"),
    [
        (Workspace(repo="/r", folder="/f"), "must be left out beside `repo`"),
        (Workspace(commit="x"), "workspace.commit is 'x', must be left out without `repo`"),
        (Workspace(folder="/f", commit="x"), "workspace.commit is 'x', must be left out beside"),
        (Workspace(folder="a"), "workspace.folder is 'a', must be an absolute path"),
        (Workspace(folder="/"), "the root of the node cannot be a workspace"),
        (Workspace(repo="a/b"), "workspace.repo is 'a/b', must be a URL or an absolute path"),
        (Workspace(repo="--upload-pack=touch /x"), "must be a URL or an absolute path"),
        (Workspace(repo="ext::sh -c touch% /x"), "must be a URL or an absolute path"),
        (Workspace(repo="/r", commit="--all"), "must be a full hash, a tag or a branch"),
    ],
)
async def test_a_contradiction_is_the_tasks_mistake(
    bases: WorkspaceCache, workspace: Workspace, expected: str
) -> None:
    """It names the field, the value and what would be right; nothing is run for it."""
    with pytest.raises(UsageError, match=expected):
        async with bases.open(workspace):
            pass


async def test_an_address_that_does_not_answer_does_not_hang(
    bases: WorkspaceCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Git is ended with all its children when its time is over."""
    monkeypatch.setattr(repos, "_QUERY_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"git://127.0.0.1:{silent.getsockname()[1]}/x"
        began = time.monotonic()
        with pytest.raises(WorkspaceError, match=r"git did not finish within .* can this node"):
            async with bases.open(Workspace(repo=url)):
                pass
        assert time.monotonic() - began < 5


async def test_who_stops_waiting_does_not_stop_the_making(bases: WorkspaceCache) -> None:
    """A session whose time is over leaves a base to the next one, made once."""
    made = []

    async def fill(into: Path) -> None:
        made.append(into)
        await asyncio.sleep(0.2)
        (into / "x").touch()

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05), bases.entry("image-1", fill):
            pass
    async with bases.entry("image-1", fill) as base:
        assert (base / "x").exists()
    assert len(made) == 1


async def test_a_making_that_failed_leaves_nothing_and_is_tried_again(
    bases: WorkspaceCache,
) -> None:
    """Each that waited gets the error; the next one begins anew."""

    async def fails(into: Path) -> None:
        (into / "half").touch()
        msg = "no"
        raise WorkspaceError(msg)

    async def fill(into: Path) -> None:
        assert not os.listdir(into)  # noqa: PTH208

    for _ in range(2):
        with pytest.raises(WorkspaceError, match="no"):
            async with bases.entry("k", fails):
                pass
    assert not [path for path in bases.folder.iterdir() if path.is_dir()]
    async with bases.entry("k", fill) as base:
        assert base.is_dir()


async def test_what_was_used_least_recently_makes_room(tmp_path: Path) -> None:
    """The bound holds over all, what is in use stays, and what is gone is made again."""
    bases = WorkspaceCache(tmp_path / "cache", max_gb=0.0025)
    made: list[str] = []

    async def fill(into: Path) -> None:
        made.append(into.name[0])
        (into / "x").write_bytes(os.urandom(1_000_000))
        await asyncio.sleep(0.02)  # so that times of use differ

    async with bases.entry("a", fill):
        async with bases.entry("b", fill):
            pass
        async with bases.entry("c", fill):
            pass
        async with bases.entry("d", fill):
            kept = {path.name for path in bases.folder.iterdir() if path.is_dir()}
            assert kept == {"a", "d"}
        async with bases.entry("b", fill):
            pass
    assert made == ["a", "b", "c", "d", "b"]


def test_what_killed_processes_left_is_swept_up(tmp_path: Path) -> None:
    """Half-made and half-removed ones; not those that somebody is at."""
    bases = WorkspaceCache(tmp_path)
    left = ("git-1.part", "git-2.part", "git-3.part")
    for name in left:
        (tmp_path / name / "below").mkdir(parents=True)
    handle = os.open(tmp_path / "git-1.make", os.O_CREAT | os.O_RDWR)
    fcntl.flock(handle, fcntl.LOCK_EX)
    bases.evict()
    assert {path.name for path in tmp_path.glob("*.part")} == {"git-1.part"}
    os.close(handle)
    bases.evict()
    assert not list(tmp_path.glob("*.part"))


async def test_a_base_used_by_another_process_is_not_evicted(tmp_path: Path) -> None:
    """Nor is its lock left when that process is killed."""
    script = (
        "async def fill(into): (into / 'x').write_bytes(b'x' * 1_000_000)\n"
        "async def main():\n"
        "  async with WorkspaceCache(Path(sys.argv[1])).entry('a', fill):\n"
        "    print('holding', flush=True); await asyncio.sleep(60)"
    )
    other = python(script, str(tmp_path / "cache"))
    try:
        assert await asyncio.to_thread(other.stdout.readline) == "holding\n"
        bases = WorkspaceCache(tmp_path / "cache", max_gb=0.0001)
        bases.evict()
        assert (bases.folder / "a").is_dir()
        other.kill()
        await asyncio.to_thread(other.wait)
        bases.evict()
        assert not (bases.folder / "a").exists()
    finally:
        other.kill()
        other.communicate()


async def test_the_status_in_a_sandbox_reads_no_file_again(
    repo: Clone, bases: WorkspaceCache
) -> None:
    """The index of the base still holds in its copy-on-write view, so git reads times only."""
    async with bases.open(Workspace(repo=str(repo.folder))) as base:
        layer = OverlayWorkspace(bases.folder.parent / "sandbox", base, {})
        await asyncio.to_thread(layer.make)
        await asyncio.to_thread(layer.mount)
        try:
            if not layer.work.is_mount():
                pytest.skip("no overlay may be mounted here")
            index = layer.work / ".git" / "index"
            before = index.read_bytes()
            # A file whose content changed behind its time and size is not read, so not seen.
            (layer.work / "file").write_text("another")
            shutil.copystat(layer.lower / "file", layer.work / "file")  # type: ignore[operator]
            assert git(layer.work, "status", "--porcelain") == ""
            assert index.read_bytes() == before
            (layer.work / "file").write_text("longer than it was")
            assert git(layer.work, "status", "--porcelain") == "M file"
        finally:
            await asyncio.to_thread(layer.unmount)


def test_two_loops_may_use_the_same_cache(tmp_path: Path) -> None:
    """As two nodes in the threads of one process do."""
    bases = WorkspaceCache(tmp_path / "cache")

    async def fill(into: Path) -> None:
        await asyncio.sleep(0.05)
        (into / "x").touch()

    async def use() -> None:
        async with bases.entry("k", fill) as base:
            assert (base / "x").exists()

    threads = [threading.Thread(target=lambda: asyncio.run(use())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert (tmp_path / "cache" / "k" / "x").exists()
