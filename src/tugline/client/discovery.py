"""Which server: what is told, then the environment, then the files of ``tugline up``.

``tugline up`` leaves ``server.json`` (its URL) and ``tokens.json`` (0600) in its folder, so on the
same machine nothing needs to be told. A token from that folder is only ever sent to the server of
that folder (I6).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from tugline.errors import UsageError

T = TypeVar("T")

SERVER, TOKEN = "TUGLINE_SERVER", "TUGLINE_TOKEN"
FOLDER = Path("tugline-data")


class Found(NamedTuple):
    """A server and what opens it."""

    url: str
    token: str


class _Address(msgspec.Struct):
    url: str


class _Tokens(msgspec.Struct):
    client: str


def find_server(
    server: str | None = None, token: str | None = None, folder: Path | str | None = None
) -> Found:
    """The server to talk to. Raises `UsageError` that says what to do when there is none."""
    where = Path(folder) if folder is not None else FOLDER
    if folder is None:
        server = server or os.environ.get(SERVER)
    token = token or os.environ.get(TOKEN)
    here = _read(where / "server.json", _Address)
    if server is None:
        if here is None:
            msg = (
                f"no server: {where / 'server.json'} is not there; start one with `tugline up`,"
                f" or name it with --server or {SERVER}"
            )
            raise UsageError(msg)
        server = here.url
    if token is None and here is not None and here.url.rstrip("/") == server.rstrip("/"):
        kept = _read(where / "tokens.json", _Tokens)
        token = kept.client if kept else None
    if token is None:
        msg = f"no token for {server}: give --token or {TOKEN}; the server's tokens.json has it"
        raise UsageError(msg)
    return Found(server, token)


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        msg = f"{path} cannot be read: {error}"
        raise UsageError(msg) from error
