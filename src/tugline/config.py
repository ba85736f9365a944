"""Configuration files: decode a YAML, TOML or JSON file to a frozen struct.

Files are read strictly (`tugline.schema`), because a misspelt key that is silently ignored can
waste a training run. Every field has a docstring, which is also its description in the reference
tables of docs/configuration.md.
"""

import math
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tugline.errors import ConfigError
from tugline.schema import decode, read_values


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Base class of configurations: frozen, always checked, with a docstring per field."""

    def __post_init__(self) -> None:
        """Check types and bounds, also of a configuration made in Python. Raises `ConfigError`."""
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"{field.name} is {value}, must be a finite number", field.name)
            decode(value, field.type, name=field.name)


C = TypeVar("C", bound=Config)


def load(path: Path | str, kind: type[C]) -> C:
    """Read the file at `path` as `kind`. Raises `ConfigError`, one line."""
    values = read_values(Path(path))
    return from_mapping({} if values is None else values, kind, source=str(path))


def from_mapping(values: Any, kind: type[C], source: str = "configuration") -> C:
    """Convert `values` to `kind`; errors name `source`. Raises `ConfigError`, one line."""
    if not isinstance(values, Mapping):
        msg = f"{source} is {reprlib.repr(values)}, must be a mapping such as `key: value`"
        raise ConfigError(msg)
    return decode(values, kind, source=source)
