"""Programs beside the load generator: started, asked by lines of JSON, watched from outside."""

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
    """Seconds of CPU that a process used so far."""
    return time.clock_gettime((~pid << 3) | 2)


class Refused(Exception):
    """A program ended instead of answering."""


class Child:
    """One Python program of this folder, which starts while others do."""

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
        """Its port, which its first line tells; waits until it is up."""
        return int(self._line()["port"])

    def ask(self, line: str) -> Any:
        """Send one line; the program's answer."""
        if self._process.stdin is not None:
            self._process.stdin.write(line.encode() + b"\n")
        return self._line()

    def cpu(self) -> float:
        """Seconds of CPU that all its threads used so far, user and system (the kernel's clock)."""
        return cpu_of(self.pid)

    def rss(self) -> int:
        """Bytes of memory resident."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * _PAGE

    def stop(self) -> None:
        """Close its input, which ends it."""
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
                msg = f"{self._name} ended, or did not answer within {DEADLINE_S:.0f} s"
                raise Refused(msg)
            text += part
        return json.loads(text)
