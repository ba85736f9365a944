"""Tasks for tests."""

from __future__ import annotations

from typing import Any

from tugline.types import PluginSpec, Task


def make_task(name: str = "t", samples: int = 1, **fields: Any) -> Task:
    """A task, which is never run unless `fields` have a harness."""
    parts = {"harness": PluginSpec("shell"), "evaluator": PluginSpec("tests")}
    return Task(**{"id": name, "instruction": "Mend it", "samples": samples, **parts, **fields})
