"""A bash on a pseudo-terminal, and a record of its output, for `newcomer.py`."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import queue
import re
import signal
import struct
import termios
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

COLUMNS, ROWS = 100, 24
DONE = re.compile(rb"\x1b\]133;D;(\d+)\x07")
"""Escape sequence before each prompt, with the exit status of the previous command."""
SHELL = {
    "TERM": "xterm-256color", "PS1": r"\w $ ", "HISTFILE": "",
    "PROMPT_COMMAND": r"printf '\033]133;D;%s\007' $?",
}  # fmt: skip
TOKEN = re.compile(r"(#token=)[\w.-]+")


@dataclass
class Command:
    """A command line and its output up to the next prompt."""

    line: str
    prompt: str
    seconds: float = 0.0
    """Time until the next prompt; for a server, until it is up."""
    code: int | None = None
    """Exit status; None while it runs."""
    events: list[tuple[float, str]] = field(default_factory=list)
    """Pieces of output, each with its seconds since the command was typed."""

    def describe(self) -> str:
        """Describe its end, for an error message."""
        printed = "".join(text for _, text in self.events)
        return f"$ {self.line}: exit status {self.code}\n{printed}"


@dataclass
class Step:
    """A step: successive commands with one caption."""

    name: str
    title: str
    load: float
    """Load average of the last minute at the end of the step."""
    commands: list[Command]
    pictures: list[tuple[str, str]] = field(default_factory=list)
    """Picture files of the console, each with its caption."""

    @property
    def seconds(self) -> float:
        """Total time of the commands."""
        return sum(command.seconds for command in self.commands)

    def write(self, path: Path) -> None:
        """Write the record to a file."""
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Step:
        """Read a record written by `write`."""
        values = json.loads(path.read_text(encoding="utf-8"))
        values["commands"] = [Command(**each) for each in values["commands"]]
        return cls(**values)


class Terminal:
    """A shell to type commands into; as a context manager, it is killed at the end."""

    def __init__(self, environment: dict[str, str], folder: Path) -> None:
        self.pid, self.file = pty.fork()
        if not self.pid:
            os.chdir(folder)
            argv = ["bash", "--norc", "--noprofile", "-i"]
            os.execvpe(argv[0], argv, environment | SHELL)  # noqa: S606 - it is the shell itself
        size = struct.pack("HHHH", ROWS, COLUMNS, 0, 0)
        fcntl.ioctl(self.file, termios.TIOCSWINSZ, size)
        self.pieces: queue.Queue[tuple[float, bytes]] = queue.Queue()
        """Output, read immediately, because a program blocks when the terminal's buffer is full."""
        self.reader = threading.Thread(target=self._fill, daemon=True)
        self.reader.start()
        self.late = b""
        """Output that has been read but belongs to no command yet."""
        self.prompt = ""
        self._read_until_prompt(20)
        self.run("bind 'set enable-bracketed-paste off'")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.kill(self.pid, signal.SIGKILL)  # a hang-up may be lost while the shell draws its prompt
        os.waitpid(self.pid, 0)
        self.reader.join(5)
        os.close(self.file)

    def run(self, line: str, seconds: float = 900) -> Command:
        """Type a command that must succeed, and wait for the next prompt."""
        command = self.start(line)
        self.finish(command, seconds)
        if command.code:
            raise RuntimeError(command.describe())
        return command

    def start(self, line: str) -> Command:
        """Type a command."""
        command = Command(line, self.prompt)
        self.began = time.monotonic()
        os.write(self.file, line.encode() + b"\n")
        return command

    def follow(self, command: Command, pattern: str, seconds: float) -> re.Match[str]:
        """Record the output of a command until it matches a pattern."""
        pieces = self._read(command, seconds)
        while not (match := re.search(pattern, "".join(text for _, text in command.events))):
            if next(pieces, self) is self:
                raise RuntimeError(command.describe())
        command.seconds = command.events[-1][0]
        return match

    def interrupt(self, command: Command) -> None:
        """Press Ctrl-C and record the remaining output; keep the command's time."""
        seconds = command.seconds
        os.write(self.file, b"\x03")
        self.finish(command, 60)
        command.seconds = seconds

    def finish(self, command: Command, seconds: float) -> None:
        """Record the output of a command until it has ended."""
        for _ in self._read(command, seconds):
            if command.code is not None:
                break
        self._read_until_prompt(20)

    def _read(self, command: Command, seconds: float) -> Iterator[None]:
        """Append output to a command's record, piece by piece."""
        for moment, piece in self._whole_pieces(seconds):
            ended = DONE.search(piece)
            output = piece[: ended.start()] if ended else piece
            if output:
                text = output.decode("utf-8", errors="replace")
                command.events.append((round(moment - self.began, 3), text))
            if ended:
                command.code = int(ended[1])
                command.seconds = round(moment - self.began, 3)
                self.late = piece[ended.end() :]
            yield
            if ended:
                return

    def _read_until_prompt(self, seconds: float) -> None:
        """Read the prompt, which follows the escape sequence."""
        text = self.late
        for _, piece in self._whole_pieces(seconds) if not text.endswith(b"$ ") else ():
            text += piece
            if text.endswith(b"$ "):
                break
        self.late, self.prompt = b"", DONE.sub(b"", text).decode()

    def _whole_pieces(self, seconds: float) -> Iterator[tuple[float, bytes]]:
        """Yield output and its time, in pieces that split no character and no escape sequence."""
        until, rest = time.monotonic() + seconds, b""
        while (left := until - time.monotonic()) > 0:
            try:
                moment, piece = self.pieces.get(timeout=left)
            except queue.Empty:
                break
            rest += piece
            if b"\x1b]133" in rest and not DONE.search(rest):
                continue
            try:
                rest.decode()
            except UnicodeDecodeError:
                continue
            yield moment, rest
            rest = b""
        raise TimeoutError(f"no end after {seconds} s")

    def _fill(self) -> None:
        """Read output until the shell exits."""
        with contextlib.suppress(OSError):
            while piece := os.read(self.file, 65536):
                self.pieces.put((time.monotonic(), piece))


def hide_token(text: str) -> str:
    """Replace the token in the console's address, as in the documentation."""
    return TOKEN.sub(r"\1...", text)
