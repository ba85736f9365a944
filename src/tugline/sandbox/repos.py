"""Git repositories as workspaces: one commit with its history, and nothing later.

An agent must not find the fix: later commits, other branches, tags, remotes and reflogs are not in
its repository, whatever it asks git for. A URL is mirrored once, each commit is checked out of the
mirror. Files get the commit's time, so that every checkout of it is the same and ``git status`` in
a copy-on-write view compares times instead of reading all files again.

Images of public task sets carry clones with the solution in them. `end_history` keeps HEAD's
commits, the tags on them, the index and the files. Such a repository is not trusted: its objects
are read by a new repository, its configuration, which could name programs to run, is never used
here, and no link is followed.

No code of a repository is run here, git never prompts, and every command has a timeout.
"""

import asyncio
import contextlib
import os
import re
import shutil
import subprocess
import time
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
"""Allow to fetch a commit that is no branch's or tag's head."""
_CONFIG = {
    # A copy, and an overlay on another disk, change inode numbers and times of change: without
    # these two, the first `git status` of every sandbox reads every file.
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
"""Set where this process is started by git itself, as in a hook."""
_NO_CONFIG = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}


_KEPT = frozenset(
    {"HEAD", "config", "description", "hooks", "index", "info", "lfs", "modules", "objects"}
)
"""What stays of an image's repository beside its refs; the rest refers to other commits."""
_TAG = re.compile(r"refs/tags/[\w.+@/-]+")
_KEEP = "refs/heads/kept"


class RepoSource(msgspec.Struct, frozen=True):
    """A repository: a URL, or a path of this machine."""

    where: str
    local: bool

    def __str__(self) -> str:
        return f"repository {_without_secrets(self.where)!r}"

    async def find_commit(self, wanted: str) -> str:
        """Return the full hash of a tag or a branch."""
        names = [f"refs/tags/{wanted}^{{}}", f"refs/tags/{wanted}", f"refs/heads/{wanted}", wanted]
        output = await self._git("ls-remote", "-q", "--", self.where, *names)
        commits = {name: commit for commit, name in map(str.split, output.splitlines())}
        for name in names:
            if name in commits:
                return commits[name]
        raise WorkspaceError(f"{self} has no {wanted!r}: give a full hash, a tag or a branch of it")

    async def begin_mirror(self, into: Path) -> None:
        """Create an empty mirror."""
        await self._git("init", "-q", "--bare", "--template=", str(into))

    async def update_mirror(self, mirror: Path, commit: str) -> bool:
        """Fetch what is missing for `commit`; return whether anything was."""
        if await self._has(mirror, commit):
            return False
        heads = ("+refs/heads/*:refs/heads/*", "+refs/tags/*:refs/tags/*")
        slow = ("-c", "http.lowSpeedLimit=1000", "-c", "http.lowSpeedTime=60")
        fetch = (*slow, "-C", str(mirror), "fetch", "-q", "--no-tags", "--", self.where)
        await self._git(*fetch, *heads, timeout_s=_FETCH_S)
        if not await self._has(mirror, commit):
            # Of a pull request, or of a deleted branch: some servers serve it by its hash.
            with contextlib.suppress(WorkspaceError):
                await self._git(*fetch, f"+{commit}:refs/kept/{commit}", timeout_s=_FETCH_S)
        return True

    async def check_out(self, repository: Path, commit: str, into: Path) -> None:
        """Fill the folder `into` with the files of `commit` and a repository that ends there."""
        if not await self._has(repository, commit):
            msg = f"{self} has no commit {commit!r}: give a full hash, a tag or a branch of it"
            raise WorkspaceError(msg)
        git = ("-C", str(into))
        await self._git("init", "-q", "--template=", "-b", "main", str(into), env=_NO_CONFIG)
        for name, value in (_CONFIG | _USER).items():
            await self._git(*git, "config", name, value)
        fetch = ("fetch", "-q", "--no-tags", _UPLOAD, "--", str(repository), commit)
        await self._git(
            *git, "-c", "fetch.unpackLimit=1", *fetch, env=_NO_CONFIG, timeout_s=_FETCH_S
        )
        await self._git(
            *git, "checkout", "-q", "-B", "main", commit, env=_NO_CONFIG, timeout_s=_LOCAL_S
        )
        committed = await self._git(*git, "log", "-1", "--format=%ct", commit, env=_NO_CONFIG)
        await asyncio.to_thread(_set_times, into, min(int(committed), int(time.time()) - 10))
        await self._git(*git, "update-index", "-q", "--refresh", env=_NO_CONFIG, timeout_s=_LOCAL_S)

    async def _has(self, repository: Path, commit: str) -> bool:
        query = ("-C", str(repository), "cat-file", "-e", f"{commit}^{{commit}}")
        with contextlib.suppress(WorkspaceError):
            await self._git(*query)
            return True
        return False

    async def _git(
        self, *argv: str, env: dict[str, str] | None = None, timeout_s: float | None = None
    ) -> str:
        timeout_s = timeout_s or _QUERY_S
        try:
            code, out, errors = await run_command(
                ("git", *argv), env=_git_env() | (env or {}), timeout_s=timeout_s
            )
        except FileNotFoundError as error:
            raise WorkspaceError(f"{self}: there is no git on this node; install it") from error
        except TimeoutError as error:
            msg = f"{self}: git did not finish within {timeout_s:.0f} s; can this node reach it?"
            raise WorkspaceError(msg) from error
        return _check_result(code, out, errors, str(self))


