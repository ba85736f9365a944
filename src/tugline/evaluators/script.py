"""Run trusted scripts on an agent's work and show its changes, for evaluators with a sandbox.

`open_runner` opens a fresh sandbox and applies the task's files and the filtered patch; the caller
adds the evaluator's own files last, after all steps that run the agent's code. Scripts run until a
deadline, without network unless `allow_network` was called, and write logs outside of the sandbox.
"""

import asyncio
import contextlib
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

import msgspec

from tugline.errors import EvaluatorError, SandboxError
from tugline.evaluators.base import SessionOutcome
from tugline.evaluators.filters import FreshTree, Rules, apply_patch, filter_patch
from tugline.evaluators.pytest_settings import PYTEST_CONFIGS
from tugline.patch import Patch, format_patch
from tugline.sandbox.base import Content, Exit, ProgramTimeout, Sandbox
from tugline.sandbox.files import read_ends
from tugline.sandbox.processes import run_command

TAIL = 2000
"""Size of the end of a program's output that reports show."""
FAILURE_TAIL = 300
"""Size of the end of a program's output that an error shows."""
_LEAST_S = 1.0
_PATHS = ".paths"
_PROGRAM = ".inspect.py"
_NAMES = ".inspect.names"
_MAX_TREES = 200
_MAX_ASKED = 2000
_MAX_TREE = 32 << 20
"""Maximum bytes read of the list of a fresh copy's paths."""
_MAX_FILES = 100
"""Maximum number of workspace files that are read for a diff."""
_MAX_FILE_BYTES = 256 << 10


class ScriptRunner:
    """Runs scripts in `sandbox` until the deadline of an evaluation."""

    def __init__(self, sandbox: Sandbox, outcome: SessionOutcome) -> None:
        self.sandbox = sandbox
        self._deadline = outcome.began + outcome.timeout_s
        self._limit = outcome.limit
        self.workspace = outcome.task.workspace
        self.refused: dict[str, str] = {}
        """Paths of the patch that were not applied, with reasons."""
        self.diff = ""
        """The whole patch as text; empty unless it was requested."""
        self.rules = Rules()
        """The rules by which the patch was filtered."""
        self.patch = Patch()
        """What the rules permit."""
        self.present: set[str] = set()
        """Paths of the files in the workdir, as far as they are known."""

    async def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        log_name: str,
        env: Mapping[str, str] = MappingProxyType({}),
    ) -> Exit:
        """Run a program for at most `timeout_s` and not beyond the deadline.

        The time for which it waits for a processor is not charged: see `ProgramTimeout`.
        """
        limit_s = min(timeout_s, max(self._deadline - time.monotonic(), _LEAST_S))
        timeout = ProgramTimeout(limit_s, self._limit)
        end = await self.sandbox.run(argv, env=env, timeout_s=timeout, log_name=log_name)
        self._deadline += timeout.waited_s
        return end

    async def read_log(self, log_name: str, *, head: int = 0, tail: int = TAIL) -> bytes:
        """Return the first `head` and the last `tail` bytes of a program's output."""
        path = self.sandbox.logs / f"{log_name}.log"
        cut = b"\n(cut here)\n" if head else b""
        return await asyncio.to_thread(read_ends, path, head, tail, cut if tail else b"")


@contextlib.asynccontextmanager
async def open_runner(
    outcome: SessionOutcome,
    rules: Rules,
    *,
    trusted: Mapping[str, Content] | None = None,
    env: Mapping[str, str] | None = None,
    with_diff: bool = False,
) -> AsyncIterator[ScriptRunner]:
    """Open a fresh sandbox with the agent's work in it.

    The caller must write `trusted`, the evaluator's own files, as the last step. `env` is the
    environment of the evaluator's programs, which may change their module search path.
    """
    trusted = trusted or {}
    async with outcome.open_sandbox({}) as sandbox:
        workdir = sandbox.workdir
        runner = ScriptRunner(sandbox, outcome)
        fresh = FreshTree()
        if outcome.patch.files:
            fresh = await inspect_tree(runner, outcome.patch.files, env or {})
            settings = await _read_settings(sandbox, outcome)
            files = fresh.files | set(outcome.task.files)
            fresh = fresh._replace(files=files, settings=settings)
        runner.rules = msgspec.structs.replace(
            rules, trusted=tuple(trusted) or rules.trusted, fresh=fresh, workdir=workdir
        )
        if with_diff:
            runner.diff = await diff_work(outcome, sandbox)
        runner.patch, runner.refused = await asyncio.to_thread(
            filter_patch, outcome.patch, runner.rules
        )
        await put_work(runner, runner, outcome.task.files, trusted)
        yield runner


