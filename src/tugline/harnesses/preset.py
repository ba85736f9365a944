"""Base classes of presets: options, package, command line, extensions, crashes and first start.

A preset defines its program's package, settings and crash patterns. A program has crashed if a
fatal signal ended it or its last output matches a crash pattern. A program that stopped because the
model refused a call, as when a budget is spent, has not crashed.

MCP servers and skills of a task are written in the program's own format. The agent starts the
servers, so a `command` must exist in the sandbox (such as a script among the task's files) and a
`url` must be reachable from it.
"""

import asyncio
import re
import tempfile
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from tugline.errors import ConfigError, HarnessError
from tugline.harnesses.base import (
    MAX_ARGUMENT,
    Harness,
    Launch,
    LaunchContext,
    find_fatal_signal,
    prepare,
)
from tugline.harnesses.install import Package
from tugline.harnesses.npm import Npm
from tugline.sandbox.base import Exit, Runtime, SandboxSpec
from tugline.sandbox.local import LocalRuntime
from tugline.schema import decode
from tugline.web.http import Http, Message, Receive, Send
from tugline.web.serve import serve

Window = Annotated[int, msgspec.Meta(ge=1)]
"""Context window of an engine, in tokens."""
Dialect = Literal["openai_chat", "openai_responses", "anthropic", "google"]
"""A dialect, for programs that speak all four."""
INSTRUCTION = "instruction.txt"
"""File in the agent's home with a program's stdin."""
NODE_CRASHES = (
    (r"Node\.js v\d+\.\d+\.\d+\s*$", "an uncaught exception"),
    (r"JavaScript heap out of memory", "it ran out of heap memory"),
)
BUN_CRASHES = ((r"panic\((main thread|thread \d+)\)|Bun has crashed", "it panicked"),)
"""Crash patterns of native programs that are built with Bun."""
_TRIAL_S = 90.0
_TAIL = 400
_REFUSAL = b'{"error":{"message":"no more calls","type":"invalid_request_error","code":400}}'


@dataclass(kw_only=True, eq=False)
class Preset(Harness):
    """A harness whose program comes from a registry; its fields are the options of tasks."""

    crash_patterns: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Pairs of a pattern of the last output and a reason, for exit codes other than 0."""
    crash_codes: ClassVar[Mapping[int, str]] = {}
    """Reasons of crashes by exit code."""
    npm_package: ClassVar[str] = ""
    """Name of the npm package."""
    setup_script: ClassVar[str | None] = None
    """Install script of the package, which installs its native program."""
    command_marks: ClassVar[tuple[str, ...]] = ()
    """First characters of an instruction that the program would interpret as a command or file."""

    version: str
    args: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.package = self.make_package()

    def make_package(self) -> Package:
        """Return the package of this version, from npm by default."""
        return Npm(self.name, self.npm_package, self.version, self.setup_script)

    @abstractmethod
    def configure(self, context: LaunchContext) -> Launch:
        """Return arguments after the program's command, variables besides HOME, and settings.

        A `setup` is the program's own, too, such as ``("login",)``.
        """

    def pass_instruction(self, instruction: str) -> tuple[str, ...] | None:
        """Return the instruction as the last arguments; None if it is passed on stdin."""
        return None

    async def install(self) -> None:
        """Install this version unless it is installed; a new program must start."""
        await self.package.install(lambda _: start_once(self))
        self.mounts = self.package.mounts

    def launch(self, context: LaunchContext) -> Launch:
        """Return the command for one session."""
        instruction = context.instruction
        if instruction.startswith(self.command_marks):
            instruction = f" {instruction}"
        base = self.configure(context)
        command = self.package.command
        files = dict(base.files)
        argv = (*command, *base.argv)
        setup = (*command, *base.setup) if base.setup else ()
        last = self.pass_instruction(instruction)
        if last is None:
            files[INSTRUCTION] = instruction
            argv = ("sh", "-c", 'exec "$@" < "$0"', f"{context.home}/{INSTRUCTION}", *argv)
        else:
            argv += last
        env = {"HOME": context.home, **base.env, **self.package.env}
        return Launch(argv=argv, setup=setup, env=env, files=files)

    def find_crash(self, end: Exit, output: str) -> str | None:
        """Return why the program crashed; None if it did not."""
        if end.timed_out or end.code == 0:
            return None
        matches = (reason for pattern, reason in self.crash_patterns if re.search(pattern, output))
        return find_fatal_signal(end) or self.crash_codes.get(end.code) or next(matches, None)


def fits_argument(instruction: str) -> bool:
    """Return whether a program can be started with `instruction` as an argument."""
    return len(instruction.encode()) <= MAX_ARGUMENT


# --------------------------------------------------------------------- MCP servers and skills
class McpServer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An MCP server: a `command` that uses stdin and stdout, or a `url` (HTTP)."""

    command: str | None = None
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    url: str | None = None
    headers: dict[str, str] = {}


