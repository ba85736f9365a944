"""Stand-ins for what the examples take from Harbor 0.26, which needs Python 3.12.

`install` makes them importable under Harbor's names. The agent is a client of the Anthropic API
that works in the environment's variables; an environment is this machine, with its own folders.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest
from pydantic import BaseModel, ConfigDict


class ClaudeCodeOptions(BaseModel):
    """Options that are declared, and no others."""

    model_config = ConfigDict(extra="forbid")


class Cli:
    """Marks an option as a flag of the agent."""

    def __init__(self, flag: str) -> None:
        self.flag = flag


class ClaudeCode:
    """An agent that calls its model until there is no tool call in the answer."""

    options_model: Any = ClaudeCodeOptions

    def __init__(self, logs_dir: Path, extra_env: dict[str, str] | None = None, **kw: Any) -> None:
        self.logs_dir, self.extra_env = logs_dir, extra_env or {}
        self.options = self.options_model(**kw)

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        """Talk to the model as Claude Code does; the environment may interrupt."""
        env = environment.variables
        headers = {"x-api-key": env["ANTHROPIC_API_KEY"]}
        url = env["ANTHROPIC_BASE_URL"] + "/v1/messages"
        messages: list[dict[str, Any]] = [{"role": "user", "content": instruction}]
        tool = {"name": "Bash", "input_schema": {"type": "object", "properties": {}}}
        request = {"model": env["ANTHROPIC_MODEL"], "max_tokens": 999, "tools": [tool]}
        async with httpx.AsyncClient(headers=headers) as client:
            while True:
                answer = await client.post(url, json={**request, "messages": messages})
                content = answer.raise_for_status().json()["content"]
                await environment.after_call()
                calls = [block["id"] for block in content if block["type"] == "tool_use"]
                if not calls:
                    return
                results = [
                    {"type": "tool_result", "tool_use_id": call, "content": "walrus"}
                    for call in calls
                ]
                messages += [
                    {"role": "assistant", "content": content},
                    {"role": "user", "content": results},
                ]

    def populate_context_post_run(self, context: Any) -> None:
        """What Harbor reads from Claude Code's log."""
        context.n_output_tokens, context.cost_usd = 1, 0.5


class ExecResult(BaseModel):
    """How a command ended."""

    stdout: str | None = None
    stderr: str | None = None
    return_code: int


class BaseEnvironment:
    """The machine itself: absolute paths are its own. `started` lists the sessions that run."""

    started: list[str] = []  # noqa: RUF012 - shared by all, so that a test sees them

    def __init__(self, *, session_id: str, task_env_config: Any, **options: Any) -> None:
        self.session_id, self.config, self.options = session_id, task_env_config, options
        if "wrong" in options:
            raise ValueError("Unknown option 'wrong'.")

    @classmethod
    def preflight(cls, kwargs: dict[str, Any]) -> None:
        """Whether it can be used."""
        if "wrong" in kwargs:
            raise SystemExit("no account")

    async def start(self, force_build: bool) -> None:  # noqa: FBT001 - Harbor's
        """Note that it runs."""
        if self.config.docker_image == "missing":
            raise RuntimeError("no such image")
        self.started.append(self.session_id)

    async def stop(self, delete: bool) -> None:  # noqa: FBT001 - Harbor's
        """Note that it does not."""
        if self.session_id in self.started:
            self.started.remove(self.session_id)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """Copy a file."""
        shutil.copy2(source_path, target_path)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """Copy a file."""
        shutil.copy2(source_path, target_path)

    @contextlib.contextmanager
    def scoped_output_callback(self, callback: Any) -> Iterator[None]:
        """Take no callback, as an environment does that does not stream."""
        yield

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
    ) -> ExecResult:
        """Run a shell command until it ends, without waiting for its children."""
        path = {"PATH": os.environ["PATH"]}
        with tempfile.TemporaryFile() as out:
            child = await asyncio.create_subprocess_exec(
                *("sh", "-c", command), cwd=cwd, env={**path, **(env or {})}, stdout=out, stderr=out
            )
            code = await child.wait()
            out.seek(0)
            return ExecResult(
                stdout=out.read().decode(), return_code=128 - code if code < 0 else code
            )


class NetworkMode(StrEnum):
    """The network mode that is used."""

    ALLOWLIST = "allowlist"


class TrialPaths:
    """Harbor's folders of a trial."""

    def __init__(self, trial_dir: Path) -> None:
        self.trial_dir = trial_dir

    def mkdir(self) -> None:
        """Make one of them."""
        (self.trial_dir / "agent").mkdir(parents=True, exist_ok=True)


class EnvironmentFactory:
    """Finds the one class."""

    @staticmethod
    def get_environment_class(*_: Any) -> type[BaseEnvironment]:
        """Return it for any name."""
        return BaseEnvironment


class EnvironmentType(StrEnum):
    """The only type of environment."""

    DOCKER = "docker"


_MODULES: dict[str, dict[str, Any]] = {
    "harbor.agents.installed.claude_code": {
        "ClaudeCode": ClaudeCode,
        "ClaudeCodeOptions": ClaudeCodeOptions,
    },
    "harbor.agents.options": {"Cli": Cli},
    "harbor.environments.base": {"BaseEnvironment": BaseEnvironment, "ExecResult": ExecResult},
    "harbor.environments.factory": {"EnvironmentFactory": EnvironmentFactory},
    "harbor.models.environment_type": {"EnvironmentType": EnvironmentType},
    "harbor.models.task.config": {
        "EnvironmentConfig": SimpleNamespace,
        "NetworkMode": NetworkMode,
        "NetworkPolicy": SimpleNamespace,
    },
    "harbor.models.trial.paths": {"TrialPaths": TrialPaths},
}


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the modules importable for one test."""
    for name, members in _MODULES.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
        for parent in (name.rsplit(".", n)[0] for n in range(1, name.count(".") + 1)):
            if parent not in sys.modules:
                monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
