"""Find plug-ins by name (built in, entry point or ``module:Class``) and make them.

A plug-in is looked up when a task is accepted, so an unknown name is an error there that lists the
known ones, never a failure in the middle of a run. The same holds for its options: `make` checks
them against the type hints of the class.
"""

import difflib
import functools
import inspect
from collections.abc import Iterator, Mapping
from importlib import import_module, metadata
from typing import Any, TypeVar

import msgspec

from tugline.errors import ConfigError, UnknownPlugin
from tugline.schema import decode
from tugline.types import PluginSpec

P = TypeVar("P")

BUILT_IN: dict[str, dict[str, str]] = {
    "harness": {
        "claude_code": "tugline.harnesses.claude_code:ClaudeCode",
        "codex": "tugline.harnesses.codex:Codex",
        "gemini_cli": "tugline.harnesses.gemini_cli:GeminiCli",
        "mini_swe_agent": "tugline.harnesses.mini_swe_agent:MiniSweAgent",
        "opencode": "tugline.harnesses.opencode:Opencode",
        "pi": "tugline.harnesses.pi:Pi",
        "qwen_code": "tugline.harnesses.gemini_cli:QwenCode",
        "shell": "tugline.harnesses.shell:Shell",
    },
    "runtime": {
        "apptainer": "tugline.sandbox.apptainer:Apptainer",
        "auto": "tugline.sandbox.auto:Auto",
        "bubblewrap": "tugline.sandbox.bubblewrap:Bubblewrap",
        "container": "tugline.sandbox.container:Container",
        "local": "tugline.sandbox.local:LocalRuntime",
    },
    "evaluator": {
        "function": "tugline.evaluators.function:FunctionEvaluator",
        "harbor": "tugline.evaluators.harbor:HarborEvaluator",
        "judge": "tugline.evaluators.judge:JudgeEvaluator",
        "session_completed": "tugline.evaluators.session_completed:SessionCompletedEvaluator",
        "swebench": "tugline.evaluators.swebench:SweBenchEvaluator",
        "tests": "tugline.evaluators.tests:TestsEvaluator",
        "weighted": "tugline.evaluators.weighted:WeightedEvaluator",
    },
    "taskset": {
        "harbor": "tugline.datasets.harbor:HarborTaskSet",
        "jsonl": "tugline.datasets.rows:JsonlTaskSet",
        "swe": "tugline.datasets.swe:SweTaskSet",
    },
    "export": {
        "calls": "tugline.exports.tables:Calls",
        "parquet": "tugline.exports.tables:Parquet",
        "sft": "tugline.exports.json_lines:Sft",
        "slime": "tugline.exports.json_lines:Slime",
        "trl": "tugline.exports.tables:Trl",
        "verl": "tugline.exports.tables:Verl",
    },
    "metrics": {
        "plots": "tugline.trainers.sinks:PlotSink",
        "tensorboard": "tugline.trainers.sinks:TensorBoardSink",
        "trackio": "tugline.trainers.sinks:TrackioSink",
        "wandb": "tugline.trainers.sinks:WandbSink",
    },
    "builder": {
        "per_request": "tugline.traces.builders:PerRequest",
        "prefix_merging": "tugline.traces.builders:PrefixMerging",
        "tree": "tugline.traces.builders:PrefixTree",
    },
}
"""Kind to name to target; the same shape as the entry points ``tugline.<kind>``."""


def list_names(kind: str) -> list[str]:
    """List every name of `kind`, built in or from entry points."""
    entry_points = metadata.entry_points(group=f"tugline.{kind}")
    return sorted({*BUILT_IN[kind], *(point.name for point in entry_points)})


def find(kind: str, name: str) -> Any:
    """Find the class named `name`. Raises `UnknownPlugin` with the nearest known name."""
    if ":" in name:
        return _load(kind, name)
    if name in BUILT_IN[kind]:
        return _load(kind, BUILT_IN[kind][name])
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
        msg = f"{kind} {target!r} cannot be loaded: {error}"
        raise UnknownPlugin(msg) from error


def make(kind: str, spec: PluginSpec, contract: type[P]) -> P:
    """Make the plug-in that `spec` names, a subclass of `contract`.

    Raises `UnknownPlugin` for the name, `ConfigError` for an unknown or a wrong option.
    """
    target = find(kind, spec.name)
    parameters = _parameters(target)
    if not (isinstance(target, type) and issubclass(target, contract)):
        base = f"{contract.__module__}.{contract.__name__}"
        msg = f"{spec.name!r} is no {kind}: it must be a subclass of {base}"
        raise UnknownPlugin(msg)
    for option, value in spec.options.items():
        hint = parameters.get(option, parameters.get("**"))
        if hint is not None and value is not hint.default:
            _check(f"{kind} {spec.name!r}", option, value, hint.annotation)
    try:
        return target(**spec.options)
    except TypeError as error:
        known = ", ".join(inspect.signature(target).parameters) or "none"
        msg = f"{kind} {spec.name!r}: {error} (its options: {known})"
        raise ConfigError(msg) from error


def pack_options(where: str, options: Mapping[str, Any]) -> bytes:
    """Encode options deterministically. Raises `ConfigError` for values msgpack cannot hold."""
    try:
        return msgspec.msgpack.encode(options, order="deterministic")
    except (TypeError, ValueError, OverflowError) as error:
        msg = next(_odd_keys(where, options), f"{where} cannot be stored: {error}")
        raise ConfigError(msg) from error


def _odd_keys(where: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                yield f"{where} has the key {key!r}, must be a string (in quotes)"
            yield from _odd_keys(f"{where}[{key!r}]", inner)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _odd_keys(f"{where}[{number}]", inner)


@functools.lru_cache(maxsize=256)
def _parameters(target: Any) -> dict[str, inspect.Parameter]:
    """Parameters with type hints by name, ``**`` for the rest; none if hints cannot be read."""
    try:
        parameters = inspect.signature(target, eval_str=True).parameters.values()
    except Exception:  # noqa: BLE001 - a hint is an arbitrary expression of a third party
        return {}
    return {
        "**" if each.kind is each.VAR_KEYWORD else each.name: each
        for each in parameters
        if each.annotation is not each.empty
    }


def _check(source: str, option: str, value: Any, hint: Any) -> None:
    try:
        decode(value, hint, source=source, name=option)
    except (TypeError, NotImplementedError):  # a hint that says nothing of plain values
        return
