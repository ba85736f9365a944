"""Tokens of a server, in ``tokens.json`` (mode 0600) of its folder.

They are created once, so that clients and nodes continue after a restart (I6). A running server
follows changes of the file.
"""

import asyncio
import ipaddress
import secrets
from pathlib import Path

import msgspec

from tugline import log
from tugline.atomic import write_file
from tugline.errors import TuglineError, UsageError
from tugline.server.http.app import Api
from tugline.server.http.route import Tokens
from tugline.server.settings import ServerSettings
from tugline.server.store import nodes
from tugline.server.store.database import Database

TOKENS = "tokens.json"
TOKENS_EVERY_S = 5.0
"""Seconds between two reads of ``tokens.json``."""
_log = log.get("server")


def load_tokens(folder: Path) -> Tokens:
    """Read the server's tokens; create missing ones. Raises `UsageError` for a damaged file."""
    path = folder / TOKENS
    if not path.exists():
        client, join, read = (secrets.token_urlsafe(32) for _ in range(3))
        tokens = Tokens(client, join, read)
        write_file(path, msgspec.json.format(msgspec.json.encode(tokens)), 0o600)
    return _read_tokens(path)


def _read_tokens(path: Path) -> Tokens:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Tokens)
    except (OSError, msgspec.DecodeError) as error:
        msg = f"{path} cannot be read: {error}; delete it to create new tokens"
        raise UsageError(msg) from error


async def follow_tokens(app: Api, database: Database, path: Path) -> None:
    """Apply changes of ``tokens.json`` until cancelled; ignore a missing or damaged file."""
    while True:
        await asyncio.sleep(TOKENS_EVERY_S)
        try:
            if (tokens := _read_tokens(path)) != app.tokens:
                await database.write(nodes.bind_tokens, tokens.join)
                app.tokens = tokens
                _log.warning("tokens replaced", file=str(path))
        except TuglineError as error:
            _log.error("tokens not replaced", error=str(error))


def describe_console(settings: ServerSettings, folder: Path, url: str, page: str = "") -> str:
    """Return the line about the console; on loopback it has a link with the read token.

    `page` is the path of the page that the link opens, without the first slash.
    """
    if not is_local(settings.host):
        return f"the console is at {url}; sign in with a token from {folder / TOKENS}"
    return f"the console is at {url}/{page}#token={load_tokens(folder).read}"


def is_local(host: str) -> bool:
    """Whether `host` is a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
