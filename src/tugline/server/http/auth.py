"""Bearer tokens, each with one role, compared in constant time (I6).

The server's three tokens are made when it is set up. A node gets its own when it joins, which
allows what that node may do and nothing else. The secret of a session is none of these: a
sandboxed agent that finds the server's address cannot use it.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import NamedTuple

import msgspec

from tugline.errors import UsageError
from tugline.server.http.problems import Refusal


class ApiRole(StrEnum):
    """What a token allows."""

    CLIENT = "client"
    """Everything except what nodes do."""
    READ = "read"
    """Reading."""
    JOIN = "join"
    """Joining as a node."""
    NODE = "node"
    """Acting as the node that it was given to."""


class Caller(NamedTuple):
    """Who sends a request; `node` is the id of a node."""

    role: ApiRole | None = None
    node: str = ""


class Tokens(msgspec.Struct, frozen=True):
    """The server's own tokens, all different. Raises `UsageError` for a malformed one."""

    client: str
    join: str
    read: str

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            token = getattr(self, name)
            if not token or not token.isascii() or any(c.isspace() for c in token):
                msg = f"the {name} token must be ASCII without spaces, and not empty"
                raise UsageError(msg)
        if len({self.client, self.join, self.read}) < 3:
            msg = "the client, join and read tokens must differ from each other"
            raise UsageError(msg)

    def __repr__(self) -> str:
        return "Tokens(...)"


FindNode = Callable[[str], Awaitable[str | None]]


async def identify(header: str | None, tokens: Tokens, find_node: FindNode) -> Caller:
    """The caller that sends this ``Authorization`` header. Raises `Refusal`."""
    scheme, _, token = (header or "").partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not token:
        message = "send the header 'Authorization: Bearer TOKEN'"
        raise _refuse(message)
    own = {ApiRole.CLIENT: tokens.client, ApiRole.READ: tokens.read, ApiRole.JOIN: tokens.join}
    sent = token.encode()
    matches = [role for role, each in own.items() if hmac.compare_digest(each.encode(), sent)]
    if matches:
        return Caller(matches[0])
    node = await find_node(token)
    if node is None:
        message = "this token is unknown, or of a node that is gone"
        raise _refuse(message, ', error="invalid_token"')
    return Caller(ApiRole.NODE, node)


def authorize(caller: Caller, roles: frozenset[ApiRole], route: str) -> None:
    """Raises `Refusal` unless the caller has one of `roles`."""
    if caller.role not in roles:
        needed = " or ".join(sorted(roles))
        msg = f"{route} needs the {needed} token; this is a {caller.role} token"
        raise Refusal(msg, "forbidden")


def _refuse(message: str, error: str = "") -> Refusal:
    challenge = f'Bearer realm="tugline"{error}'
    return Refusal(message, "unauthorized", headers={"www-authenticate": challenge})
