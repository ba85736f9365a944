"""Files in a folder that an agent controls."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pytest

from support.commands import run_program
from support.sandbox import dig, open_files
from tugline.errors import DiskFull, SandboxError, UsageError
from tugline.patch import FileChange
from tugline.sandbox.files import open_folder, read_file, remove, write_files


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The agent's folder, beside a secret."""
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_text("secret")
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def secret(root: Path) -> str:
    """The content of the secret, whose folder must not change."""
    assert [path.name for path in (root.parent / "secret").iterdir()] == ["key"]
    return (root.parent / "secret" / "key").read_text()


def names(directory: Path) -> list[str]:
    """Names in a folder."""
    return sorted(path.name for path in directory.iterdir())


def test_files_are_written_unchanged(root: Path) -> None:
    """Text, bytes, modes and links are written; new text keeps the mode; None removes."""
    write_files(
        root,
        {"a/b.sh": FileChange(b"#!/bin/sh\r\n", executable=True), "c": b"\0\xff", "d": "d\r\n"},
    )
    write_files(
        root, {"a/b.sh": "new", "e": FileChange(b"a/b.sh", link=True), "d": None, "none/none": None}
    )
    assert (root / "a" / "b.sh").read_text() == "new"
    assert (root / "a" / "b.sh").stat().st_mode & 0o777 == 0o755
    assert (root / "c").read_bytes() == b"\0\xff"
    assert (root / "c").stat().st_mode & 0o777 == 0o644
    assert (root / "e").readlink() == Path("a/b.sh")
    assert names(root) == ["a", "c", "e"]
    assert read_file(root, "a/b.sh") == b"new"


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", "a\0b", "", "."])
def test_paths_that_leave_the_root_are_refused(root: Path, path: str) -> None:
    """The refusal comes before any file is written."""
    with pytest.raises(UsageError, match="must be relative"):
        write_files(root, {"fine": "x", path: "x"})
    assert not (root / "fine").exists()


OBSTACLES: dict[str, Callable[[Path, Path], object]] = {
    "a link to a folder": lambda at, key: at.symlink_to(key.parent),
    "a link upwards": lambda at, _key: at.symlink_to("../secret"),
    "a link to a file": lambda at, key: at.symlink_to(key),
    "a hard link": lambda at, key: at.hardlink_to(key),
    "a pipe": lambda at, _key: os.mkfifo(at),
    "a file": lambda at, _key: at.touch(),
    "a folder": lambda at, _key: (at / "deep").mkdir(parents=True),
}


@pytest.mark.parametrize("kind", OBSTACLES)
def test_obstacles_are_replaced_and_not_followed(root: Path, kind: str) -> None:
    """A link in place of a file, or of a folder above it, is never followed."""
    for name in ("file", "folder", "gone"):
        OBSTACLES[kind](root / name, root.parent / "secret" / "key")
    assert read_file(root, "folder/key") is None
    assert kind in {"a file", "a hard link"} or read_file(root, "file") is None
    write_files(root, {"file": "x", "folder/key": "x", "gone/key": None})
    assert read_file(root, "file") == read_file(root, "folder/key") == b"x"
    assert secret(root) == "secret"
    assert names(root) == ["file", "folder", "gone"]


def test_a_very_deep_folder_is_removed(root: Path) -> None:
    """A path longer than any limit is removed without recursion, with few open files."""
    for folder in dig(root, ["deeper"] * 1500):
        os.symlink("/etc", "out", dir_fd=folder)
    before = open_files()
    write_files(root, {"deeper": "x"})
    assert read_file(root, "deeper") == b"x"
    remove(root.parent, "work")
    remove(root.parent, "work")
    assert not root.exists()
    assert open_files() == before


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to run as another user")
def test_folders_without_permissions_are_removed(root: Path, tmp_path: Path) -> None:
    """An unprivileged node removes such folders if the agent ran as the same user."""
    for folder_above in (tmp_path, *tmp_path.parents):
        if not folder_above.stat().st_mode & 0o001:
            folder_above.chmod(0o711)
    root.chmod(0o777)
    script = (
        "import os, pathlib, sys; from tugline.sandbox.files import remove, write_files;"
        "os.setgroups([]); os.setgid(12345); os.setuid(12345); os.chdir(sys.argv[1]);"
        "here = pathlib.Path(sys.argv[1]);"
        "os.makedirs('a/b/c'); open('a/b/f', 'w').close();"
        "os.chmod('a/b/c', 0); os.chmod('a/b', 0); os.chmod('a', 0o500);"
        "remove(here, 'a'); assert not os.path.exists('a')"
    )
    done = run_program(sys.executable, "-c", script, root)
    assert done.stderr == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to change owners")
def test_new_files_have_the_owner_of_their_folder(root: Path) -> None:
    """A program that runs as another user can change the files."""
    os.chown(root, 1234, 1235)
    write_files(root, {"a/b": "x", "link": FileChange(b"a", link=True)})
    for path in ("a", "a/b", "link"):
        status = (root / path).lstat()
        assert (status.st_uid, status.st_gid) == (1234, 1235), path


def test_an_open_folder_as_root(root: Path) -> None:
    """A folder of another mount namespace can be the root, and stays open."""
    handle = os.open(root, os.O_RDONLY)
    write_files(handle, {"a/b": "x"})
    assert read_file(handle, "a/b") == b"x"
    with open_folder(handle, PurePosixPath("a")) as below:
        assert read_file(below, "b") == b"x"
    with pytest.raises(FileNotFoundError), open_folder(handle, PurePosixPath("a/none")):
        pass
    os.close(handle)


def test_large_files_are_not_read(root: Path) -> None:
    """The size limit is exact."""
    write_files(root, {"a": b"12345"})
    assert read_file(root, "a", 5) == b"12345"
    assert read_file(root, "a", 4) is None


def test_errors_have_different_types(root: Path, tmp_path: Path) -> None:
    """Long names and invalid text are the caller's mistakes, a missing root is not."""
    with pytest.raises(UsageError, match="File name too long"):
        write_files(root, {"x" * 300: "x"})
    with pytest.raises(UsageError, match="UTF-8"):
        write_files(root, {"a": "\ud800"})
    with pytest.raises(SandboxError, match=r"cannot write .*none/a: No such file"):
        write_files(tmp_path / "none", {"a": "x"})


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small disk")
def test_a_full_disk_and_a_read_only_one(root: Path) -> None:
    """The errors are `DiskFull` and `SandboxError`, and no partial file is left."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", root], check=True)
    try:
        with pytest.raises(DiskFull, match="No space left"):
            write_files(root, {"a": b"x" * 200_000})
        assert names(root) == []
        subprocess.run(["mount", "-o", "remount,ro", root], check=True)
        with pytest.raises(SandboxError, match="Read-only file system") as caught:
            write_files(root, {"a": "x"})
        assert not isinstance(caught.value, DiskFull)
    finally:
        subprocess.run(["umount", root], check=True)
