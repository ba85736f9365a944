"""Configuration files: decode a YAML, TOML or JSON file to a frozen struct.

Files are read strictly (`tugline.schema`), because a misspelt key that is silently ignored can
waste a training run. Every field has a docstring, which is also its description in the reference
tables of docs/configuration.md.
"""

import math
import reprlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, get_args

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


NO_CHANGES: Mapping[str, Any] = MappingProxyType({})


def load(path: Path | str, kind: type[C], changes: Mapping[str, Any] = NO_CHANGES) -> C:
    """Read the file at `path` as `kind`, with `changes` (`change`). Raises `ConfigError`."""
    values = read_values(Path(path))
    values = {} if values is None else values
    if not changes:
        return from_mapping(values, kind, source=str(path))
    from_mapping(values, kind, source=str(path))  # so that errors of the file name the file
    return from_mapping(change(values, changes), kind, source="--set")


def change(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `values` with the value of each dotted key replaced, or added.

    Raises `ConfigError` if a part of a key is not a table.
    """
    changed = dict(values)
    for key, value in changes.items():
        table = changed
        *parents, last = key.split(".")
        for number, name in enumerate(parents):
            below = table.get(name, {})
            if not isinstance(below, Mapping):
                where = ".".join(parents[: number + 1])
                msg = f"--set {key}: {where} is {reprlib.repr(below)}, must be a table"
                raise ConfigError(msg, where)
            table[name] = dict(below)
            table = table[name]
        table[last] = value
    return changed


def anchor_paths(values: Mapping[str, Any], kind: type[Config], folder: Path) -> dict[str, Any]:
    """Return a copy of `values` of `kind` whose relative paths are absolute, from `folder` on."""
    anchored = dict(values)
    for field in msgspec.structs.fields(kind):
        name = field.encode_name
        value = values.get(name)
        of = field.type
        if isinstance(value, str) and Path in (get_args(of) or (of,)):
            anchored[name] = str((folder / Path(value).expanduser()).absolute())
        elif isinstance(value, Mapping) and isinstance(of, type) and issubclass(of, Config):
            anchored[name] = anchor_paths(value, of, folder)
    return anchored


def from_mapping(values: Any, kind: type[C], source: str = "configuration") -> C:
    """Convert `values` to `kind`; errors name `source`. Raises `ConfigError`, one line."""
    if not isinstance(values, Mapping):
        msg = f"{source} is {reprlib.repr(values)}, must be a mapping such as `key: value`"
        raise ConfigError(msg)
    return decode(values, kind, source=source)
