"""Run trusted scripts on an agent's work, and show it: what evaluators with a sandbox share.

`open_runner` opens a fresh sandbox and applies the task's files and the filtered patch; the
evaluator's own files come last, after anything that runs the agent's code. Scripts run until a
deadline, without network unless `allow_network` was called, and leave logs outside of the sandbox.
"""

import asyncio
import contextlib
import difflib
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

import msgspec

from tugline.evaluators.base import SessionOutcome
from tugline.evaluators.filters import FreshTree, Rules, apply_patch, filter_patch
from tugline.sandbox.base import Content, Exit, Sandbox
from tugline.sandbox.patch import Patch
from tugline.types import Workspace

TAIL = 2000
"""Bytes of a log that reports show."""
_LEAST_S = 1.0
_PATHS = ".paths"
_MAX_TREE = 32 << 20
"""Bytes of the paths of a fresh copy."""
_MAX_CHARACTERS = 1 << 20
"""Of a diff."""
_MAX_LINES = 2000
"""Of a file, before or after, that is shown in a diff."""
_MAX_FILES = 100
"""Files of a workspace whose old text is read."""
_MAX_FILE_BYTES = 256 << 10


class ScriptRunner:
    """Runs scripts in `sandbox` until the deadline of an evaluation."""

    def __init__(self, sandbox: Sandbox, deadline: float) -> None:
        """`deadline` is a time of `time.monotonic`."""
        self.sandbox, self.deadline = sandbox, deadline
        self.refused: dict[str, str] = {}
        """Paths of the patch that were not applied, each with the reason."""
        self.diff = ""
        """The whole patch, if it was requested."""

    async def run(
        self, argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float, log_name: str
    ) -> Exit:
        """Run a program for at most `timeout_s`, and until the deadline."""
        timeout_s = self.cap_timeout(timeout_s)
        return await self.sandbox.run(argv, env=env, timeout_s=timeout_s, log_name=log_name)

    def cap_timeout(self, timeout_s: float) -> float:
        """Return `timeout_s`, or the seconds until the deadline if that is nearer."""
        return min(timeout_s, max(self.deadline - time.monotonic(), _LEAST_S))

    async def read_log(self, log_name: str, *, head: int = 0, tail: int = TAIL) -> bytes:
        """Return the first `head` and the last `tail` bytes of a program's output."""
        return await asyncio.to_thread(self._read_log, log_name, head, tail)

    async def read_tail(self, log_name: str, size: int = TAIL) -> str:
        """Return the end of a program's output."""
        return (await self.read_log(log_name, tail=size)).decode(errors="replace")

    def _read_log(self, log_name: str, head: int, tail: int) -> bytes:
        with (self.sandbox.logs / f"{log_name}.log").open("rb") as log:
            size = log.seek(0, 2)
            log.seek(0)
            if size <= head + tail:
                return log.read()
            start = log.read(head)
            log.seek(size - tail)
            return start + (b"\n(cut here)\n" if head and tail else b"") + log.read(tail)


def start_deadline(outcome: SessionOutcome) -> float:
    """Return the time of `time.monotonic` at which an evaluation that begins now is over."""
    return time.monotonic() + outcome.timeout_s


@contextlib.asynccontextmanager
async def open_runner(
    outcome: SessionOutcome,
    rules: Rules,
    deadline: float,
    *,
    trusted: Mapping[str, Content] | None = None,
    env: Mapping[str, str] | None = None,
    with_diff: bool = False,
) -> AsyncIterator[ScriptRunner]:
    """Open a fresh sandbox with the agent's work in it.

    The caller puts `trusted`, the evaluator's own files, when all else is done. `env` is what the
    evaluator's programs will run with: it may say where they import from.
    """
    trusted = trusted or {}
    async with outcome.open_sandbox({}) as sandbox:
        workdir = sandbox.workdir
        runner = ScriptRunner(sandbox, deadline)
        fresh = await _inspect_tree(runner, outcome, env or {})
        rules = msgspec.structs.replace(
            rules, trusted=tuple(trusted) or rules.trusted, fresh=fresh, workdir=workdir
        )
        if with_diff:
            runner.diff = await diff_work(outcome, sandbox)
        patch, runner.refused = await asyncio.to_thread(filter_patch, outcome.patch, rules)
        work = apply_patch(outcome.task.files, patch, trusted)
        await sandbox.put(workdir, {p: text for p, text in work.items() if p not in trusted})
        # What is built is made anew: nothing that the agent added is newer than its source.
        new = [p for p, content in patch.files.items() if content and p not in fresh.files]
        if new:
            await _run_on_paths(runner, _MAKE_OLD, new, {})
        yield runner