def _git_env() -> dict[str, str]:
    """Return this process's environment for a git that never prompts."""
    ssh = os.environ.get("GIT_SSH_COMMAND", "ssh -o BatchMode=yes -o ConnectTimeout=20")
    no_prompts = {"GIT_TERMINAL_PROMPT": "0", "GIT_ASKPASS": "true", "GIT_SSH_COMMAND": ssh}
    kept = {name: value for name, value in os.environ.items() if name not in _REPOSITORY_VARIABLES}
    return {**kept, "LC_ALL": "C", **no_prompts}


def source_of(repo: str) -> RepoSource:
    """Parse a `Workspace.repo`. Raises `UsageError` for what can be neither URL nor path."""
    if "\0" not in repo and not repo.lower().startswith(("-", "ext::")):
        if _URL.match(repo):
            return RepoSource(repo, local=False)
        if Path(repo).is_absolute():
            return RepoSource(str(Path(repo).resolve()), local=True)
    raise UsageError(f"workspace.repo is {repo!r}, must be a URL or an absolute path of the node")


async def resolve(source: RepoSource, commit: str | None) -> str:
    """Return the full hash of `commit`; a tag goes before a branch of that name."""
    wanted = commit or "HEAD"
    if _HASH.fullmatch(wanted):
        return wanted
    if wanted.startswith("-") or not re.fullmatch(r"[\w./@+-]+", wanted):
        raise UsageError(f"workspace.commit is {commit!r}, must be a full hash, a tag or a branch")
    if source.local and not await asyncio.to_thread(Path(source.where).is_dir):
        raise WorkspaceError(f"{source} is no folder on this node")
    return await source.find_commit(wanted)


def _set_times(folder: Path, when: int) -> None:
    """Remove traces of the fetch, and give every file the same time."""
    shutil.rmtree(folder / ".git" / "logs", ignore_errors=True)
    for name in ("FETCH_HEAD", "ORIG_HEAD"):
        (folder / ".git" / name).unlink(missing_ok=True)
    for here, folders, files in os.walk(folder):
        if ".git" in folders and Path(here) == folder:
            folders.remove(".git")
        for name in files:
            os.utime(os.path.join(here, name), (when, when), follow_symlinks=False)  # noqa: PTH118


def _check_result(code: int, output: str, errors: str, what: str) -> str:
    """Return what git printed. Raises `DiskFull` or `WorkspaceError` if it failed."""
    if code == 0:
        return output
    msg = f"{what}: git says: {_without_secrets(' '.join(errors.split()))[-_MAX_REASON:]}"
    raise DiskFull(msg) if "No space left" in errors else WorkspaceError(msg)


def _without_secrets(text: str) -> str:
    return re.sub(r"//[^/@\s']*@", "//***@", text)


def end_history(folder: Path, commit: str, what: str) -> None:
    """Remove all but HEAD's own history from the repository of `folder`. Blocks.

    `commit` must be part of it, or be ``HEAD``. Raises `WorkspaceError`, which calls it `what`.
    """
    own, fresh = folder / ".git", folder / ".git.ended"
    if own.is_symlink() or not own.is_dir():
        msg = f"{what} is no git repository, so workspace.commit cannot be {commit!r}"
        raise WorkspaceError(msg)
    with translate_errors(f"cannot change {own}"):
        _remove_links(own)
        (own / "objects" / "info" / "alternates").unlink(missing_ok=True)
        head = _read_head(own, what)
        try:
            _create_repository(fresh, own, head, what)
            if commit != "HEAD":
                _check_contains(fresh, commit, what)
            _keep_tags(fresh, own, what)
            _git(fresh, what, "repack", "-a", "-d", "-q")
            (fresh / "objects" / "info" / "alternates").unlink()
            _swap(own, fresh, head)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)


def _remove_links(own: Path) -> None:
    for here, folders, names in os.walk(own):
        for name in (*folders, *names):
            if (path := Path(here, name)).is_symlink():
                path.unlink()


