"""Wrong options of every runtime are refused where the task is accepted."""

from __future__ import annotations

from typing import Any

import pytest

from tugline.errors import ConfigError
from tugline.plugins import make
from tugline.sandbox.base import Runtime
from tugline.types import PluginSpec

READABLE = "readable is|readable.0 is"
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("auto", {"memory": 1}, "unknown key 'memory'; did you mean 'memory_mb'"),
    ("auto", {"memory_mb": -1}, "memory_mb is -1"),
    ("bubblewrap", {"memory_mb": 0}, "memory_mb is 0, must be an integer >= 1"),
    ("bubblewrap", {"readable": "x"}, READABLE),
    ("bubblewrap", {"readable": ["relative"]}, READABLE),
    ("bubblewrap", {"readable": ["/"]}, READABLE),
    ("bubblewrap", {"allow": ["no port"]}, "'no port' must be HOST:PORT"),
    ("container", {"memory_mb": 0}, "memory_mb is 0, must be an integer >= 6"),
    ("container", {"engine": "tcp://host:1"}, "engine is 'tcp://host:1', not podman, docker or"),
    ("container", {"pull": "always"}, "pull is 'always', must be one of missing, never"),
    ("container", {"cpus": "2"}, "cpus is '2', must be a number"),
    ("container", {"cache_gb": 0}, "cache_gb is 0, must be a number > 0"),
    ("apptainer", {"memory_mb": 0}, "memory_mb is 0, must be an integer >= 1"),
    ("apptainer", {"network": "bridge"}, "network is 'bridge', must be one of host, none"),
    ("local", {"cpu_s": 0}, "cpu_s is 0"),
]


@pytest.mark.parametrize(("name", "options", "expected"), WRONG)
def test_wrong_options_are_named(name: str, options: dict[str, Any], expected: str) -> None:
    """The error has the option, its value and what would be right."""
    with pytest.raises(ConfigError, match=expected):
        make("runtime", PluginSpec(name, options), Runtime)
