"""Files that lead elsewhere: links, pipes, devices and swaps, planted for who reads and writes."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from attacked import Arena, python, shell
from tugline.errors import SandboxError, UsageError

DEADLINE = 15.0


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder of the node that no box has anything to do with."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "secret").write_text("the node's own")
    return folder


def untouched(outside: Path) -> None:
    """Nothing was written there."""
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
    anywhere: Arena, outside: Path, content: str | None
) -> None:
    """What is put or removed is the box's own, whatever stands at its path or above it.

    Also if the path itself leads out.
    """
    async with anywhere.box() as sandbox:
        await python(sandbox, PLANT, outside, sandbox.workdir, sandbox.home)
        for root in (sandbox.workdir, sandbox.home):
            files = [f"{link}/{name}" for link in LINKS for name in ("secret", "new")]
            above = "../" * 30 + f"{outside}/new"
            for path in (*files, "file", "dangling", "loop", "folder", above, f"{outside}/new"):
                with contextlib.suppress(SandboxError, UsageError):
                    async with asyncio.timeout(DEADLINE):
                        await sandbox.put(root, {path: content})
                    assert await sandbox.get(root / path) == (content and content.encode())
        untouched(outside)


async def test_read_through_planted_links(anywhere: Arena, outside: Path) -> None:
    """What is read is the box's own: neither by name nor as part of the agent's work."""
    async with anywhere.box() as sandbox:
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


async def test_swap_a_folder_for_a_link_meanwhile(anywhere: Arena, outside: Path) -> None:
    """A race for the moment between a look and a write is not won, in hundreds of tries."""
    async with anywhere.box() as sandbox:
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
            untouched(outside)
            assert tries > 20
        finally:
            swapping.cancel()
            await asyncio.gather(swapping, return_exceptions=True)
        untouched(outside)


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


async def test_set_traps_for_who_looks(anywhere: Arena) -> None:
    """Pipes, devices, names that are no text, a terabyte of nothing, folders without end."""
    async with anywhere.box() as sandbox:
        got = await python(sandbox, TRAPS, sandbox.workdir)
        assert got.exit.code == 0, got.text
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


async def test_link_what_is_shared_into_the_work(sandbox: Arena) -> None:
    """A hard link to a file of the task's own base does not let a write through to it."""
    async with sandbox.box(files={"given.txt": "given"}) as box:
        await shell(box, "ln given.txt linked; ln -s given.txt soft; echo more >> linked")
        await box.put(box.workdir, {"linked": "put"})
        patch = await box.diff()
    changed = {path: change.data for path, change in patch.files.items() if change}
    assert changed["linked"] == b"put"
    assert changed["given.txt"] == b"givenmore\n"


async def test_leave_traps_for_who_cleans_up(sandbox: Arena, outside: Path) -> None:
    """Nor does tidying a box follow a link, or stop at what cannot be removed by its owner."""
    code = "import os, sys; os.symlink(sys.argv[1], 'out'); os.makedirs('a/b'); os.chmod('a', 0)"
    async with sandbox.box() as box:
        await python(box, code, outside)
        await python(box, code.replace("'out'", "'/tmp/out'"), outside)
    assert await asyncio.to_thread(sandbox.runtime.reap, sandbox.folder) >= 0
    untouched(outside)
