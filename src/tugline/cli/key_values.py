"""``key=value`` texts of repeatable options, and the plug-ins that they configure."""

from collections.abc import Iterable
from typing import Any

import msgspec

from tugline.errors import UsageError
from tugline.types import PluginSpec


def parse_builder(name: str | None, options: Iterable[str] | None) -> PluginSpec | None:
    """Parse ``--builder`` and its ``--option key=value``."""
    given = parse_options(options, "--option")
    if given and name is None:
        msg = f"--option {next(iter(options or ()))} requires --builder"
        raise UsageError(msg)
    return None if name is None else PluginSpec(name, given)


def parse_options(texts: Iterable[str] | None, flag: str) -> dict[str, Any]:
    """Parse ``key=value`` options of a plug-in; a value is JSON if valid, else text."""
    return {key: _parse_value(text) for key, text in parse_pairs(texts, flag).items()}


def parse_pairs(texts: Iterable[str] | None, flag: str) -> dict[str, str]:
    """Parse ``key=value`` texts of a repeatable flag. Raises `UsageError`."""
    pairs = {}
    for text in texts or ():
        key, equals, pairs[key] = text.partition("=")
        if not key or not equals:
            raise UsageError(f"{flag} is {text!r}, must be key=value")
    return pairs


def _parse_value(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
