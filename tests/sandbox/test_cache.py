"""The workspace cache, with real repositories."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.repositories import Clone, git
from tugline.errors import UsageError, WorkspaceError
from tugline.sandbox import repos
from tugline.sandbox.cache import WorkspaceCache
from tugline.sandbox.local import LocalRuntime
from tugline.sandbox.overlay import OverlayWorkspace
from tugline.types import Workspace


@pytest.fixture
def repo(tmp_path: Path) -> Clone:
    """A repository with a later commit that agents must not see."""
    return Clone(tmp_path / "repo")


def python(script: str, *argv: str) -> subprocess.Popen[str]:
    """Run a script with a cache in another process."""
    begin = "import asyncio, sys\nfrom pathlib import Path\nfrom tugline import log\n"
    begin += "from tugline.sandbox.cache import WorkspaceCache\n"
    begin += "from tugline.types import Workspace\nlog.configure()\n"
    argv = (sys.executable, "-c", begin + script + "\nasyncio.run(main())", *argv)
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def cache(tmp_path: Path) -> WorkspaceCache:
    """An empty cache."""
    return WorkspaceCache(tmp_path / "cache")


@pytest.mark.parametrize("prefix", ["", "file://"])
@pytest.mark.parametrize(
    ("name", "text"),
    [("v2", "present"), ("hash", "present"), ("other", "future"), (None, "present")],
)
async def test_commits_are_found_by_name(
    repo: Clone, cache: WorkspaceCache, prefix: str, name: str | None, text: str
) -> None:
    """A tag, full hash, branch or the head names a commit, from a path or a URL."""
    commit = repo.present if name == "hash" else name
    async with cache.open(Workspace(repo=f"{prefix}{repo.folder}", commit=commit)) as base:
        assert (base / "file").read_text() == text
        assert os.access(base / "file", os.X_OK)
        assert git(base, "status", "--porcelain") == ""
        assert git(base, "rev-parse", "HEAD") == getattr(repo, text)


async def test_later_history_is_removed(repo: Clone, cache: WorkspaceCache) -> None:
    """No later commit, branch, tag, remote, reflog or object is left."""
    async with cache.open(Workspace(repo=f"file://{repo.folder}", commit="v2")) as base:
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


async def test_concurrent_sessions_share_one_checkout(repo: Clone, tmp_path: Path) -> None:
    """Sessions of one or several processes share a checkout; no temporary folder is left."""
    script = (
        "async def main():\n"
        "  async with WorkspaceCache(Path(sys.argv[1])).open(Workspace(repo=sys.argv[2])) as b:\n"
        "    print(b.stat().st_ino)"
    )
    others = [python(script, str(tmp_path / "cache"), f"file://{repo.folder}") for _ in range(2)]
    cache = WorkspaceCache(tmp_path / "cache")

    async def open_base() -> str:
        async with cache.open(Workspace(repo=f"file://{repo.folder}")) as base:
            return str(base.stat().st_ino)

    mine = set(await asyncio.gather(*(open_base() for _ in range(8))))
    theirs = {(await asyncio.to_thread(other.communicate))[0].strip() for other in others}
    assert mine == theirs
    assert len(mine) == 1
    folders = [path.name[:4] for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert sorted(folders) == ["git-", "mirr"]


async def test_unavailable_workspaces_are_reported(
    repo: Clone, cache: WorkspaceCache, tmp_path: Path
) -> None:
    """The error names repository and commit, but no secrets of the URL."""
    commit = "0123456789012345678901234567890123456789"
    cases = {
        "has no tag or branch 'v9'; give a full hash, or a tag": Workspace(
            repo=str(repo.folder), commit="v9"
        ),
        f"has no commit '{commit}'": Workspace(repo=f"file://{repo.folder}", commit=commit),
        "none' is not a folder on this node": Workspace(repo=str(tmp_path / "none"), commit="v9"),
        "git says: .*does not appear to be a git": Workspace(repo=str(tmp_path), commit="v1"),
        r"'https://\*\*\*@127.0.0.1:9/x'.*git says": Workspace(
            repo="https://me:word@127.0.0.1:9/x", commit="v1"
        ),
        "folder is '/none', which is not a folder": Workspace(folder="/none"),
    }
    for message, workspace in cases.items():
        with pytest.raises(WorkspaceError, match=message) as caught:
            async with cache.open(workspace):
                pass
        assert "word" not in str(caught.value)
    assert len(await LocalRuntime().prefetch(cases.values())) == len(cases)
    assert not [
        path for path in cache.folder.iterdir() if path.name.startswith("git-") and path.is_dir()
    ]


@pytest.mark.parametrize(
    ("workspace", "expected"),
    [
        (Workspace(repo="/r", folder="/f"), "must be left out if `repo` is set"),
        (Workspace(commit="x"), "workspace.commit is 'x', must be left out if neither `repo`"),
        (
            Workspace(folder="/f", commit="x"),
            "workspace.commit is 'x', must be left out if `folder` is set",
        ),
        (Workspace(folder="a"), "workspace.folder is 'a', must be an absolute path"),
        (Workspace(folder="/"), "the root of the node cannot be a workspace"),
        (Workspace(repo="a/b"), "workspace.repo is 'a/b', must be a URL or an absolute path"),
        (Workspace(repo="--upload-pack=touch /x"), "must be a URL or an absolute path"),
        (Workspace(repo="ext::sh -c touch% /x"), "must be a URL or an absolute path"),
        (Workspace(repo="/r", commit="--all"), "must be a full hash, a tag or a branch"),
    ],
)
async def test_invalid_workspaces_are_refused(
    cache: WorkspaceCache, workspace: Workspace, expected: str
) -> None:
    """The error has the field, the value and what would be right; git is not run."""
    with pytest.raises(UsageError, match=expected):
        async with cache.open(workspace):
            pass


async def test_a_silent_server_is_an_error(
    cache: WorkspaceCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Git and its children are killed at the timeout."""
    monkeypatch.setattr(repos, "_QUERY_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"git://127.0.0.1:{silent.getsockname()[1]}/x"
        began = time.monotonic()
        with pytest.raises(WorkspaceError, match=r"git did not finish within .* can this node"):
            async with cache.open(Workspace(repo=url)):
                pass
        assert time.monotonic() - began < 5


async def test_a_cancelled_session_does_not_cancel_a_checkout(cache: WorkspaceCache) -> None:
    """The next session gets the checkout without a second one."""
    fills = []

    async def fill(into: Path) -> None:
        fills.append(into)
        await asyncio.sleep(0.2)
        (into / "x").touch()

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05), cache.entry("image-1", fill):
            pass
    async with cache.entry("image-1", fill) as base:
        assert (base / "x").exists()
    assert len(fills) == 1


