"""Find plug-ins by name (built in, entry point or ``module:Class``) and make them.

Plug-ins are looked up when a task is accepted, so that an unknown name is reported there, with the
known names, and not in the middle of a run. The same holds for options: `make` checks them against
the type hints of the class.
"""

import asyncio
import contextlib
import difflib
import functools
import inspect
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tugline.errors import ConfigError, UnknownPlugin, UsageError
from tugline.schema import decode
from tugline.types import PluginSpec

P = TypeVar("P")

BUILT_IN: dict[str, dict[str, str]] = tomllib.loads(
    (Path(__file__).parent / "plugins.toml").read_text(encoding="utf-8")
)
"""Targets by kind and name, in the form of the entry points ``tugline.<kind>``."""


def import_beside(file: Path) -> None:
    """Let modules in the folder of a configuration or task file be imported; installed ones win."""
    folder = str(file.absolute().parent)
    if folder not in sys.path:
        sys.path.append(folder)


def list_names(kind: str) -> list[str]:
    """List every name of `kind`, built in or from entry points."""
    entry_points = metadata.entry_points(group=f"tugline.{kind}")
    return sorted({*BUILT_IN[kind], *(point.name for point in entry_points)})


def find(kind: str, name: str) -> Any:
    """Find the class named `name`. Raises `UnknownPlugin` with the nearest known name."""
    target = name if ":" in name else BUILT_IN[kind].get(name)
    if target is not None:
        return _load(kind, target)
    for point in metadata.entry_points(group=f"tugline.{kind}", name=name):
        return point.load()
    names = list_names(kind)
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    msg = f"unknown {kind} {name!r}{hint} (known: {', '.join(names)}, or module:Class)"
    raise UnknownPlugin(msg)


def _load(kind: str, target: str) -> Any:
    module, _, attribute = target.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UnknownPlugin(f"{kind} {target!r} cannot be loaded: {error}") from error


def make(kind: str, spec: PluginSpec, contract: type[P]) -> P:
    """Make the plug-in that `spec` names, a subclass of `contract`.

    Raises `UnknownPlugin` for the name, `ConfigError` for an unknown or a wrong option.
    """
    target = find(kind, spec.name)
    parameters = _parameters(target)
    if not (isinstance(target, type) and issubclass(target, contract)):
        base = f"{contract.__module__}.{contract.__name__}"
        raise UnknownPlugin(f"{kind} {spec.name!r} must be a subclass of {base}")
    for option, value in spec.options.items():
        hint = parameters.get(option, parameters.get("**"))
        if hint is not None and value is not hint.default:
            # Hints that msgspec does not support are not checked.
            with contextlib.suppress(TypeError, NotImplementedError):
                decode(value, hint.annotation, source=f"{kind} {spec.name!r}", name=option)
    try:
        inspect.signature(target).bind(**spec.options)  # its errors do not name the constructor
        return target(**spec.options)
    except TypeError as error:
        known = ", ".join(inspect.signature(target).parameters) or "none"
        reason = re.sub(r"got an unexpected keyword argument", "unknown option", str(error))
        reason = re.sub(r"missing a required( keyword-only)? argument:", "missing option", reason)
        raise ConfigError(f"{kind} {spec.name!r}: {reason} (its options: {known})") from error


def import_extra(module: str, extra: str, what: str) -> Any:
    """Import a module that `what` needs. Raises `UsageError`, naming the extra to install."""
    try:
        return import_module(module)
    except ImportError as error:
        raise UsageError(f"{what} needs {error.name}: pip install 'tugline[{extra}]'") from error


def pack_options(where: str, options: Mapping[str, Any]) -> bytes:
    """Encode options deterministically. Raises `ConfigError` for values msgpack cannot hold."""
    try:
        return msgspec.msgpack.encode(options, order="deterministic")
    except (TypeError, ValueError, OverflowError) as error:
        msg = next(_find_invalid_keys(where, options), f"{where} cannot be stored: {error}")
        raise ConfigError(msg) from error


def _find_invalid_keys(where: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                yield f"{where} has the key {key!r}, but keys must be strings (in quotes)"
            yield from _find_invalid_keys(f"{where}[{key!r}]", inner)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _find_invalid_keys(f"{where}[{number}]", inner)


@functools.lru_cache(maxsize=256)
def _parameters(target: Any) -> dict[str, inspect.Parameter]:
    """Return typed parameters by name, ``**`` for keyword arguments; none if hints are invalid."""
    try:
        parameters = inspect.signature(target, eval_str=True).parameters.values()
    except Exception:  # noqa: BLE001 - a hint is an arbitrary expression of a third party
        return {}
    return {
        "**" if each.kind is each.VAR_KEYWORD else each.name: each
        for each in parameters
        if each.annotation is not each.empty
    }


# --------------------------------------------------------------------------- running them
ENDINGS = (asyncio.CancelledError, SystemExit)
"""What a plug-in's code may raise as well, although only an order may end a task or a process."""


@contextlib.contextmanager
def refuse_endings(what: str, kind: type[Exception] = RuntimeError) -> Iterator[None]:
    """Raise an error of `kind` for `ENDINGS` that a plug-in raised by itself in the block.

    A cancellation of the current task, by an order or a timeout, is passed on.
    """
    try:
        yield
    except ENDINGS as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        raise kind(f"{what} raised {error!r}") from error
