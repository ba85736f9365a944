"""Child processes of the load generator: start them, send commands, read their CPU and memory."""

# ruff: noqa: INP001 - programs, not a package
from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from functools import cached_property
from pathlib import Path
from typing import Any

DEADLINE_S = 60.0
_PAGE = os.sysconf("SC_PAGE_SIZE")


def cpu_of(pid: int) -> float:
    """User and system CPU seconds of a process so far."""
    return time.clock_gettime((~pid << 3) | 2)


class ChildFailed(Exception):
    """A program exited or timed out instead of answering."""


class Child:
    """A Python program of this folder; the constructor does not wait until it is up."""

    def __init__(self, file: Path, *arguments: str) -> None:
        self._name = file.name
        self._process = subprocess.Popen(
            [sys.executable, str(file), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self.pid = self._process.pid

    @cached_property
    def port(self) -> int:
        """Its port, from the first line that it prints; waits until it is up."""
        return int(self._line()["port"])

    def ask(self, line: str) -> Any:
        """Send one line and return the answer."""
        if self._process.stdin is not None:
            self._process.stdin.write(line.encode() + b"\n")
        return self._line()

    def cpu(self) -> float:
        """User and system CPU seconds of all its threads so far, by the kernel's clock."""
        return cpu_of(self.pid)

    def rss(self) -> int:
        """Resident memory in bytes."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * _PAGE

    def stop(self) -> None:
        """Close its input, on which it exits; kill it if it does not."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _line(self) -> Any:
        out = self._process.stdout
        text = b""
        while out is not None and not text.endswith(b"\n"):
            ready, _, _ = select.select([out], [], [], DEADLINE_S)
            part = out.read(1 << 16) if ready else None
            if not part:
                self._process.kill()
                msg = f"{self._name} exited, or did not answer within {DEADLINE_S:.0f} s"
                raise ChildFailed(msg)
            text += part
        return json.loads(text)