async def test_a_failed_checkout_is_repeated(cache: WorkspaceCache) -> None:
    """Waiting sessions get the error, nothing is left, and the next session tries again."""

    async def fails(into: Path) -> None:
        (into / "half").touch()
        msg = "no"
        raise WorkspaceError(msg)

    async def fill(into: Path) -> None:
        assert not os.listdir(into)  # noqa: PTH208

    for _ in range(2):
        with pytest.raises(WorkspaceError, match="no"):
            async with cache.entry("k", fails):
                pass
    assert not [path for path in cache.folder.iterdir() if path.is_dir()]
    async with cache.entry("k", fill) as base:
        assert base.is_dir()


async def test_least_recently_used_entries_are_evicted(tmp_path: Path) -> None:
    """Entries in use are kept, and evicted ones are created again."""
    cache = WorkspaceCache(tmp_path / "cache", max_gb=0.0025)
    fills: list[str] = []

    async def fill(into: Path) -> None:
        fills.append(into.name[0])
        (into / "x").write_bytes(os.urandom(1_000_000))
        await asyncio.sleep(0.02)  # times of use must differ

    async with cache.entry("a", fill):
        async with cache.entry("b", fill):
            pass
        async with cache.entry("c", fill):
            pass
        async with cache.entry("d", fill):
            names = {path.name for path in cache.folder.iterdir() if path.is_dir()}
            assert names == {"a", "d"}
        async with cache.entry("b", fill):
            pass
    assert fills == ["a", "b", "c", "d", "b"]


def test_unfinished_entries_of_killed_processes_are_removed(tmp_path: Path) -> None:
    """Locked entries, which a process is working on, are kept."""
    cache = WorkspaceCache(tmp_path)
    for name in ("git-1.part", "git-2.part", "git-3.part"):
        (tmp_path / name / "below").mkdir(parents=True)
    handle = os.open(tmp_path / "git-1.make", os.O_CREAT | os.O_RDWR)
    fcntl.flock(handle, fcntl.LOCK_EX)
    cache.evict()
    assert {path.name for path in tmp_path.glob("*.part")} == {"git-1.part"}
    os.close(handle)
    cache.evict()
    assert not list(tmp_path.glob("*.part"))


async def test_entries_used_by_another_process_are_not_evicted(tmp_path: Path) -> None:
    """The lock of an entry ends with its process, even if that is killed."""
    script = (
        "async def fill(into): (into / 'x').write_bytes(b'x' * 1_000_000)\n"
        "async def main():\n"
        "  async with WorkspaceCache(Path(sys.argv[1])).entry('a', fill):\n"
        "    print('holding', flush=True); await asyncio.sleep(60)"
    )
    other = python(script, str(tmp_path / "cache"))
    try:
        assert await asyncio.to_thread(other.stdout.readline) == "holding\n"
        cache = WorkspaceCache(tmp_path / "cache", max_gb=0.0001)
        cache.evict()
        assert (cache.folder / "a").is_dir()
        other.kill()
        await asyncio.to_thread(other.wait)
        cache.evict()
        assert not (cache.folder / "a").exists()
    finally:
        other.kill()
        other.communicate()


async def test_git_status_in_a_sandbox_reads_no_files(repo: Clone, cache: WorkspaceCache) -> None:
    """The base's index is valid in an overlay, so that git compares times only."""
    async with cache.open(Workspace(repo=str(repo.folder))) as base:
        layer = OverlayWorkspace(cache.folder.parent / "sandbox", base, {})
        await asyncio.to_thread(layer.make)
        await asyncio.to_thread(layer.mount)
        try:
            if not layer.work.is_mount():
                pytest.skip("no overlay may be mounted here")
            index = layer.work / ".git" / "index"
            before = index.read_bytes()
            # A change that keeps time and size is not noticed, since the file is not read.
            (layer.work / "file").write_text("another")
            shutil.copystat(layer.lower / "file", layer.work / "file")  # type: ignore[operator]
            assert git(layer.work, "status", "--porcelain") == ""
            assert index.read_bytes() == before
            (layer.work / "file").write_text("longer than it was")
            assert git(layer.work, "status", "--porcelain") == "M file"
        finally:
            await asyncio.to_thread(layer.unmount)


def test_several_event_loops_share_a_cache(tmp_path: Path) -> None:
    """Two nodes in threads of one process can use one cache."""
    cache = WorkspaceCache(tmp_path / "cache")

    async def fill(into: Path) -> None:
        await asyncio.sleep(0.05)
        (into / "x").touch()

    async def use() -> None:
        async with cache.entry("k", fill) as base:
            assert (base / "x").exists()

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda _: asyncio.run(use()), range(3)))
    assert (tmp_path / "cache" / "k" / "x").exists()