def _read_head(own: Path, what: str) -> str:
    """Return the commit that is checked out."""
    head = _read_text(own / "HEAD").strip()
    if head.startswith("ref: "):
        name = head.removeprefix("ref: ")
        loose = own / name if ".." not in name else own
        head = _read_text(loose).strip() or _packed_refs(own).get(name, "")
    if not _HASH.fullmatch(head):
        raise WorkspaceError(f"{what}: the git repository in it has nothing checked out")
    return head


def _create_repository(fresh: Path, own: Path, head: str, what: str) -> None:
    """Create a bare repository that borrows the objects, with one branch."""
    kind = ("--object-format=sha256",) if len(head) > 40 else ()
    _run_git(what, "init", "-q", "--bare", "--template=", *kind, str(fresh))
    (fresh / "objects" / "info").mkdir(exist_ok=True)
    (fresh / "objects" / "info" / "alternates").write_text(f"{own / 'objects'}\n")
    for name in ("index", "shallow"):
        if (own / name).is_file():
            shutil.copyfile(own / name, fresh / name)
    _git(fresh, what, "update-ref", _KEEP, head)


def _check_contains(fresh: Path, commit: str, what: str) -> None:
    try:
        _git(fresh, what, "merge-base", "--is-ancestor", commit, _KEEP)
    except WorkspaceError as error:
        msg = f"{what} has no commit {commit!r} in the history of what is checked out"
        raise WorkspaceError(msg) from error


def _keep_tags(fresh: Path, own: Path, what: str) -> None:
    """Keep the tags of earlier commits, which programs read versions from."""
    tags = _packed_refs(own)
    root = own / "refs" / "tags"
    for here, _, names in os.walk(root):
        tags |= {
            f"refs/tags/{Path(here, name).relative_to(root)}": _read_text(Path(here, name)).strip()
            for name in names
        }
    good = {ref: at for ref, at in tags.items() if _TAG.fullmatch(ref) and _HASH.fullmatch(at)}
    hashes = "".join(f"{at}\n" for at in good.values())
    kinds = _git(fresh, what, "cat-file", "--batch-check=%(objecttype)", stdin=hashes).splitlines()
    there = [
        tag for tag, kind in zip(good.items(), kinds, strict=True) if kind in {"commit", "tag"}
    ]
    refs = fresh / "packed-refs"
    refs.write_text("".join(f"{at} {ref}\n" for ref, at in sorted(there)))
    columns = "--format=%(objectname) %(refname)"
    refs.write_text(_git(fresh, what, "for-each-ref", columns, "--merged", _KEEP, "refs/tags"))


def _swap(own: Path, fresh: Path, head: str) -> None:
    """Replace the old objects and refs by the new ones."""
    for entry in own.iterdir():
        if entry.name in _KEPT - {"objects"} or entry.name.startswith("sharedindex."):
            continue
        (shutil.rmtree if entry.is_dir() else os.unlink)(entry)
    (own / "info" / "refs").unlink(missing_ok=True)
    for name in ("objects", "packed-refs", "shallow"):
        if (fresh / name).exists():
            (fresh / name).rename(own / name)
    (own / "refs" / "heads").mkdir(parents=True)
    (own / "refs" / "tags").mkdir()
    branch = _read_text(own / "HEAD").strip().removeprefix("ref: ")
    if re.fullmatch(r"refs/heads/[\w.+@/-]+", branch) and ".." not in branch:
        (own / branch).parent.mkdir(parents=True, exist_ok=True)
        (own / branch).write_text(f"{head}\n")
    else:
        (own / "HEAD").write_text(f"{head}\n")
    for name, value in _CONFIG.items():
        _run_git(str(own), "config", "--file", str(own / "config"), name, value)


def _packed_refs(own: Path) -> dict[str, str]:
    parts = (line.partition(" ") for line in _read_text(own / "packed-refs").splitlines())
    return {ref.strip(): commit for commit, _, ref in parts if _HASH.fullmatch(commit)}


def _read_text(path: Path) -> str:
    return path.read_text(errors="replace") if path.is_file() else ""


def _git(fresh: Path, what: str, *argv: str, stdin: str = "") -> str:
    return _run_git(what, f"--git-dir={fresh}", *argv, stdin=stdin)


def _run_git(what: str, *argv: str, stdin: str = "") -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            ("git", *argv),
            cwd="/",
            env=env,
            input=stdin.encode(),
            capture_output=True,
            timeout=_FETCH_S,
            check=False,
        )
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        raise WorkspaceError(f"{what}: git is needed on this node and failed: {error}") from error
    output, errors = (text.decode(errors="replace") for text in (done.stdout, done.stderr))
    return _check_result(done.returncode, output, errors, f"{what}: its git repository")