@dataclass(kw_only=True, eq=False)
class ExtensiblePreset(Preset):
    """A preset with MCP servers and skills.

    `mcp` are servers by name, `skills` texts of SKILL.md by name.
    """

    skills_folder: ClassVar[str]
    """Folder of the program's skills, relative to the agent's home."""

    mcp: Mapping[str, Any] | None = None
    skills: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.servers = parse_servers(self.name, self.mcp)
        self.skill_files = parse_skills(self.name, self.skills, self.skills_folder)


def parse_servers(harness: str, option: Mapping[str, Any] | None) -> dict[str, McpServer]:
    """Parse the option `mcp`, servers by name. Raises `ConfigError`."""
    source = f"harness {harness!r}"
    servers = decode(option or {}, dict[str, McpServer], source=source, name="mcp")
    for name, server in servers.items():
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,40}", name):
            msg = f"{source}: mcp.{name}: a name consists of 1 to 40 letters, digits, '_' and '-'"
            raise ConfigError(msg)
        if (server.command is None) == (server.url is None):
            msg = f"{source}: mcp.{name} must have either `command` (with `args`, `env`) or `url`"
            raise ConfigError(msg)
    return servers


def parse_skills(harness: str, option: Mapping[str, str] | None, folder: str) -> dict[str, str]:
    """Parse the option `skills`, texts of SKILL.md by name, to files below `folder`."""
    files = {}
    for name, text in (option or {}).items():
        where = f"harness {harness!r}: skills[{name!r}]"
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
            raise ConfigError(
                f"{where}: a name consists of lower-case letters and digits, in parts joined by '-'"
            )
        head = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL) if isinstance(text, str) else None
        if not head or not {"name", "description"} <= set(re.findall(r"(?m)^\w+", head[1])):
            raise ConfigError(
                f"{where} must be the text of a SKILL.md, which starts with '---', lines "
                "'name: ...' and 'description: ...', and '---'"
            )
        files[f"{folder}/{name}/SKILL.md"] = text
    return files


# --------------------------------------------------------------------- the first start
async def start_once(harness: Harness, runtime: Runtime | None = None) -> None:
    """Start a newly installed program, which must call its model; the call is refused.

    This detects a broken installation before any session, and fills the compile cache. Raises
    `HarnessError` with the program's last output. `runtime` is a `LocalRuntime` by default.
    """
    runtime = runtime or LocalRuntime()
    spec = SandboxSpec(mounts=harness.mounts)
    called = asyncio.Event()
    with tempfile.TemporaryDirectory(prefix="tugline-trial-") as folder:
        async with (
            _refuse_calls(harness.spent_status, called) as url,
            runtime.open(Path(folder), spec) as sandbox,
        ):
            context = LaunchContext(
                instruction="Say hello.",
                workdir=str(sandbox.workdir),
                home=str(sandbox.home),
                base_url=await sandbox.expose(url),
                key="trial",
                model="tugline-trial",
            )
            launch = harness.launch(context)
            await prepare(sandbox, launch)
            end = await sandbox.run(launch.argv, env=launch.env, timeout_s=_TRIAL_S)
    if not called.is_set():
        failure = "ran out of time" if end.timed_out else f"ended with exit code {end.code}"
        raise HarnessError(
            f"{harness.name} {harness.version} does not work on this machine: it {failure} "
            f"and made no model call: {' '.join(end.output.split())[-_TAIL:]}"
        )


def _refuse_calls(status: int, called: asyncio.Event) -> AbstractAsyncContextManager[str]:
    """Return an HTTP server that answers every request with `status`."""

    async def answer(scope: Message, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST":
            called.set()
        while (await receive()).get("more_body"):
            pass
        await Http(scope, receive, send).reply(status, _REFUSAL, {"connection": "close"})

    return serve(answer)