async def put_work(
    runner: ScriptRunner,
    work: ScriptRunner,
    before: Mapping[str, str],
    trusted: Mapping[str, Content],
) -> None:
    """Apply the permitted patch of `work` to the task's files in the sandbox of `runner`."""
    merged = apply_patch(before, work.patch, trusted)
    files = {path: content for path, content in merged.items() if path not in trusted}
    await runner.sandbox.put(runner.sandbox.workdir, files)
    runner.present |= work.rules.fresh.files | set(files)
    # Make added files and changed binaries older than their sources, so that build tools do
    # not take them for up-to-date results.
    known = work.rules.fresh.files
    changes = [(path, change) for path, change in work.patch.files.items() if change]
    built = [path for path, change in changes if path not in known or change.text is None]
    if built:
        await run_on_paths(runner, "dates", _MAKE_OLD, built)


async def _read_settings(sandbox: Sandbox, outcome: SessionOutcome) -> dict[str, str]:
    """Return the fresh texts of files that may configure pytest, by path."""
    changed = (path for path in outcome.patch.files if PurePosixPath(path).name in PYTEST_CONFIGS)
    settings = {}
    for path in {*PYTEST_CONFIGS, *changed}:
        data = await sandbox.get(sandbox.workdir / path, max_bytes=_MAX_FILE_BYTES)
        text = outcome.task.files.get(path) or (data and data.decode(errors="replace"))
        if text:
            settings[path] = text
    return settings


# Workdirs and images have interpreters of their own, each with its own importable modules.
_INSPECT = Path(__file__).with_name("inspect_tree.sh").read_text(encoding="utf-8")
_INSPECT_PYTHON = Path(__file__).with_name("inspect_python.py").read_text(encoding="utf-8")
_MAKE_OLD = 'xargs -0 touch -h -t 199001010000 < "$0"'
_LOOK_S = 60.0


