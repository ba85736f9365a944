"""Options, workspaces and mounts that a runtime refuses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from support.containers import DEBIAN
from support.sandbox import Driver
from tugline.errors import ConfigError, SandboxError, TuglineError, UsageError, WorkspaceError
from tugline.plugins import find, make
from tugline.sandbox.base import Mount, Runtime, SandboxSpec
from tugline.types import PluginSpec, Workspace

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
    (
        "container",
        {"engine": "tcp://host:1"},
        "engine is 'tcp://host:1', must be podman, docker or",
    ),
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


NOT_HOME = "an absolute folder, not /home/agent"
WORKSPACES: list[tuple[str, Workspace, type[TuglineError], str]] = [
    ("local", Workspace(image="debian"), UsageError, r"workspace.image \('debian'\)"),
    ("local", Workspace(build="d"), UsageError, "workspace.build"),
    ("local", Workspace(path="/testbed"), UsageError, "workspace.path"),
    ("bubblewrap", Workspace(image="debian:12"), UsageError, "workspace.image"),
    ("bubblewrap", Workspace(build="."), UsageError, "workspace.build"),
    ("bubblewrap", Workspace(path="here"), UsageError, "workspace.path is 'here'"),
    ("bubblewrap", Workspace(path="/usr/src"), UsageError, "workspace.path is '/usr/src'"),
    ("bubblewrap", Workspace(path="/home"), UsageError, NOT_HOME),
    ("bubblewrap", Workspace(path="/home/agent"), UsageError, NOT_HOME),
    ("bubblewrap", Workspace(folder="/no/such"), WorkspaceError, "'/no/such'"),
    ("container", Workspace(image=DEBIAN, path="/home"), UsageError, "workspace.path is '/home'"),
    ("stand-in", Workspace(), UsageError, "needs workspace.image: a sandbox directory, or what"),
    ("stand-in", Workspace(build="/x"), UsageError, "does not support workspace.build"),
    ("stand-in", Workspace(image="/x", path="/"), UsageError, "workspace.path is '/', must be an"),
]
MOUNTS: list[tuple[str, Mount, type[TuglineError], str]] = [
    ("local", Mount("/logs"), UsageError, "at /logs"),
    ("local", Mount("/tool", "/usr"), UsageError, "at /tool"),
    ("bubblewrap", Mount("/tool", "/no/such/tool"), SandboxError, "/no/such/tool"),
]


@pytest.mark.parametrize(
    ("driver", "spec", "error", "expected"),
    [
        pytest.param(driver, spec, *rest, marks=[pytest.mark.podman] * (driver == "container"))
        for driver, spec, *rest in (
            *(
                (driver, SandboxSpec(workspace=workspace), *rest)
                for driver, workspace, *rest in WORKSPACES
            ),
            *((driver, SandboxSpec(mounts=(mount,)), *rest) for driver, mount, *rest in MOUNTS),
        )
    ],
    indirect=["driver"],
)
async def test_unsupported_specs_are_refused(
    driver: Driver, spec: SandboxSpec, error: type[TuglineError], expected: str, tmp_path: Path
) -> None:
    """The error names the image, the occupied path or the missing folder."""
    with pytest.raises(error, match=expected):
        async with driver.runtime.open(tmp_path / "sandbox", spec):
            pass


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bubblewrap", r"bwrap is not on the PATH: apt install bubblewrap.*`runtime: local`"),
        ("apptainer", "apptainer is not on the PATH: see https://"),
    ],
)
async def test_a_missing_program_is_an_error(
    name: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no fallback without isolation; the error tells how to install the program."""
    runtime = find("runtime", name)()
    with monkeypatch.context() as patched:
        patched.setenv("PATH", str(tmp_path))
        assert re.search(expected, runtime.check_available() or "")
        with pytest.raises(SandboxError, match=expected):
            async with runtime.open(tmp_path / "a"):
                pytest.fail("a sandbox was opened")
        assert not (tmp_path / "a" / "work").exists()
        assert runtime.reap(tmp_path) == 0
    if runtime.check_available() is None:  # the program is on the PATH again
        async with runtime.open(tmp_path / "b"):
            assert runtime.list_weaknesses() == find("runtime", name)().list_weaknesses()
