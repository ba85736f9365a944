"""Links, pipes, devices and races in a workspace, for the node that reads and writes there."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from support.attacks import Arena, python, shell
from tugline.errors import SandboxError, UsageError

DEADLINE = 15.0


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder of the node that belongs to no sandbox."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "secret").write_text("the node's own")
    return folder


def assert_untouched(outside: Path) -> None:
    """Check that the node's folder has only its own file, unchanged."""
    assert [entry.name for entry in outside.iterdir()] == ["secret"]
    assert (outside / "secret").read_text() == "the node's own"


PLANT = """
import os, sys
outside = sys.argv[1]
for top in sys.argv[2:]:
    os.chdir(top)
    os.symlink(outside, "folder")
    os.symlink(outside + "/secret", "file")
    os.symlink(outside + "/new", "dangling")
    os.symlink("../" * 30 + outside[1:], "relative")
    os.symlink("folder", "chain")
    os.symlink("loop", "loop")
    os.symlink("/proc/self/root" + outside, "magic")
"""
LINKS = ("folder", "relative", "chain", "magic")


@pytest.mark.parametrize("content", ["put", None], ids=["write", "remove"])
async def test_put_through_planted_links(
    any_arena: Arena, outside: Path, content: str | None
) -> None:
    """Writing and removing stays inside the sandbox, whatever links its paths go through.

    The same holds for a path that itself leads out.
    """
    async with any_arena.open() as sandbox:
        await python(sandbox, PLANT, outside, sandbox.workdir, sandbox.home)
        for root in (sandbox.workdir, sandbox.home):
            files = [f"{link}/{name}" for link in LINKS for name in ("secret", "new")]
            above = "../" * 30 + f"{outside}/new"
            for path in (*files, "file", "dangling", "loop", "folder", above, f"{outside}/new"):
                with contextlib.suppress(SandboxError, UsageError):
                    async with asyncio.timeout(DEADLINE):
                        await sandbox.put(root, {path: content})
                    assert await sandbox.get(root / path) == (content and content.encode())
        assert_untouched(outside)


async def test_read_through_planted_links(any_arena: Arena, outside: Path) -> None:
    """Neither `get` nor `diff` follows links out of the sandbox."""
    async with any_arena.open() as sandbox:
        await python(sandbox, PLANT, outside, sandbox.workdir, sandbox.home)
        for root in (sandbox.workdir, sandbox.home):
            for path in (*(f"{link}/secret" for link in LINKS), "file", "loop", "../x"):
                with contextlib.suppress(UsageError, SandboxError):
                    assert await sandbox.get(root / path) is None
        patch = await sandbox.diff()
    assert b"the node's own" not in b"".join(
        change.data for change in patch.files.values() if change
    )


SWAP = """
import os, sys
os.chdir(sys.argv[2])
os.makedirs("real", exist_ok=True)
os.symlink(sys.argv[1], "link")
os.rename("real", "at")
while True:
    os.rename("at", "real"); os.rename("link", "at")
    os.rename("at", "link"); os.rename("real", "at")
"""


async def test_swap_a_folder_for_a_link_during_a_write(any_arena: Arena, outside: Path) -> None:
    """A race between the check of a path and the write to it is never won."""
    async with any_arena.open() as sandbox:
        swapping = asyncio.create_task(
            python(sandbox, SWAP, outside, sandbox.workdir, timeout_s=60)
        )
        try:
            end = asyncio.get_running_loop().time() + 1.0
            tries = 0
            while asyncio.get_running_loop().time() < end:
                tries += 1
                with contextlib.suppress(SandboxError, UsageError):
                    await sandbox.put(sandbox.workdir, {"at/new": "put", "at/secret": "put"})
                found = await sandbox.get(sandbox.workdir / "at" / "secret")
                assert found in {None, b"put"}
            assert_untouched(outside)
            assert tries > 20
        finally:
            swapping.cancel()
            await asyncio.gather(swapping, return_exceptions=True)
        assert_untouched(outside)


TRAPS = r"""
import os, socket, sys
os.chdir(sys.argv[1])
os.mkfifo("pipe"); os.mkfifo("report.xml")
socket.socket(1).bind("socket")
os.symlink("/dev/zero", "zero"); os.symlink("/proc/self/fd/0", "in")
os.symlink("/proc/kmsg", "kmsg")
open(b"bad \xff name", "w").close(); open("line\nbreak", "w").close(); open("-rf", "w").close()
open("\x1b[31m", "w").close()
with open("sparse", "wb") as file: file.truncate(300 << 20)
deep = "d" * 200
for _ in range(60):
    os.mkdir(deep); os.chdir(deep)
os.chdir(sys.argv[1]); os.mkdir("locked"); open("locked/x", "w").close(); os.chmod("locked", 0)
open("unreadable", "w").close(); os.chmod("unreadable", 0)
open("honest", "w").write("work")
"""


async def test_plant_special_files_for_the_reader(any_arena: Arena) -> None:
    """Pipes, devices, undecodable names, sparse files and very deep folders do not hang `diff`."""
    async with any_arena.open() as sandbox:
        result = await python(sandbox, TRAPS, sandbox.workdir)
        assert result.exit.code == 0, result.text
        async with asyncio.timeout(DEADLINE):
            patch = await sandbox.diff()
            for name in ("pipe", "socket", "zero", "in", "kmsg", "sparse", "report.xml"):
                assert await sandbox.get(sandbox.workdir / name) is None
            await sandbox.put(
                sandbox.workdir, {"pipe": "put", "report.xml": "put", "sparse": "put"}
            )
            assert await sandbox.get(sandbox.workdir / "report.xml") == b"put"
    honest = patch.files["honest"]
    assert honest is not None
    assert honest.data == b"work"
    assert len(patch.notes) >= 4
    assert all(note.isprintable() for note in patch.notes)
    assert not {"pipe", "socket", "sparse"} & patch.files.keys()


async def test_hard_link_a_given_file(arena: Arena) -> None:
    """Writing to a hard link of a given file does not change that file."""
    async with arena.open(files={"given.txt": "given"}) as sandbox:
        await shell(sandbox, "ln given.txt linked; ln -s given.txt soft; echo more >> linked")
        await sandbox.put(sandbox.workdir, {"linked": "put"})
        patch = await sandbox.diff()
    changed = {path: change.data for path, change in patch.files.items() if change}
    assert changed["linked"] == b"put"
    assert changed["given.txt"] == b"givenmore\n"


async def test_plant_links_for_the_cleanup(arena: Arena, outside: Path) -> None:
    """Removing a sandbox follows no link and does not stop at folders without permissions."""
    code = "import os, sys; os.symlink(sys.argv[1], 'out'); os.makedirs('a/b'); os.chmod('a', 0)"
    async with arena.open() as sandbox:
        await python(sandbox, code, outside)
        await python(sandbox, code.replace("'out'", "'/tmp/out'"), outside)
    assert await asyncio.to_thread(arena.runtime.reap, arena.folder) >= 0
    assert_untouched(outside)
