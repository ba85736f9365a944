"""A patch carries any tree of names to a fresh copy: through `diff`, JSON and `put`."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.sandbox import Driver, read_log, run_shell
from tugline.patch import FileChange, Patch, format_patch
from tugline.sandbox import overlay
from tugline.sandbox.base import Sandbox
from tugline.sandbox.files import write_files
from tugline.sandbox.overlay import OverlayWorkspace

ODD = [
    "a",
    "a\nb",
    "tab\there",
    "back\\slash",
    " blank ",
    "-rf",
    "*",
    "é",
    "\x1b[31m",
    "\x7f",
    "'\"",
]
ODD += ["\u200b", "\u2028", "a:b", "%s", "$(x)", "..a", "C:", "\r", "\x01"]
names = st.one_of(
    st.sampled_from(ODD), st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=3)
)
parts = names.filter(lambda name: name not in {".", ".."} and not {"/", "\0"} & {*name})
paths = st.lists(parts, min_size=1, max_size=3).map("/".join)
Tree = dict[str, str]
FOLDER = "(a folder)"
trees = st.dictionaries(paths, st.sampled_from(["", "x", "y\n", FOLDER]), max_size=6)


def write_tree(folder: Path, tree: Tree) -> None:
    """Write the files and folders of a tree; of those that exclude each other the first."""
    for path, text in tree.items():
        target = folder / path
        if target.exists() or any(up.is_file() for up in target.parents):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        target.mkdir() if text == FOLDER else target.write_text(text)


def read_tree(folder: Path) -> Tree:
    """All files and folders below a folder, with the contents of files."""
    return {
        str(path.relative_to(folder)): FOLDER if path.is_dir() else path.read_text()
        for path in sorted(folder.rglob("*"))
    }


def carry(patch: Patch, folder: Path) -> None:
    """Apply a patch to a fresh copy, by way of its JSON."""
    decoded = msgspec.json.decode(msgspec.json.encode(patch), type=Patch)
    write_files(folder, decoded.files)


@pytest.mark.parametrize("mounts", [True, False], ids=["overlay", "copy"])
@given(before=trees, after=trees)
def test_a_patch_makes_the_same_tree(mounts: bool, before: Tree, after: Tree) -> None:  # noqa: FBT001
    """A patch turns the tree before into that after, for any names that UTF-8 can hold."""
    with tempfile.TemporaryDirectory() as scratch, pytest.MonkeyPatch.context() as patched:
        if not mounts:
            patched.setattr(overlay, "mount_overlay", lambda *_: "refused")
        base = Path(scratch) / "base"
        base.mkdir()
        write_tree(base, before)
        layer = OverlayWorkspace(Path(scratch) / "layer", base, {})
        layer.make()
        layer.mount()
        try:
            for entry in list(layer.work.iterdir()):
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            write_tree(layer.work, after)
            patch, wanted = layer.diff(), read_tree(layer.work)
        finally:
            layer.unmount()
        assert not patch.notes
        carry(patch, base)
        assert read_tree(base) == wanted


async def test_every_runtime_carries_odd_names(sandbox: Sandbox, tmp_path: Path) -> None:
    """Files with odd names that a program made can be written again by `put`."""
    made = "printf 1 >\"$(printf 'a\\nb')\"; printf 2 >\"$(printf 'c\\td')\"; printf 3 >'e\\f'"
    assert (await run_shell(sandbox, made)).code == 0
    patch = await sandbox.diff()
    wanted = {"a\nb": FileChange(b"1"), "c\td": FileChange(b"2"), "e\\f": FileChange(b"3")}
    assert {path: patch.files[path] for path in wanted} == wanted
    carry(patch, tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in wanted} == {
        name: change.data for name, change in wanted.items()
    }
    again = {f"new/{path}": change for path, change in wanted.items()}
    await sandbox.put(sandbox.workdir, again)
    assert (await run_shell(sandbox, "cd new && cmp a*b ../a*b && cmp 'e\\f' ../'e\\f'")).code == 0
    assert await sandbox.get(sandbox.workdir / "new" / "a\nb") == b"1"


async def test_every_runtime_carries_folders(driver: Driver, tmp_path: Path) -> None:
    """Empty folders that are new, and removed folders with and without files, are carried."""
    base = tmp_path / "base"
    write_tree(base, {"empty": FOLDER, "full/x": "x", "stays": FOLDER, "left/y": "y"})
    async with driver.runtime.open(tmp_path / "s", driver.spec(base)) as sandbox:
        script = "rmdir empty; rm -r full; rm left/y; mkdir -p new/deep; echo z > new/z"
        assert (await run_shell(sandbox, script)).code == 0
        patch = await sandbox.diff()
    folder = FileChange(b"", folder=True)
    gone = {"empty": None, "full": None, "full/x": None, "left/y": None}
    assert patch.files == {**gone, "new/deep": folder, "new/z": FileChange(b"z\n")}
    async with driver.runtime.open(tmp_path / "t", driver.spec(base)) as sandbox:
        await sandbox.put(sandbox.workdir, patch.files)
        assert (await run_shell(sandbox, "find . | sort | tr '\\n' ' '")).code == 0
        assert read_log(sandbox) == ". ./left ./new ./new/deep ./new/z ./stays "


def test_names_in_a_diff_are_one_line() -> None:
    """A name cannot add lines to what a judge or a reader sees."""
    odd = "a\n+++ b/bill.py\n\x1b[2J"
    text = format_patch({}, Patch({odd: FileChange(b"x\n"), f"{odd}2": FileChange(b"\xff")}))
    assert "\x1b" not in text
    assert "+++ b/bill.py\n" not in text
    assert len(text.splitlines()) == 5
