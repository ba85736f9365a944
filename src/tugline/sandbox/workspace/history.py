"""Remove later commits from a repository out of an image, because they contain the solution.

Images of public task sets carry clones with all branches, remotes and reflogs; ``git log --all``
shows an agent how its issue was resolved. `end_history` keeps HEAD's commits, the tags on them, the
index and the files.

The repository is not trusted. Its objects are read by a new repository; its configuration, which
could name programs to run, is never used here, and no link is followed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from tugline.errors import DiskFull, WorkspaceError
from tugline.sandbox.files import translate_errors

_KEPT = frozenset(
    {"HEAD", "config", "description", "hooks", "index", "info", "lfs", "modules", "objects"}
)
"""What stays of a repository beside its refs; the rest refers to other commits."""
_CONFIG = {"core.checkStat": "minimal", "core.trustctime": "false", "gc.auto": "0"}
"""As in `repos`: or the first ``git status`` in a copy-on-write view reads every file."""
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_TAG = re.compile(r"refs/tags/[\w.+@/-]+")
_KEEP = "refs/heads/kept"
_LIMIT_S = 1800.0


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
        msg = f"{what}: the git repository in it has nothing checked out"
        raise WorkspaceError(msg)
    return head


def _create_repository(fresh: Path, own: Path, head: str, what: str) -> None:
    """Create a bare repository that borrows the objects, with one branch."""
    kind = ("--object-format=sha256",) if len(head) > 40 else ()
    _run(what, "init", "-q", "--bare", "--template=", *kind, str(fresh))
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
        _run(str(own), "config", "--file", str(own / "config"), name, value)


def _packed_refs(own: Path) -> dict[str, str]:
    parts = (line.partition(" ") for line in _read_text(own / "packed-refs").splitlines())
    return {ref.strip(): commit for commit, _, ref in parts if _HASH.fullmatch(commit)}


def _read_text(path: Path) -> str:
    return path.read_text(errors="replace") if path.is_file() else ""


def _git(fresh: Path, what: str, *argv: str, stdin: str = "") -> str:
    return _run(what, f"--git-dir={fresh}", *argv, stdin=stdin)


def _run(what: str, *argv: str, stdin: str = "") -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            ("git", *argv),
            cwd="/",
            env=env,
            input=stdin.encode(),
            capture_output=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        msg = f"{what}: git is needed on this node and failed: {error}"
        raise WorkspaceError(msg) from error
    if done.returncode == 0:
        return done.stdout.decode(errors="replace")
    reason = " ".join(done.stderr.decode(errors="replace").split())[-300:]
    msg = f"{what}: its git repository cannot be read: {reason}"
    raise DiskFull(msg) if "No space left" in reason else WorkspaceError(msg)
