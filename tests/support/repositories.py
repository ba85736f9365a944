"""Git repositories for tests."""

from __future__ import annotations

import os
from pathlib import Path

from support.commands import run_program

_WHO = ("-c", "user.name=a", "-c", "user.email=a@example.org")
_CONFIG = {"GIT_CONFIG_GLOBAL": os.devnull}


def git(folder: Path, *arguments: str, code: int = 0) -> str:
    """Run git in a folder; its output."""
    done = run_program("git", *_WHO, *arguments, cwd=folder, env={**os.environ, **_CONFIG})
    assert done.returncode == code, done.stderr
    return done.stdout.strip()


class Clone:
    """A repository with commits before and after the one that is checked out."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.git("init", "-q", "-b", "main")
        self.past = self.commit("past")
        self.git("tag", "v1")
        self.present = self.commit("present")
        self.git("tag", "-a", "v2", "-m", "two")
        self.future = self.commit("future")
        self.git("tag", "v3")
        self.git("tag", "-a", "v3a", "-m", "three")
        self.git("branch", "other")
        self.git("update-ref", "refs/remotes/origin/main", self.future)
        self.git("checkout", "-q", self.present)

    def git(self, *arguments: str, code: int = 0) -> str:
        """Run git; its output."""
        return git(self.folder, *arguments, code=code)

    def commit(self, text: str) -> str:
        """A commit of one file, which can be run."""
        (self.folder / "file").write_text(text)
        (self.folder / "file").chmod(0o755)
        self.git("add", "-A")
        self.git("commit", "-q", "-m", text)
        return self.git("rev-parse", "HEAD")