async def run_on_paths(
    runner: ScriptRunner,
    name: str,
    script: str,
    paths: Iterable[str],
    *args: str,
    env: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Run a script in the workdir; ``$0`` is a file of `paths`, each terminated by NUL.

    They begin with ``./``: an agent chose them, and none must be an option or ``-``. The output is
    the log `name`. Raises `SandboxError` if the script fails.
    """
    home = runner.sandbox.home
    await runner.sandbox.put(home, {_PATHS: "".join(f"./{path}\0" for path in paths)})
    argv = ("sh", "-c", script, str(home / _PATHS), *args)
    end = await runner.run(argv, env=env, timeout_s=_LOOK_S, log_name=name)
    if end.code or end.timed_out:
        ending = "time limit reached" if end.timed_out else f"exit code {end.code}"
        output = end.output[-FAILURE_TAIL:].strip()
        raise SandboxError(f"the agent's files cannot be prepared ({ending}): {output}")
    await runner.sandbox.put(home, {_PATHS: None})


async def inspect_tree(
    runner: ScriptRunner, paths: Iterable[str], env: Mapping[str, str], setup: object = None
) -> FreshTree:
    """Inspect a tree to which no work is applied yet; `paths` are those of changes.

    What its interpreters do with a new name is asked once for each workspace and `env`, and after
    each `setup` of it.
    """
    known = _ASKED.get((runner.workspace, tuple(sorted(env.items())), setup))
    home = runner.sandbox.home
    await runner.sandbox.put(home, {_PROGRAM: _INSPECT_PYTHON, _NAMES: "\0".join(known)})
    program = str(home / _PROGRAM)
    await run_on_paths(runner, "tree", _INSPECT, paths, program, env=env)
    await runner.sandbox.put(home, {_PROGRAM: None, _NAMES: None})
    data = await runner.read_log("tree", head=_MAX_TREE, tail=0)
    if len(data) >= _MAX_TREE:
        raise EvaluatorError(f"the list of the task's files exceeds {_MAX_TREE >> 20} MB")
    kinds = ("module", "root", "wanted", "prefix", "asked")
    names: dict[str, set[str]] = {kind: set() for kind in kinds}
    files: set[str] = set()
    for entry in data.decode(errors="replace").split("\0"):
        kind, _, name = entry.partition(":")
        if kind in names:
            names[kind].add(name)
        else:
            files.add(entry.removeprefix("./"))
    known |= {name: name in names["wanted"] for name in names["asked"]}
    return FreshTree(
        files=frozenset(files),
        modules=frozenset(names["module"]),
        import_roots=frozenset(names["root"]),
        wanted=frozenset(name for name, wanted in known.items() if wanted),
        interpreters=frozenset(names["prefix"]),
    )


class _AskedNames:
    """What was asked about names before; the trees that were inspected last are kept."""

    def __init__(self) -> None:
        self._by_tree: OrderedDict[object, dict[str, bool]] = OrderedDict()

    def get(self, tree: object) -> dict[str, bool]:
        """Return whether a program of `tree` imports a name, by the names that were asked."""
        known = self._by_tree.setdefault(tree, {})
        if len(known) > _MAX_ASKED:  # a new one: another inspection may still use the old one
            known = self._by_tree[tree] = {}
        self._by_tree.move_to_end(tree)
        if len(self._by_tree) > _MAX_TREES:
            self._by_tree.popitem(last=False)
        return known


_ASKED = _AskedNames()


async def allow_network(sandbox: Sandbox) -> None:
    """Enable access to the hosts that the runtime allows.

    A sandbox opens its proxy only when a server is exposed, so expose one that answers nothing.
    """
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        await sandbox.expose(f"http://127.0.0.1:{port}")


# --------------------------------------------------------------------------- foreign output
_PARSE_S = 60
"""Processor seconds for parsing an output."""
_PARSE_WALL_S = 600.0
"""Seconds for parsing an output."""
_PARSE_BYTES = 2 << 30
"""Bytes of memory for parsing an output."""
_PARSE = f"""
import json, resource, sys
limit = resource.getpagesize() * int(open("/proc/self/statm").read().split()[0]) + {_PARSE_BYTES}
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[2]), int(sys.argv[2]) + 1))
path = sys.argv[1]
given = json.load(open(path + ".given"))
"""


async def parse_apart(code: str, data: bytes, given: Any, cpu_s: int = _PARSE_S) -> Any:
    """Run Python `code` on untrusted `data` in a separate process with limits.

    The code reads the JSON value `given` and the data at `path`, and writes its result to
    ``path + ".out"``, which is returned as bytes. Malicious data can only crash or slow that
    process. Raises `ValueError` if it exceeds `cpu_s` or the memory, or fails.
    """
    with tempfile.TemporaryDirectory(prefix="tugline-parse-") as name:
        path = Path(name) / "data"
        await asyncio.to_thread(path.write_bytes, data)
        path.with_name("data.given").write_bytes(msgspec.json.encode(given))
        argv = (sys.executable, "-P", "-c", _PARSE + code, str(path), str(cpu_s))
        try:
            end, _, errors = await run_command(argv, timeout_s=_PARSE_WALL_S)
        except TimeoutError as error:
            raise EvaluatorError(f"parsing an output took more than {_PARSE_WALL_S:g} s") from error
        if end < 0:
            raise ValueError(f"parsing the output took more than {cpu_s} s of CPU time")
        if end:
            raise ValueError(f"the output cannot be parsed: {errors[-TAIL:].strip()}")
        return await asyncio.to_thread(path.with_name("data.out").read_bytes)


# --------------------------------------------------------------------------- diffs
async def diff_work(outcome: SessionOutcome, sandbox: Sandbox | None) -> str:
    """Return the diff of an agent's work; `sandbox`, if any, has the unchanged workspace."""
    before = dict(outcome.task.files)
    if sandbox is not None and outcome.task.workspace.has_base:
        for path in [path for path in outcome.patch.files if path not in before][:_MAX_FILES]:
            data = await sandbox.get(sandbox.workdir / path, max_bytes=_MAX_FILE_BYTES)
            if data is not None:
                before[path] = data.decode(errors="replace")
    return await asyncio.to_thread(format_patch, before, outcome.patch)
