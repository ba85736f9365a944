from __future__ import annotations

import os
from pathlib import Path

import pytest

from tugline.runtimes.patch import Caps, Patch, applied, compare, unified

BEFORE = {"a.py": "x = 1\n", "pkg/b.py": "y = 2\n", "pkg/c.py": "z = 3\n"}


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    """The task's files, in a folder beside something secret."""
    (tmp_path / "secret.txt").write_text("secret")
    root = tmp_path / "work"
    for path, text in BEFORE.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def test_nothing_done_is_an_empty_patch(workdir: Path) -> None:
    """Caches that programs leave behind are nobody's work."""
    (workdir / "__pycache__").mkdir()
    (workdir / "__pycache__" / "a.pyc").write_bytes(b"\0")
    assert compare(BEFORE, workdir) == Patch({})


def test_changes_additions_and_deletions_are_found(workdir: Path) -> None:
    """All three come back as text, and the diff reads like everyone's."""
    (workdir / "a.py").write_bytes(b"x = 2\r\n")
    (workdir / "new" / "deep").mkdir(parents=True)
    (workdir / "new" / "deep" / "d.py").write_text("w = 4")
    (workdir / "pkg" / "b.py").unlink()
    patch = compare(BEFORE, workdir)
    assert patch == Patch({"a.py": "x = 2\r\n", "new/deep/d.py": "w = 4", "pkg/b.py": None})
    diff = unified(BEFORE, patch)
    assert "--- a/a.py\n+++ b/a.py\n" in diff
    assert "--- /dev/null\n+++ b/new/deep/d.py\n" in diff
    assert "+w = 4\n\\ No newline at end of file\n" in diff
    assert "--- a/pkg/b.py\n+++ /dev/null\n" in diff
    files, gave_way = applied(BEFORE, patch, {})
    assert (files, gave_way) == (
        {"a.py": "x = 2\r\n", "new/deep/d.py": "w = 4", "pkg/c.py": "z = 3\n"},
        (),
    )


def test_links_pipes_and_binaries_are_noted_not_read(workdir: Path) -> None:
    """Nothing outside is read, nothing blocks, and each omission is said."""
    (workdir / "out").symlink_to("../secret.txt")
    (workdir / "outdir").symlink_to("..")
    (workdir / "a.py").unlink()
    (workdir / "a.py").symlink_to("../secret.txt")
    os.mkfifo(workdir / "pipe")
    (workdir / "blob").write_bytes(b"\xff\xfe\0")
    (workdir / "pkg" / "b.py").write_text("y" * 5000)
    patch = compare(BEFORE, workdir, Caps(file_bytes=1000))
    assert patch.files == {"a.py": None}
    assert "secret" not in unified(BEFORE, patch).replace("secret.txt", "")
    for path in ("out:", "outdir:", "a.py:", "pipe:", "blob:", "pkg/b.py:"):
        assert any(note.startswith(path) for note in patch.notes), path


def test_a_flood_of_files_is_not_taken_along(workdir: Path) -> None:
    """A million files cost the agent its patch, not us our disk; deletions are not made up."""
    for number in range(30):
        (workdir / f"f{number}").write_text("x")
    patch = compare(BEFORE, workdir, Caps(files=20))
    assert patch.files == {}
    assert "no change is taken along" in patch.notes[0]


def test_strange_names_are_noted(workdir: Path) -> None:
    """A name that is no text cannot break JSON or a terminal."""
    (workdir / "a\nb").write_text("x")
    Path(os.fsdecode(os.fsencode(workdir) + b"/\xff")).write_text("x")
    patch = compare(BEFORE, workdir)
    assert patch.files == {}
    assert len(patch.notes) == 2
    assert all(note.isprintable() for note in patch.notes)


def test_a_trusted_file_stands_whatever_is_in_its_place() -> None:
    """A folder where the test file was, or a file where its folder was, gives way."""
    before = {"tests/test_a.py": "T", "pkg/m.py": "M"}
    patch = Patch({"tests/test_a.py": None, "tests/test_a.py/x": "X", "pkg": "P", "pkg/m.py": None})
    files, gave_way = applied(before, patch, {"tests/test_a.py": "T", "pkg/test_b.py": "B"})
    assert files == {"tests/test_a.py": "T", "pkg/test_b.py": "B"}
    assert gave_way == ("tests/test_a.py/x", "pkg")


def test_a_long_file_is_not_compared_line_by_line() -> None:
    """Line comparison is quadratic on hostile input, so long files are only counted."""
    patch = Patch({"a.py": "x\n" * 5000})
    assert unified(BEFORE, patch) == "a.py: 1 lines became 5000; too long to show\n"
