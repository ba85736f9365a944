"""Who is asking: bearer tokens, each with one role, compared in constant time (I6).

The three tokens of the server are made when it is set up. A node gets one of its own when it
joins, which opens what that node may do and nothing else. The secret of a session is none of
these: a sandboxed agent that finds the server's address finds every door closed.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import NamedTuple

import msgspec

from tugline.errors import UsageError
from tugline.server.http.problems import Refusal


class Role(StrEnum):
    """What a token is good for."""

    CLIENT = "client"
    """Everything but what nodes do."""
    READ = "read"
    """Looking."""
    JOIN = "join"
    """Becoming a node."""
    NODE = "node"
    """Being one."""


class Caller(NamedTuple):
    """Who asks; `node` is the id of a node."""

    role: Role | None = None
    node: str = ""


class Tokens(msgspec.Struct, frozen=True):
    """The server's own tokens, all different. Raises `UsageError` for one that is no token."""

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


NodeOf = Callable[[str], Awaitable[str | None]]


async def identify(header: str | None, tokens: Tokens, node_of: NodeOf) -> Caller:
    """Who sends this ``Authorization`` header. Raises `Refusal`."""
    scheme, _, token = (header or "").partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not token:
        msg = "send the header 'Authorization: Bearer TOKEN'"
        raise Refusal(msg, "unauthorized", headers={"www-authenticate": 'Bearer realm="tugline"'})
    own = {Role.CLIENT: tokens.client, Role.READ: tokens.read, Role.JOIN: tokens.join}
    sent = token.encode()
    same = [role for role, one in own.items() if hmac.compare_digest(one.encode(), sent)]
    if same:
        return Caller(same[0])
    node = await node_of(token)
    if node is None:
        msg = "this token is unknown, or of a node that is gone"
        challenge = 'Bearer realm="tugline", error="invalid_token"'
        raise Refusal(msg, "unauthorized", headers={"www-authenticate": challenge})
    return Caller(Role.NODE, node)


def authorise(caller: Caller, roles: frozenset[Role], what: str) -> None:
    """Raises `Refusal` unless the caller has one of `roles`."""
    if caller.role not in roles:
        needed = " or ".join(sorted(roles))
        msg = f"{what} needs the {needed} token; this is a {caller.role} token"
        raise Refusal(msg, "forbidden")
