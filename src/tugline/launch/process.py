"""Folder lock, signal handling and discovery files of a process.

``server.json`` has the server's URL, ``tokens.json`` (0600) its tokens. Tokens are created once and
kept, so that clients and nodes go on over every restart (I6).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
from filelock import FileLock, Timeout

from tugline.errors import UsageError
from tugline.server.http.auth import Tokens
from tugline.signing import key_of, new_secret

SERVER = "server.json"
TOKENS = "tokens.json"
CALLBACK_KEY = "callback.key"
_TOKEN_BYTES = 32
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
T = TypeVar("T")


class Address(msgspec.Struct, frozen=True):
    """Content of ``server.json``."""

    url: str


@contextlib.contextmanager
def folder_lock(folder: Path, *, instead: str) -> Iterator[None]:
    """Create `folder` and keep other processes out; its `UsageError` ends with `instead`."""
    lock = FileLock(folder / ".lock", mode=0o600, preserve_lock_file=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
    except Timeout as error:
        msg = f"another process is running in {folder}; wait for it or {instead}"
        raise UsageError(msg) from error
    except OSError as error:
        msg = f"cannot write in {folder}: {error.strerror}; {instead}"
        raise UsageError(msg) from error
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def handle_signals(stop: Callable[[], object]) -> Iterator[None]:
    """Call `stop` at the first SIGTERM or Ctrl-C; cancel the current task at the second."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    stopping = False

    def on_signal() -> None:
        nonlocal stopping
        if stopping and task is not None:
            task.cancel()
        elif not stopping:
            stopping = True
            stop()

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


def write_address(folder: Path, url: str) -> None:
    """Write the server's URL for clients on this machine."""
    _write(folder / SERVER, msgspec.json.encode(Address(url)), 0o644)


def load_tokens(folder: Path) -> Tokens:
    """The server's tokens, created if missing. Raises `UsageError` for a damaged file."""
    path = folder / TOKENS
    if not path.exists():
        tokens = Tokens(*(secrets.token_urlsafe(_TOKEN_BYTES) for _ in Tokens.__struct_fields__))
        _write(path, msgspec.json.format(msgspec.json.encode(tokens)), 0o600)
    return _read(path, Tokens)


def load_callback_key(folder: Path) -> bytes:
    """The key that signs callbacks; its file has the secret in the form that receivers want."""
    path = folder / CALLBACK_KEY
    if not path.exists():
        _write(path, new_secret().encode() + b"\n", 0o600)
    return key_of(path.read_text(encoding="utf-8").strip())


def _write(path: Path, data: bytes, mode: int) -> None:
    """Write a file atomically; it has `mode` from its creation on."""
    draft = path.with_suffix(".part")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _read(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        msg = f"{path} cannot be read: {error}; delete it to have it made again"
        raise UsageError(msg) from error
