"""Removal of later history from the repository of an image."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from support.commands import run_program
from support.repositories import Clone, git
from tugline.errors import WorkspaceError
from tugline.sandbox.repos import end_history


def end_at(clone: Clone, commit: str = "HEAD") -> None:
    """Remove the history after a commit."""
    asyncio.run(end_history(clone.folder, commit, "the clone"))


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    """A repository that is checked out at its present commit."""
    return Clone(tmp_path / "clone")


def test_later_history_is_removed(clone: Clone) -> None:
    """Branches, remotes, tags, reflogs and objects have no later commit."""
    clone.git("stash", "list")
    assert "future" in clone.git("log", "--all", "--format=%s")
    end_at(clone, clone.present)
    assert set(clone.git("log", "--all", "--reflog", "--format=%s").split()) == {"present", "past"}
    clone.git("cat-file", "-e", clone.future, code=1)
    assert clone.git("fsck", "--full", "--unreachable", "--no-reflogs") == ""
    refs = clone.git("for-each-ref", "--format=%(refname)").split()
    assert refs == ["refs/tags/v1", "refs/tags/v2"]
    assert run_program("grep", "-ra", clone.future, clone.folder).returncode == 1
    assert {path.name for path in clone.folder.iterdir()} == {".git", "file"}


def test_the_repository_still_works(clone: Clone) -> None:
    """Status, `git describe`, checkout of a file and a new commit work."""
    (clone.folder / "staged").write_text("new")
    clone.git("add", "staged")
    clone.git("pack-refs", "--all")
    end_at(clone, clone.past)
    assert clone.git("rev-parse", "HEAD") == clone.present
    assert clone.git("status", "--short") == "A  staged"
    assert clone.git("describe") == "v2"
    (clone.folder / "file").write_text("changed")
    clone.git("checkout", clone.present, "--", "file")
    assert (clone.folder / "file").read_text() == "present"
    clone.commit("own")
    assert clone.git("config", "core.checkStat") == "minimal"


def test_a_branch_stays_a_branch(clone: Clone) -> None:
    """HEAD still names its branch, even if the ref of the branch is packed."""
    clone.git("checkout", "-q", "-b", "fix/it", clone.past)
    clone.git("pack-refs", "--all")
    end_at(clone)
    assert clone.git("symbolic-ref", "HEAD") == "refs/heads/fix/it"
    assert clone.git("log", "--all", "--format=%s") == "past"


def test_a_shallow_clone_stays_one(clone: Clone, tmp_path: Path) -> None:
    """The history of the clone ends at the same commit."""
    source = f"file://{clone.folder}"
    git(tmp_path, "clone", "-q", "--depth=1", "-b", "other", source, "s")
    asyncio.run(end_history(tmp_path / "s", "HEAD", "it"))
    assert git(tmp_path / "s", "log", "--format=%s") == "future"


def test_no_hook_is_run_and_no_link_followed(clone: Clone, tmp_path: Path) -> None:
    """Removing history runs nothing of the repository, not even a configured command."""
    ran, beyond = tmp_path / "ran", tmp_path / "beyond"
    beyond.mkdir()
    (beyond / "file").write_text("mine")
    for name in ("core.fsmonitor", "core.sshCommand", "uploadpack.packObjectsHook"):
        clone.git("config", name, f"touch {ran}")
    for hook in ("reference-transaction", "post-checkout"):
        path = clone.folder / ".git" / "hooks" / hook
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\ntouch {ran}\n")
        path.chmod(0o755)
    (clone.folder / ".git" / "logs" / "out").symlink_to(beyond)
    (clone.folder / ".git" / "objects" / "out").symlink_to(beyond)
    ran.unlink(missing_ok=True)
    end_at(clone)
    assert not ran.exists()
    assert (beyond / "file").read_text() == "mine"


def test_broken_tags_are_removed(clone: Clone) -> None:
    """Tags of missing objects, damaged tags and tags with invalid names are deleted."""
    for name, text in (("gone", f"{'1' * 40}\n"), ("broken", "x\n"), ("odd..name", clone.past)):
        (clone.folder / ".git" / "refs" / "tags" / name).write_text(text)
    os.mkfifo(clone.folder / ".git" / "refs" / "tags" / "pipe")
    end_at(clone)
    assert clone.git("tag").split() == ["v1", "v2"]


def test_another_commit_is_an_error(clone: Clone) -> None:
    """A repository that is not at the given commit is not changed."""
    with pytest.raises(WorkspaceError, match=f"the clone: commit '{clone.future}' is not in the"):
        end_at(clone, clone.future)
    assert "future" in clone.git("log", "--all", "--format=%s")


def test_no_repository_is_an_error(tmp_path: Path) -> None:
    """A folder without a repository or a checked out commit is an error."""
    with pytest.raises(WorkspaceError, match="it is not a git repository, so "):
        asyncio.run(end_history(tmp_path, "HEAD", "it"))
    (tmp_path / ".git").mkdir()
    with pytest.raises(WorkspaceError, match="has no commit checked out"):
        asyncio.run(end_history(tmp_path, "HEAD", "it"))
