"""Wrong options of every evaluator are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tugline.errors import ConfigError, UnknownPlugin
from tugline.evaluators.base import Evaluator
from tugline.plugins import make
from tugline.schema import read_jsonl
from tugline.types import PluginSpec

BASE: dict[str, dict[str, Any]] = {
    "function": {},
    "harbor": {"tests": "/t"},
    "judge": {"base_url": "http://h/v1", "model": "m", "rubric": "r"},
    "swebench": {
        "instance": "a",
        "eval_script": ">>>>> Start Test Output\n>>>>> End Test Output",
        "log_parser": "p",
        "fail_to_pass": ["a"],
    },
    "tests": {},
    "weighted": {"parts": {"a": {"evaluator": {"name": "session_completed"}}}},
}
"""Valid options of each."""
REFUSED = [row for _, row in read_jsonl(Path(__file__).with_name("refused.jsonl"))]


@pytest.mark.parametrize("row", REFUSED, ids=[row["error"] for row in REFUSED])
def test_wrong_options_are_reported(row: dict[str, Any]) -> None:
    """The error has the option, its value and what is allowed."""
    name = row["evaluator"]
    with pytest.raises((ConfigError, UnknownPlugin)) as error:
        make("evaluator", PluginSpec(name, BASE[name] | row["options"]), Evaluator)
    assert row["error"] in str(error.value)
