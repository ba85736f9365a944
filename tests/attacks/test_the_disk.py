"""Disk space that a program takes without a path by which it could be measured."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from support.attacks import Arena, python, shell
from tugline.types import Cause

MAPPED = """
import ctypes, os, time
libc = ctypes.CDLL(None); libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
for _ in range(3):
    file = os.open("f", os.O_CREAT | os.O_RDWR); os.posix_fallocate(file, 0, 20 << 20)
    libc.mmap(None, 4096, 1, 1, file, 0); os.unlink("f"); os.close(file)
time.sleep(20)
"""
RENAMED = """
import os, time
path, folders = ".", []
for _ in range(8):
    folders.append(os.open(path, os.O_RDONLY)); path += "/a"; os.mkdir(path)
files = [os.open(f"{path}/{n}", os.O_CREAT | os.O_WRONLY) for n in range(3)]
if os.fork() == 0:
    while True:
        for old, new in ("ab", "ba"):
            for one in folders: os.rename(old, new, src_dir_fd=one, dst_dir_fd=one)
for file in files: os.posix_fallocate(file, 0, 20 << 20)
time.sleep(20)
"""
THREAD = """
import ctypes, os, threading, time
def hold():
    ctypes.CDLL(None).unshare(0x400)  # files of its own
    for n in range(3):
        os.posix_fallocate(os.open("f", os.O_CREAT | os.O_RDWR), 0, 20 << 20); os.unlink("f")
    time.sleep(20)
threading.Thread(target=hold).start()
"""


@pytest.mark.parametrize("script", [MAPPED, RENAMED, THREAD], ids=["mapped", "renamed", "thread"])
async def test_hide_files_on_the_disk(tmp_path: Path, script: str) -> None:
    """Files that are open, mapped or moved during the measurement count, too."""
    arena = Arena(name="bubblewrap", folder=tmp_path)
    if reason := await asyncio.to_thread(arena.runtime.check_available):
        pytest.skip(reason)
    if script == MAPPED and os.geteuid() != 0:
        pytest.skip("only root may list mapped files")
    async with arena.open(options={"disk_mb": 32}) as sandbox:
        result = await python(sandbox, script)
        assert result.exit.cause is Cause.AGENT_DISK, result
        assert (await shell(sandbox, "echo well")).text == "well\n"
