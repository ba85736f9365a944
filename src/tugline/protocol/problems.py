"""Error bodies."""

from __future__ import annotations

import msgspec


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error body, RFC 9457."""

    type: str
    """``urn:tugline:problem:<name>``; docs/api.md lists the names."""
    title: str
    status: int
    detail: str
    field: str = ""
    """The wrong field, dotted, such as ``0.limits.agent_s``."""
    known: tuple[str, ...] = ()
    """Accepted values, if they are a list."""
