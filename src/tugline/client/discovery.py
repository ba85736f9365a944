"""Resolve the server's URL and token: arguments, then environment, then files of ``tugline up``.

``tugline up`` writes ``server.json`` (its URL) and ``tokens.json`` (0600) in its folder, so clients
on the same machine need no options. A token from that folder is only sent to the server of that
folder (I6).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

import msgspec

from tugline.errors import UsageError

T = TypeVar("T")

SERVER, TOKEN = "TUGLINE_SERVER", "TUGLINE_TOKEN"
FOLDER = Path("tugline-data")


class _Address(msgspec.Struct):
    url: str


class _Tokens(msgspec.Struct):
    client: str


def find_server(
    server: str | None = None, token: str | None = None, folder: Path | str | None = None
) -> tuple[str, str]:
    """Find the URL and token of the server to use. Raises `UsageError` if there is none."""
    base = Path(folder) if folder is not None else FOLDER
    if folder is None:
        server = server or os.environ.get(SERVER)
    token = token or os.environ.get(TOKEN)
    local = _read(base / "server.json", _Address)
    if server is None:
        if local is None:
            msg = (
                f"no server: {base / 'server.json'} does not exist; start one with `tugline up`,"
                f" or name it with --server or {SERVER}"
            )
            raise UsageError(msg)
        server = local.url
    if token is None and local is not None and local.url.rstrip("/") == server.rstrip("/"):
        tokens = _read(base / "tokens.json", _Tokens)
        token = tokens.client if tokens else None
    if token is None:
        msg = f"no token for {server}: give --token or {TOKEN}; the server's tokens.json has it"
        raise UsageError(msg)
    return server, token


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        msg = f"{path} cannot be read: {error}"
        raise UsageError(msg) from error
