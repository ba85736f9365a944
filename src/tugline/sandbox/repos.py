"""Git repositories as workspaces: one commit with its history, and nothing later.

An agent must not find the fix: later commits, other branches, tags, remotes and reflogs are not in
its repository, so no git command shows them. A URL is mirrored once; each commit is checked out of
the mirror. Files get the commit's time, so that all checkouts are equal and ``git status`` in a
copy-on-write view compares times instead of reading all files again.

Images of public task sets contain clones that include the solution. `end_history` keeps HEAD's
commits, the tags on them, the index and the files. Such a repository is not trusted: a new
repository reads its objects, its configuration, which could name programs to run, is never used,
and no link is followed.

No code of a repository is run, git never prompts, and every command has a timeout.
"""

import asyncio
import contextlib
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import msgspec

from tugline.errors import DiskFull, UsageError, WorkspaceError
from tugline.sandbox.files import translate_errors
from tugline.sandbox.processes import run_command

_FETCH_S = 1800.0
_QUERY_S = 60.0
_LOCAL_S = 600.0
_MAX_REASON = 300
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_URL = re.compile(r"[a-z][a-z0-9+.-]*://|[^/]+@[^/:]+:", re.IGNORECASE)
_UPLOAD = "--upload-pack=git -c uploadpack.allowAnySHA1InWant=true upload-pack"
"""Option that allows fetching a commit that no branch or tag points to."""
_CONFIG = {
    # A copy, and an overlay on another disk, change inode numbers and ctimes: without these two
    # settings, the first `git status` of every sandbox reads every file.
    "core.checkStat": "minimal",
    "core.trustctime": "false",
    # Repacking would copy the whole history into the sandbox's layer.
    "gc.auto": "0",
    "maintenance.auto": "false",
}
_USER = {"user.name": "agent", "user.email": "agent@localhost"}
_REPOSITORY_VARIABLES = frozenset(
    {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_NAMESPACE"}
)
"""Variables that git sets when it starts this process, as in a hook; removed for our commands."""
_NO_CONFIG = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
_KEPT = frozenset({"config", "description", "hooks", "index", "info", "lfs", "modules"})
"""Entries kept of the ``.git`` of an image; the others refer to other commits."""


class RepoSource(msgspec.Struct, frozen=True):
    """A repository: a URL, or a path on this machine."""

    where: str
    local: bool

    def __str__(self) -> str:
        return f"repository {_without_secrets(self.where)!r}"

    async def resolve(self, commit: str | None) -> str:
        """Return the full hash of `commit`; a tag takes precedence over a branch of that name."""
        wanted = commit or "HEAD"
        if _HASH.fullmatch(wanted):
            return wanted
        if wanted.startswith("-") or not re.fullmatch(r"[\w./@+-]+", wanted):
            must = "a full hash, a tag or a branch"
            raise UsageError(f"workspace.commit is {commit!r}, must be {must}")
        if self.local and not await asyncio.to_thread(Path(self.where).is_dir):
            raise WorkspaceError(f"{self} is not a folder on this node")
        names = [f"refs/tags/{wanted}^{{}}", f"refs/tags/{wanted}", f"refs/heads/{wanted}", wanted]
        output = await self._git("ls-remote", "-q", "--", self.where, *names)
        commits = {name: commit for commit, name in map(str.split, output.splitlines())}
        for name in names:
            if name in commits:
                return commits[name]
        raise WorkspaceError(
            f"{self} has no tag or branch {wanted!r}; give a full hash, or a tag or branch "
            "that exists"
        )

    async def begin_mirror(self, into: Path) -> None:
        """Create an empty mirror."""
        await self._git("init", "-q", "--bare", "--template=", str(into))

    async def update_mirror(self, mirror: Path, commit: str) -> bool:
        """Fetch `commit` if it is missing; return whether a fetch was needed."""
        if await self._has(mirror, commit):
            return False
        heads = ("+refs/heads/*:refs/heads/*", "+refs/tags/*:refs/tags/*")
        slow = ("-c", "http.lowSpeedLimit=1000", "-c", "http.lowSpeedTime=60")
        fetch = (*slow, "-C", str(mirror), "fetch", "-q", "--no-tags", "--", self.where)
        await self._git(*fetch, *heads, timeout_s=_FETCH_S)
        if not await self._has(mirror, commit):
            # A commit of a pull request or a deleted branch: some servers serve it by its hash.
            with contextlib.suppress(WorkspaceError):
                await self._git(*fetch, f"+{commit}:refs/kept/{commit}", timeout_s=_FETCH_S)
        return True

    async def check_out(self, repository: Path, commit: str, into: Path) -> None:
        """Fill the folder `into` with the files of `commit` and a repository that ends there."""
        if not await self._has(repository, commit):
            msg = (
                f"{self} has no commit {commit!r}; give the full hash of a commit that exists, "
                "or a tag or branch"
            )
            raise WorkspaceError(msg)
        git = partial(self._git, "-C", str(into), env=_NO_CONFIG)
        await git("init", "-q", "--template=", "-b", "main")
        for name, value in (_CONFIG | _USER).items():
            await git("config", name, value)
        fetch = ("fetch", "-q", "--no-tags", _UPLOAD, "--", str(repository), commit)
        await git("-c", "fetch.unpackLimit=1", *fetch, timeout_s=_FETCH_S)
        await git("checkout", "-q", "-B", "main", commit, timeout_s=_LOCAL_S)
        committed = await git("log", "-1", "--format=%ct", commit)
        await asyncio.to_thread(_set_times, into, min(int(committed), int(time.time()) - 10))
        await git("update-index", "-q", "--refresh", timeout_s=_LOCAL_S)

    async def _has(self, repository: Path, commit: str) -> bool:
        query = ("-C", str(repository), "cat-file", "-e", f"{commit}^{{commit}}")
        with contextlib.suppress(WorkspaceError):
            await self._git(*query)
            return True
        return False

    @property
    def _git(self) -> Callable[..., Awaitable[str]]:
        return partial(_run_git, str(self))


async def _run_git(
    what: str, *argv: str, env: dict[str, str] | None = None, timeout_s: float | None = None
) -> str:
    """Return git's stdout. Raises `WorkspaceError` with `what` as prefix, or `DiskFull`."""
    env = _git_env() | (env or {})
    timeout_s = timeout_s or _QUERY_S
    try:
        code, out, errors = await run_command(("git", *argv), env=env, timeout_s=timeout_s)
    except FileNotFoundError as error:
        raise WorkspaceError(f"{what}: git is not installed on this node") from error
    except TimeoutError as error:
        msg = f"{what}: git did not finish within {timeout_s:.0f} s; can this node reach it?"
        raise WorkspaceError(msg) from error
    if code == 0:
        return out
    msg = f"{what}: git says: {_without_secrets(' '.join(errors.split()))[-_MAX_REASON:]}"
    raise DiskFull(msg) if "No space left" in errors else WorkspaceError(msg)


def _git_env() -> dict[str, str]:
    """Return this process's environment for a git that never prompts."""
    ssh = os.environ.get("GIT_SSH_COMMAND", "ssh -o BatchMode=yes -o ConnectTimeout=20")
    no_prompts = {"GIT_TERMINAL_PROMPT": "0", "GIT_ASKPASS": "true", "GIT_SSH_COMMAND": ssh}
    env = {name: value for name, value in os.environ.items() if name not in _REPOSITORY_VARIABLES}
    return {**env, "LC_ALL": "C", **no_prompts}


def source_of(repo: str) -> RepoSource:
    """Parse `Workspace.repo`. Raises `UsageError` if it is neither a URL nor an absolute path."""
    if "\0" not in repo and not repo.lower().startswith(("-", "ext::")):
        if _URL.match(repo):
            return RepoSource(repo, local=False)
        if Path(repo).is_absolute():
            return RepoSource(str(Path(repo).resolve()), local=True)
    raise UsageError(f"workspace.repo is {repo!r}, must be a URL or an absolute path on the node")


def _set_times(folder: Path, when: int) -> None:
    """Remove logs and ``FETCH_HEAD``, and set the mtime of every file to `when`."""
    shutil.rmtree(folder / ".git" / "logs", ignore_errors=True)
    for name in ("FETCH_HEAD", "ORIG_HEAD"):
        (folder / ".git" / name).unlink(missing_ok=True)
    for path, folders, files in os.walk(folder):
        if ".git" in folders and Path(path) == folder:
            folders.remove(".git")
        for name in files:
            os.utime(os.path.join(path, name), (when, when), follow_symlinks=False)  # noqa: PTH118


def _without_secrets(text: str) -> str:
    return re.sub(r"//[^/@\s']*@", "//***@", text)


async def end_history(folder: Path, commit: str, what: str) -> None:
    """Remove all commits but HEAD's history from the repository in `folder`.

    `commit` must be in that history, or ``HEAD``. Raises `WorkspaceError` with `what` as prefix.
    """
    own = folder / ".git"
    if own.is_symlink() or not own.is_dir():
        msg = f"{what} is not a git repository, so workspace.commit cannot be {commit!r}"
        raise WorkspaceError(msg)
    run = partial(_run_git, f"{what}: its git repository", env=_NO_CONFIG, timeout_s=_FETCH_S)
    with translate_errors(f"cannot change {own}"), tempfile.TemporaryDirectory(dir=folder) as name:
        fresh = Path(name)
        git = partial(run, f"--git-dir={name}")
        await run("init", "-q", "--bare", "--template=", name)
        await asyncio.to_thread(_borrow, own, fresh)
        head = await _read_head(git, commit, what)
        columns = "--format=%(objectname) %(refname)"
        tags = await git("for-each-ref", columns, "--merged", head, "refs/tags")
        shutil.rmtree(fresh / "refs")
        (fresh / "refs" / "heads").mkdir(parents=True)
        (fresh / "packed-refs").write_text(tags)  # programs read versions from them
        await git("update-ref", "HEAD", head)
        await git("repack", "-a", "-d", "-q")
        (fresh / "objects" / "info" / "alternates").unlink()
        await asyncio.to_thread(_swap, own, fresh)
    for name, value in _CONFIG.items():
        await run("config", "--file", str(own / "config"), name, value)


def _borrow(own: Path, fresh: Path) -> None:
    """Copy HEAD, refs and index, and borrow the objects; remove links and existing alternates."""
    for parent, folders, names in os.walk(own):
        for path in (Path(parent, name) for name in (*folders, *names)):
            mode = path.lstat().st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                path.unlink()
    (own / "objects" / "info" / "alternates").unlink(missing_ok=True)
    (fresh / "objects" / "info").mkdir(exist_ok=True)
    (fresh / "objects" / "info" / "alternates").write_text(f"{own / 'objects'}\n")
    for name in ("HEAD", "packed-refs", "index", "shallow"):
        if (own / name).is_file():
            shutil.copyfile(own / name, fresh / name)
    if (own / "refs").is_dir():
        shutil.copytree(own / "refs", fresh / "refs", dirs_exist_ok=True)


async def _read_head(git: Callable[..., Awaitable[str]], commit: str, what: str) -> str:
    """Return the checked-out commit, which must be `commit` or a descendant."""
    try:
        head = (await git("rev-parse", "--verify", "-q", "HEAD^{commit}")).strip()
    except WorkspaceError as error:
        raise WorkspaceError(f"{what}: its git repository has no commit checked out") from error
    try:
        await git("merge-base", "--is-ancestor", commit, head)
    except WorkspaceError as error:
        msg = f"{what}: commit {commit!r} is not in the history of the checked-out commit"
        raise WorkspaceError(msg) from error
    return head


def _swap(own: Path, fresh: Path) -> None:
    """Replace the objects and refs of `own` by those of `fresh`."""
    for entry in own.iterdir():
        if entry.name not in _KEPT and not entry.name.startswith("sharedindex."):
            (shutil.rmtree if entry.is_dir() else os.unlink)(entry)
    (own / "info" / "refs").unlink(missing_ok=True)
    for name in ("HEAD", "objects", "packed-refs", "refs", "shallow"):
        if (fresh / name).exists():
            (fresh / name).rename(own / name)
