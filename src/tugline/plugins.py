"""Find interchangeable parts by name: built in, by entry point, or as ``module:Class``.

A part is looked up once, where a task is accepted, so an unknown name is an error at the door
that lists the known ones, never a failure in the middle of a run.
"""

from __future__ import annotations

import difflib
from importlib import import_module, metadata
from typing import Any

from tugline.errors import UnknownPlugin

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
        "apptainer": "tugline.runtimes.apptainer.runtime:Apptainer",
        "auto": "tugline.runtimes.auto:Auto",
        "bubblewrap": "tugline.runtimes.bubblewrap.runtime:Bubblewrap",
        "container": "tugline.runtimes.container.runtime:Container",
        "local": "tugline.runtimes.local:Local",
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
        "harbor": "tugline.tasksets.harbor:Harbor",
        "jsonl": "tugline.tasksets.jsonl:Jsonl",
        "swe": "tugline.tasksets.swe:Swe",
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
        "per_request": "tugline.builders.per_request:PerRequest",
        "prefix_merging": "tugline.builders.prefix_merging:PrefixMerging",
        "tree": "tugline.builders.tree:PrefixTree",
    },
}
"""Kind to name to target; the same shape as the entry points ``tugline.<kind>``."""


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
