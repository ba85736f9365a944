"""Expand variables of the node in a task's environment: ``${NAME}`` and ``${NAME:-default}``.

A task's author must not be able to read the node's environment, keys above all: only names that the
run lists are expanded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping

from tugline.errors import ConfigError

_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


def check_variables(env: Mapping[str, str], passed: Collection[str], option: str) -> None:
    """Raise `ConfigError` for a variable without default that `passed` does not have."""
    for name, value in env.items():
        for match in _VARIABLE.finditer(value):
            if match[1] not in passed and match[2] is None:
                must = f"list {match[1]!r} in pass_env to fill it in from the node"
                msg = f"{option}.{name} is {value!r}: {must}"
                raise ConfigError(msg)


def expand_variables(env: Mapping[str, str], passed: Collection[str]) -> dict[str, str]:
    """Return `env` with values of the variables that `passed` has, else their defaults."""

    def expand(match: re.Match[str]) -> str:
        value = os.environ.get(match[1]) if match[1] in passed else None
        return value or match[2] or ""

    return {name: _VARIABLE.sub(expand, value) for name, value in env.items()}
