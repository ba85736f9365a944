"""What git tells in a folder out of an image, before and after its later history was forgotten."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

from repositories import Clone, git
from tugline.errors import WorkspaceError
from tugline.sandbox.repos import end_history


def end(clone: Clone, commit: str = "HEAD") -> None:
    """Forget what came later."""
    asyncio.run(end_history(clone.folder, commit, "the clone"))


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    """One that is checked out at its present."""
    return Clone(tmp_path / "clone")


def test_nothing_later_can_be_had(clone: Clone) -> None:
    """Not by branches, remotes, tags, reflogs or hashes; and nothing is left lying about."""
    clone.git("stash", "list")
    assert "future" in clone.git("log", "--all", "--format=%s")
    end(clone, clone.present)
    assert set(clone.git("log", "--all", "--reflog", "--format=%s").split()) == {"present", "past"}
    clone.git("cat-file", "-e", clone.future, code=1)
    assert clone.git("fsck", "--full", "--unreachable", "--no-reflogs") == ""
    assert clone.git("for-each-ref", "--format=%(refname)").split() == [
        "refs/tags/v1",
        "refs/tags/v2",
    ]
    found = subprocess.run(["grep", "-ra", clone.future, clone.folder], check=False)
    assert found.returncode == 1
    assert {path.name for path in clone.folder.iterdir()} == {".git", "file"}


def test_what_is_there_goes_on_working(clone: Clone) -> None:
    """Status, versions by tag, checkout of a file of the base, and a new commit."""
    (clone.folder / "staged").write_text("new")
    clone.git("add", "staged")
    clone.git("pack-refs", "--all")
    end(clone, clone.past)
    assert clone.git("rev-parse", "HEAD") == clone.present
    assert clone.git("status", "--short") == "A  staged"
    assert clone.git("describe") == "v2"
    (clone.folder / "file").write_text("changed")
    clone.git("checkout", clone.present, "--", "file")
    assert (clone.folder / "file").read_text() == "present"
    clone.commit("own")
    assert clone.git("config", "core.checkStat") == "minimal"


def test_a_branch_stays_a_branch(clone: Clone) -> None:
    """HEAD names it as before, wherever its name is kept."""
    clone.git("checkout", "-q", "-b", "fix/it", clone.past)
    clone.git("pack-refs", "--all")
    end(clone)
    assert clone.git("symbolic-ref", "HEAD") == "refs/heads/fix/it"
    assert clone.git("log", "--all", "--format=%s") == "past"


def test_a_shallow_clone_stays_one(clone: Clone, tmp_path: Path) -> None:
    """Its history ends where it did."""
    source = f"file://{clone.folder}"
    git(tmp_path, "clone", "-q", "--depth=1", "-b", "other", source, "s")
    asyncio.run(end_history(tmp_path / "s", "HEAD", "it"))
    assert git(tmp_path / "s", "log", "--format=%s") == "future"


def test_nothing_of_it_is_run_or_followed(clone: Clone, tmp_path: Path) -> None:
    """Neither its configuration, nor its hooks, nor links that lead out of it."""
    ran, beyond = tmp_path / "ran", tmp_path / "beyond"
    beyond.mkdir()
    (beyond / "kept").write_text("mine")
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
    end(clone)
    assert not ran.exists()
    assert (beyond / "kept").read_text() == "mine"


def test_tags_of_objects_that_are_not_there_go(clone: Clone) -> None:
    """As in a clone without some objects; nor does a broken or odd name stop it."""
    for name, text in (("gone", f"{'1' * 40}\n"), ("broken", "x\n"), ("odd..name", clone.past)):
        (clone.folder / ".git" / "refs" / "tags" / name).write_text(text)
    os.mkfifo(clone.folder / ".git" / "refs" / "tags" / "pipe")
    end(clone)
    assert clone.git("tag").split() == ["v1", "v2"]


def test_another_commit_than_the_row_says(clone: Clone) -> None:
    """An image that is not at the commit it should be at is told, and left as it is."""
    with pytest.raises(WorkspaceError, match=f"the clone has no commit '{clone.future}' in the"):
        end(clone, clone.future)
    assert "future" in clone.git("log", "--all", "--format=%s")


def test_no_repository(tmp_path: Path) -> None:
    """A folder without one cannot be asked to end at a commit."""
    with pytest.raises(WorkspaceError, match="it is no git repository, so "):
        asyncio.run(end_history(tmp_path, "HEAD", "it"))
    (tmp_path / ".git").mkdir()
    with pytest.raises(WorkspaceError, match="has nothing checked out"):
        asyncio.run(end_history(tmp_path, "HEAD", "it"))
