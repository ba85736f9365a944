"""Wrong options of every evaluator are refused where the task is accepted."""

from __future__ import annotations

from typing import Any

import pytest

from tugline.errors import ConfigError, UnknownPlugin
from tugline.evaluators.base import Evaluator
from tugline.plugins import make
from tugline.types import PluginSpec

CRITERION = {"name": "right", "text": "It is right."}
COMMAND = {"command": "true", "format": "tap"}
PART = {"evaluator": {"name": "session_completed"}}
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
    "weighted": {"parts": {"a": PART}},
}
"""Options with which each can be made."""
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("tests", {"command": "true"}, "format is None, must be one of junit, pytest"),
    ("tests", {"command": "true", "format": "xml"}, "format is 'xml'"),
    ("tests", {"command": "true", "format": "junit"}, "needs {report} in it (--junitxml="),
    ("tests", COMMAND | {"command": []}, "command is [], must be "),
    ("tests", COMMAND | {"setup": ""}, "setup is '', must be "),
    ("tests", {"format": "tap"}, "format is 'tap', but it is for tests with a command"),
    ("tests", {"expected": []}, "no test is expected"),
    ("tests", {"fail_to_pass": []}, "no test is expected"),
    ("tests", {"protected": ["/"]}, "protected.0 is '/'"),
    ("harbor", {"tests": "tests"}, "tests is 'tests', must be an absolute path"),
    ("harbor", {"env": {"A": "${KEY}"}}, "list 'KEY' in pass_env"),
    ("swebench", {"eval_script": "pytest"}, "eval_script is 'pytest', must print '>>>>> Start"),
    ("swebench", {"fail_to_pass": []}, "fail_to_pass is [], must be a list"),
    ("swebench", {"hides": ["tests"]}, "hides.0 is 'tests'"),
    ("judge", {"base_url": "localhost:8000"}, "base_url is 'localhost:8000', must be"),
    ("judge", {"attempts": 0}, "attempts is 0, must be an integer >= 1"),
    ("judge", {"rubric": ""}, "rubric must be a text, or criteria"),
    ("judge", {"rubric": []}, "rubric is [], must be"),
    (
        "judge",
        {"rubric": [CRITERION, CRITERION]},
        "must be a text, or criteria with different names",
    ),
    ("judge", {"rubric": [CRITERION | {"weight": 0}]}, "weight is 0, must be a number > 0"),
    ("weighted", {"parts": {}}, "parts is {}, must be an object"),
    ("weighted", {"mode": "max"}, "mode is 'max', must be one of mean, min, product"),
    ("weighted", {"parts": {"a": PART | {"weight": 0}}}, "must be a number > 0"),
    (
        "weighted",
        {"parts": {"a": {"evaluator": {"name": "tests", "options": {"wrong": 1}}}}},
        "(its options: files, command",
    ),
    ("weighted", {"parts": {"a": {"evaluator": {"name": "builtins:dict"}}}}, "must be a subclass"),
    ("weighted", {"parts": {"a": {"evaluator": {"name": "test"}}}}, "did you mean 'tests'"),
    ("function", {"target": "tugline"}, "must be module:callable"),
    ("function", {"target": "tugline:nothing"}, "cannot be loaded: module 'tugline' has no attr"),
    ("function", {"target": "no_such_module_here:f"}, "cannot be loaded: No module named"),
    ("function", {"target": "tugline:__name__"}, "is a str, must be callable"),
]


@pytest.mark.parametrize(("name", "options", "message"), WRONG)
def test_wrong_options_are_named(name: str, options: dict[str, Any], message: str) -> None:
    """The error has the option, its value and what would be right."""
    with pytest.raises((ConfigError, UnknownPlugin)) as error:
        make("evaluator", PluginSpec(name, BASE[name] | options), Evaluator)
    assert message in str(error.value)
