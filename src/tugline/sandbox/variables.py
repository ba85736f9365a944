"""Variables of the node in a task's environment: ``${NAME}`` and ``${NAME:-default}``.

Whoever wrote the task must not read what the node keeps there, keys above all: only names that the
run lists are filled in.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping

from tugline.errors import ConfigError

_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


def check_variables(env: Mapping[str, str], passed: Collection[str], option: str) -> None:
    """Raises `ConfigError` for a variable without default that `passed` does not have."""
    for name, value in env.items():
        for hit in _VARIABLE.finditer(value):
            if hit[1] not in passed and hit[2] is None:
                must = f"list {hit[1]!r} in pass_env to fill it in from the node"
                msg = f"{option}.{name} is {value!r}: {must}"
                raise ConfigError(msg)


def filled(env: Mapping[str, str], passed: Collection[str]) -> dict[str, str]:
    """`env` with the variables' values, as far as `passed` has them, else their defaults."""

    def value_of(hit: re.Match[str]) -> str:
        given = os.environ.get(hit[1]) if hit[1] in passed else None
        return given or hit[2] or ""

    return {name: _VARIABLE.sub(value_of, value) for name, value in env.items()}
