"""Patches for people, and patches laid over a task's own files. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import PurePosixPath

from tugline.runtimes.base import Content
from tugline.runtimes.patch import Caps, Patch


def unified(before: Mapping[str, str], patch: Patch, caps: Caps | None = None) -> str:
    """The patch as people read it, ending with its notes."""
    caps = caps or Caps()
    parts: list[str] = []
    for path, change in sorted(patch.files.items()):
        text = "" if change is None else change.text
        if text is None:
            parts.append(f"{path}: not text\n")
            continue
        old = before.get(path, "").splitlines(keepends=True)
        new = text.splitlines(keepends=True)
        if max(len(old), len(new)) > caps.diff_lines:
            parts.append(f"{path}: {len(old)} lines became {len(new)}; too long to show\n")
            continue
        names = (
            "/dev/null" if path not in before else f"a/{path}",
            "/dev/null" if change is None else f"b/{path}",
        )
        parts += [
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
            for line in difflib.unified_diff(old, new, *names)
        ]
    return "".join(parts) + "".join(f"# {note}\n" for note in patch.notes)


def applied(
    before: Mapping[str, str], patch: Patch, trusted: Mapping[str, str]
) -> tuple[dict[str, Content], tuple[str, ...]]:
    """`before` with the patch, and `trusted` over all; also the paths that had to give way.

    A path gives way when it would stand where a trusted file's folder must be, or the reverse.
    """
    result: dict[str, Content] = dict(trusted)
    gave_way: list[str] = []
    folders = {str(parent) for path in trusted for parent in PurePosixPath(path).parents}
    for path, content in {**before, **patch.files}.items():
        if content is None or path in trusted:
            continue
        if path in folders or any(str(up) in result for up in PurePosixPath(path).parents):
            gave_way.append(path)
            continue
        result[path] = content
        folders |= {str(parent) for parent in PurePosixPath(path).parents}
    return result, tuple(gave_way)
