"""Find interchangeable parts by name: built in, by entry point, or as ``module:Class``.

A part is looked up once, where a task is accepted, so an unknown name is an error at the door
that lists the known ones, never a failure in the middle of a run. The same holds for its options:
`make` compares them with the type hints of the class.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
import reprlib
from collections.abc import Iterator, Mapping
from importlib import import_module, metadata
from typing import Any

import msgspec

from tugline.errors import ConfigError, UnknownPlugin

BUILT_IN: dict[str, dict[str, str]] = {
    "harness": {
        "claude_code": "tugline.harnesses.claude_code:ClaudeCode",
        "codex": "tugline.harnesses.codex:Codex",
        "gemini_cli": "tugline.harnesses.gemini_cli:GeminiCli",
        "mini_swe_agent": "tugline.harnesses.mini_swe_agent:MiniSweAgent",
        "opencode": "tugline.harnesses.opencode:Opencode",
        "pi": "tugline.harnesses.pi:Pi",
        "qwen_code": "tugline.harnesses.qwen_code:QwenCode",
        "shell": "tugline.harnesses.shell:Shell",
    },
    "runtime": {
        "apptainer": "tugline.sandbox.apptainer.runtime:Apptainer",
        "auto": "tugline.sandbox.auto:Auto",
        "bubblewrap": "tugline.sandbox.bubblewrap.runtime:Bubblewrap",
        "container": "tugline.sandbox.container.runtime:Container",
        "local": "tugline.sandbox.local:Local",
    },
    "evaluator": {
        "function": "tugline.evaluators.function:Function",
        "harbor": "tugline.evaluators.harbor:Harbor",
        "judge": "tugline.evaluators.judge:Judge",
        "session_completed": "tugline.evaluators.session_completed:SessionCompleted",
        "swebench": "tugline.evaluators.swebench:SweBench",
        "tests": "tugline.evaluators.tests:Tests",
        "weighted": "tugline.evaluators.weighted:Weighted",
    },
    "taskset": {
        "harbor": "tugline.datasets.harbor:Harbor",
        "jsonl": "tugline.datasets.jsonl:Jsonl",
        "swe": "tugline.datasets.swe:Swe",
    },
    "export": {
        "arrow": "tugline.exports.parquet:Arrow",
        "calls": "tugline.exports.parquet:Calls",
        "parquet": "tugline.exports.parquet:Parquet",
        "sft": "tugline.exports.sft:Sft",
        "slime": "tugline.exports.slime:Slime",
        "trl": "tugline.exports.trl:Trl",
        "verl": "tugline.exports.verl:Verl",
    },
    "builder": {
        "per_request": "tugline.traces.per_request:PerRequest",
        "prefix_merging": "tugline.traces.prefix_merging:PrefixMerging",
        "tree": "tugline.traces.tree:PrefixTree",
    },
}
"""Kind to name to target; the same shape as the entry points ``tugline.<kind>``."""
_WORDS = {
    "array": "a list",
    "bool": "true or false",
    "float": "a number",
    "int": "a whole number",
    "object": "a table",
    "str": "a text",
}
"""What msgspec calls the values of a task file, and we do."""


def known(kind: str) -> list[str]:
    """Every name of `kind` that can be used without spelling out ``module:Class``."""
    entry_points = metadata.entry_points(group=f"tugline.{kind}")
    return sorted({*BUILT_IN[kind], *(point.name for point in entry_points)})


def find(kind: str, name: str) -> Any:
    """The class behind `name`. Raises `UnknownPlugin` with the nearest known name."""
    if ":" in name:
        return _load(kind, name)
    if name in BUILT_IN[kind]:
        return _load(kind, BUILT_IN[kind][name])
    for point in metadata.entry_points(group=f"tugline.{kind}", name=name):
        return point.load()
    names = known(kind)
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    msg = f"unknown {kind} {name!r}{hint} (known: {', '.join(names)}, or module:Class)"
    raise UnknownPlugin(msg)


def _load(kind: str, target: str) -> Any:
    module, _, attribute = target.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        msg = f"{kind} {target!r} cannot be loaded: {error}"
        raise UnknownPlugin(msg) from error


def make(kind: str, name: str, target: Any, options: Mapping[str, Any]) -> Any:
    """`target` called with `options`. Raises `ConfigError` for an unknown or a wrong one."""
    parameters = _parameters(target)
    for option, value in options.items():
        hint = parameters.get(option, parameters.get("**"))
        if hint is not None and value is not hint.default:
            _check(f"{kind} {name!r}: {option}", value, hint.annotation)
    try:
        return target(**options)
    except TypeError as error:
        known = ", ".join(inspect.signature(target).parameters) or "none"
        msg = f"{kind} {name!r}: {error} (its options: {known})"
        raise ConfigError(msg) from error


def packed(where: str, options: Mapping[str, Any]) -> bytes:
    """The same bytes for the same options. Raises `ConfigError` for what no message can carry."""
    try:
        return msgspec.msgpack.encode(options, order="deterministic")
    except (TypeError, ValueError, OverflowError) as error:
        msg = next(_odd_keys(where, options), f"{where} cannot be kept: {error}")
        raise ConfigError(msg) from error


def _odd_keys(where: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                yield f"{where} has the key {key!r}, must be a text (in quotes)"
            yield from _odd_keys(f"{where}[{key!r}]", inner)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _odd_keys(f"{where}[{number}]", inner)


@functools.lru_cache(maxsize=256)
def _parameters(target: Any) -> dict[str, inspect.Parameter]:
    """Those with type hints, by name, and ``**`` for all others; none where they cannot be read."""
    try:
        found = inspect.signature(target, eval_str=True).parameters.values()
    except Exception:  # noqa: BLE001 - hints are any expression, of somebody else's
        return {}
    hinted = (one for one in found if one.annotation is not one.empty)
    return {"**" if one.kind is one.VAR_KEYWORD else one.name: one for one in hinted}


def _check(where: str, value: Any, hint: Any) -> None:
    try:
        msgspec.convert(value, hint, dec_hook=_no_plain_value)
    except msgspec.ValidationError as error:
        why, _, place = str(error).partition(" - at `$")
        wanted = re.match(r"Expected `([^`]+)`([^,]*)", why)
        if wanted:
            words = " or ".join(_WORDS.get(one, one) for one in wanted[1].split(" | "))
            at = f" at {place.removesuffix('`')}" if place else ""
            why = f"must be {words}{wanted[2]}{at}"
        msg = f"{where} is {reprlib.repr(value)}, {why}"
        raise ConfigError(msg) from error
    except (TypeError, NotImplementedError):  # a hint that says nothing of plain values
        return


def _no_plain_value(hint: type, _: Any) -> None:
    raise NotImplementedError(hint)