# Workdirs and images have interpreters of their own; all tell what they could import.
_INSPECT = r"""
exec 2>/dev/null
xargs -0 sh -c 'for f; do if [ -e "$f" ] || [ -h "$f" ]
then printf "%s\0" "$f"; fi; done' sh < "$0"
find . -name .git -prune -o -name "*.py" -exec printf "%s\0" {} +
IFS=:
for d in $PATH /opt/*/bin /opt/*/envs/*/bin ./*/bin ./.*/bin
do if [ -x "$d/python3" ]; then "$d/python3" -B -c "$1"
elif [ -x "$d/python" ]; then "$d/python" -B -c "$1"; fi
done
"""
_LIST_MODULES = r"""
import os, sys
top = os.path.realpath('.') + os.sep
for folder in filter(None, sys.path):
    inside = (os.path.realpath(folder) + os.sep).startswith(top)
    if inside and 'site-packages' not in folder:
        sys.stdout.write('root:%s\0' % os.path.relpath(folder))
    elif os.path.isdir(folder):
        for name in os.listdir(folder):
            sys.stdout.write('module:%s\0' % name.partition('.')[0])
"""
_MAKE_OLD = 'xargs -0 touch -h -t 199001010000 < "$0"'
_LOOK_S = 60.0


async def _run_on_paths(
    runner: ScriptRunner, script: str, paths: Iterable[str], env: Mapping[str, str], *args: str
) -> None:
    """Run a script in the workdir; ``$0`` is a file of `paths`, each with a NUL at its end."""
    home = runner.sandbox.home
    await runner.sandbox.put(home, {_PATHS: "".join(f"{path}\0" for path in paths)})
    argv = ("sh", "-c", script, str(home / _PATHS), *args)
    env = {**env, "HOME": str(home)}
    await runner.run(argv, env=env, timeout_s=_LOOK_S, log_name="paths")
    await runner.sandbox.put(home, {_PATHS: None})


async def _inspect_tree(
    runner: ScriptRunner, outcome: SessionOutcome, env: Mapping[str, str]
) -> FreshTree:
    """Look at a fresh copy before the agent's work is put there."""
    if not outcome.patch.files:
        return FreshTree()
    await _run_on_paths(runner, _INSPECT, outcome.patch.files, env, _LIST_MODULES)
    output = (await runner.read_log("paths", head=_MAX_TREE, tail=0)).decode(errors="replace")
    names: dict[str, set[str]] = {"root": set(), "module": set(), "": set(outcome.task.files)}
    for entry in output.split("\0"):
        kind, _, name = entry.partition(":")
        path = name if kind in names else entry.removeprefix("./")
        names[kind if kind in names else ""].add(path)
    return FreshTree(*(frozenset(names[kind]) for kind in ("", "module", "root")))


async def allow_network(sandbox: Sandbox) -> None:
    """Let programs reach the hosts that the runtime allows.

    A sandbox forwards those only once some address is exposed to it.
    """
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        await sandbox.expose(f"http://127.0.0.1:{port}")


# --------------------------------------------------------------------------- diffs
def has_base(workspace: Workspace) -> bool:
    """Return whether there are files besides those that a task brings along."""
    return any((workspace.image, workspace.build, workspace.repo, workspace.folder))


async def diff_work(outcome: SessionOutcome, sandbox: Sandbox | None) -> str:
    """Return the diff of an agent's work; `sandbox` has the workspace as it was, if any."""
    before = dict(outcome.task.files)
    if sandbox is not None and has_base(outcome.task.workspace):
        for path in [path for path in outcome.patch.files if path not in before][:_MAX_FILES]:
            data = await sandbox.get(sandbox.workdir / path, max_bytes=_MAX_FILE_BYTES)
            if data is not None:
                before[path] = data.decode(errors="replace")
    return await asyncio.to_thread(format_patch, before, outcome.patch)


def format_patch(before: Mapping[str, str], patch: Patch) -> str:
    """Return a unified diff of a patch, followed by its notes."""
    parts: list[str] = []
    size = 0
    for path, change in sorted(patch.files.items()):
        text = "" if change is None else change.text
        if text is None:
            parts.append(f"{path}: not text\n")
            continue
        if size > _MAX_CHARACTERS:
            parts.append(f"{path}: not shown, there is too much before it\n")
            continue
        old = before.get(path, "").splitlines(keepends=True)
        new = text.splitlines(keepends=True)
        if max(len(old), len(new)) > _MAX_LINES:
            parts.append(f"{path}: {len(old)} lines became {len(new)}; too long to show\n")
            continue
        names = (
            "/dev/null" if path not in before else f"a/{path}",
            "/dev/null" if change is None else f"b/{path}",
        )
        diff = "".join(
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
            for line in difflib.unified_diff(old, new, *names)
        )
        parts.append(diff)
        size += len(diff)
    return "".join(parts) + "".join(f"# {note}\n" for note in patch.notes)
