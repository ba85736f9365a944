from __future__ import annotations

import os
from pathlib import Path

import pytest

from tugline.sandbox.files import write_files
from tugline.sandbox.overlay import OverlayWorkspace
from tugline.sandbox.patch import ChangeCollector, FileChange, Patch, PatchLimits

BEFORE = {"a.py": "x = 1\n", "pkg/b.py": "y = 2\n", "pkg/c.py": "z = 3\n"}


def diff_folder(before: dict[str, str], workdir: Path, limits: PatchLimits | None = None) -> Patch:
    """The changes of a workspace without a base."""
    workspace = OverlayWorkspace(workdir.parent, None, before)
    workspace.work = workspace.own = workdir
    return workspace.diff(limits)


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
    assert diff_folder(BEFORE, workdir) == Patch({})


def test_changes_additions_and_deletions_are_found(workdir: Path) -> None:
    """All three, and a file that can be run now, byte for byte."""
    (workdir / "a.py").write_bytes(b"x = 2\r\n")
    (workdir / "new" / "deep").mkdir(parents=True)
    (workdir / "new" / "deep" / "d.bin").write_bytes(b"\0\xff")
    (workdir / "pkg" / "b.py").unlink()
    (workdir / "pkg" / "c.py").chmod(0o755)
    assert diff_folder(BEFORE, workdir) == Patch(
        {
            "a.py": FileChange(b"x = 2\r\n"),
            "new/deep/d.bin": FileChange(b"\0\xff"),
            "pkg/b.py": None,
            "pkg/c.py": FileChange(b"z = 3\n", executable=True),
        }
    )


def test_links_are_taken_as_links_and_pipes_noted(workdir: Path) -> None:
    """Nothing outside is read, nothing blocks, and each omission is said."""
    (workdir / "out").symlink_to("../secret.txt")
    (workdir / "outdir").symlink_to("..")
    (workdir / "a.py").unlink()
    (workdir / "a.py").symlink_to("../secret.txt")
    os.mkfifo(workdir / "pipe")
    (workdir / "pkg" / "b.py").write_text("y" * 5000)
    patch = diff_folder(BEFORE, workdir, PatchLimits(file_bytes=1000))
    assert patch.files == {
        "a.py": FileChange(b"../secret.txt", link=True),
        "out": FileChange(b"../secret.txt", link=True),
        "outdir": FileChange(b"..", link=True),
    }
    assert [note.partition(":")[0] for note in patch.notes] == ["pipe", "pkg/b.py"]


def test_what_is_past_the_bound_in_all_is_left_out_with_a_note(workdir: Path) -> None:
    """What still fits is taken along."""
    for number in range(4):
        (workdir / f"f{number}").write_text("x" * 10)
    patch = diff_folder(BEFORE, workdir, PatchLimits(total_bytes=25))
    assert list(patch.files) == ["f0", "f1"]
    assert patch.notes == tuple(
        f"f{number}: past 25 bytes in all, change left out" for number in (2, 3)
    )


def test_programs_that_were_installed_are_noted_not_taken_along(workdir: Path) -> None:
    """A folder of them would be too many files, and the whole patch lost."""
    for number in range(30):
        path = workdir / "node_modules" / f"p{number}"
        path.mkdir(parents=True)
        (path / "index.js").touch()
    patch = diff_folder(BEFORE, workdir, PatchLimits(seen_files=20))
    assert patch == Patch({}, ("node_modules: a folder of installed programs, left out",))


def test_a_flood_of_files_is_not_taken_along(workdir: Path) -> None:
    """A million files cost the agent its patch, not us our disk; deletions are not made up."""
    for number in range(30):
        (workdir / f"f{number}").write_text("x")
    patch = diff_folder(BEFORE, workdir, PatchLimits(files=20))
    assert patch.files == {}
    assert "no change is taken along" in patch.notes[0]


def test_strange_names_are_noted(workdir: Path) -> None:
    """A name that is no text cannot break JSON or a terminal."""
    (workdir / "a\nb").write_text("x")
    Path(os.fsdecode(os.fsencode(workdir) + b"/\xff")).write_text("x")
    patch = diff_folder(BEFORE, workdir)
    assert patch.files == {}
    assert len(patch.notes) == 2
    assert all(note.isprintable() for note in patch.notes)


def test_a_name_that_no_box_can_be_given_is_noted(tmp_path: Path) -> None:
    """A backslash, too; and that something of such a name is gone."""
    (tmp_path / "x\\y").write_text("x")
    (tmp_path / "good").write_text("x")
    patch = diff_folder({}, tmp_path)
    assert patch == Patch({"good": FileChange(b"x")}, ("x\\y: a name with a backslash",))
    write_files(tmp_path, patch.files)
    collector = ChangeCollector(PatchLimits(), lambda _path: None)
    for path in ("a\tb", "a\\b", "ab"):
        collector.add_removed(path)
    patch = collector.build_patch()
    assert patch.files == {"ab": None}
    assert [note.split(": ")[1] for note in patch.notes] == [
        "a name with control or undecodable characters, its removal left out",
        "a name with a backslash, its removal left out",
    ]


def test_a_patch_can_be_applied_in_order(tmp_path: Path) -> None:
    """What is gone comes first, so that it takes nothing away that came in its place."""
    now, then = tmp_path / "now", tmp_path / "then"
    (now / "a").mkdir(parents=True)
    (now / "a" / "b").write_text("new")
    then.mkdir()
    write_files(then, {"a": "x"})
    write_files(then, diff_folder({"a": "x"}, now).files)
    assert (then / "a" / "b").read_text() == "new"
