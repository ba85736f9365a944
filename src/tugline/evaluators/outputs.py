"""Bring what `setup` made of the agent's work into a sandbox where no program of it has run.

`setup` runs the agent's code, which may leave anything: tests and settings of its own in the
workdir, programs and modules outside of it. So the tests run in another sandbox, in which `setup`
ran on the task's original files. Of the first sandbox it gets the workdir's files, filtered like
the agent's own; at refused paths, and outside of the workdir, it keeps those of its own `setup`.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from tugline.evaluators.filters import filter_patch
from tugline.evaluators.guard import LIMITS
from tugline.evaluators.script import ScriptRunner, inspect_tree, put_work, run_on_paths
from tugline.patch import FileChange, Patch
from tugline.sandbox.base import Content

_MAX_NAMED = 50
"""Maximum number of paths named in a report."""
_MAKE_NEW = 'xargs -0 -r touch -c -h < "$0"'
_OTHER = object()


async def copy_outputs(
    work: ScriptRunner,
    judge: ScriptRunner,
    before: Mapping[str, str],
    trusted: Mapping[str, Content],
    env: Mapping[str, str],
    setup: object,
) -> dict[str, Any]:
    """Put the permitted work and outputs of `setup` into `judge`'s sandbox; return report entries.

    `before` are the task's files, `env` is the environment of the tests. The caller must write
    `trusted` afterwards.
    """
    made = await work.sandbox.diff(LIMITS)
    own = await judge.sandbox.diff(LIMITS)
    known = await inspect_tree(judge, made.files, env, setup)
    original = work.rules.fresh
    fresh = known._replace(files=original.files, settings=original.settings)
    rules = msgspec.structs.replace(work.rules.permit_built(), fresh=fresh)
    permitted, refused = await asyncio.to_thread(filter_patch, made, rules)
    await put_work(judge, work, before, trusted)
    present = {**own.files, **work.patch.files}
    files: dict[str, Content] = {
        path: change
        for path, change in permitted.files.items()
        if present.get(path, _OTHER) != change
    }
    complete = bool(made.files or not made.notes)
    only_own = Patch({p: c for p, c in own.files.items() if complete and p not in made.files})
    permitted_own, _ = await asyncio.to_thread(filter_patch, only_own, rules)
    for path, change in permitted_own.files.items():
        if path not in work.patch.files:
            files[path] = await _read_unchanged(work, path, change)
    await judge.sandbox.put(judge.sandbox.workdir, files)
    judge.present |= {*own.files, *files}
    # Build tools must not take a test program of the first sandbox for an up-to-date one.
    protected = await asyncio.to_thread(rules.list_protected)
    await run_on_paths(judge, "dates", _MAKE_NEW, protected)
    names = {path: why for path, why in refused.items() if made.files[path] != own.files.get(path)}
    report = {
        "setup_refused": dict(list(names.items())[:_MAX_NAMED]),
        "setup_left_out": list(made.notes),
    }
    return {key: value for key, value in report.items() if value}


async def _read_unchanged(work: ScriptRunner, path: str, own: FileChange | None) -> Content:
    """Return a file that only the original's `setup` changed, as it is in `work`'s sandbox."""
    data = await work.sandbox.get(work.sandbox.workdir / path, max_bytes=LIMITS.file_bytes)
    return None if data is None else FileChange(data, executable=own is None or own.executable)
