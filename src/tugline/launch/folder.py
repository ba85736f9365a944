"""A folder that one process at a time works in, and the files by which clients find a server.

``server.json`` says where the server is, ``tokens.json`` (0600) opens it. The tokens are made once
and stay, so that clients and nodes go on over every restart (I6).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from tugline.errors import UsageError
from tugline.server.http.auth import Tokens
from tugline.signing import key_of, new_secret

SERVER = "server.json"
TOKENS = "tokens.json"
CALLBACKS = "callback.key"
_BYTES = 32
T = TypeVar("T")


class Address(msgspec.Struct, frozen=True):
    """What ``server.json`` holds."""

    url: str


@contextlib.contextmanager
def only_one(folder: Path, *, instead: str) -> Iterator[None]:
    """Make `folder` and keep other processes out. Raises `UsageError` that ends with `instead`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        msg = f"cannot write in {folder}: {error.strerror}; {instead}"
        raise UsageError(msg) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        msg = f"another process is running in {folder}; wait for it or {instead}"
        raise UsageError(msg) from error
    try:
        yield
    finally:
        os.close(lock)


def announce(folder: Path, url: str) -> None:
    """Tell clients on this machine where the server is."""
    _write(folder / SERVER, msgspec.json.encode(Address(url)), 0o644)


def tokens(folder: Path) -> Tokens:
    """The server's tokens, made when there are none. Raises `UsageError` for a damaged file."""
    path = folder / TOKENS
    if not path.exists():
        made = Tokens(*(secrets.token_urlsafe(_BYTES) for _ in Tokens.__struct_fields__))
        _write(path, msgspec.json.format(msgspec.json.encode(made)), 0o600)
    return _read(path, Tokens)


def callback_secret(folder: Path) -> bytes:
    """The key that callbacks are signed with; the file has the secret as receivers want it."""
    path = folder / CALLBACKS
    if not path.exists():
        _write(path, new_secret().encode() + b"\n", 0o600)
    return key_of(path.read_text(encoding="utf-8").strip())


def _write(path: Path, data: bytes, mode: int) -> None:
    """Whole or not at all; nobody else can read it at any moment, if `mode` says so."""
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
