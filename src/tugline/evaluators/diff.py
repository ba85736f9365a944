"""Patches as people read them. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from tugline.sandbox.patch import Patch, PatchLimits

_LONGEST = 1 << 20
"""Characters after which nothing more is shown."""


def unified(before: Mapping[str, str], patch: Patch, limits: PatchLimits | None = None) -> str:
    """The patch as people read it, ending with its notes."""
    limits = limits or PatchLimits()
    parts: list[str] = []
    size = 0
    for path, change in sorted(patch.files.items()):
        text = "" if change is None else change.text
        if text is None:
            parts.append(f"{path}: not text\n")
            continue
        if size > _LONGEST:
            parts.append(f"{path}: not shown, there is too much before it\n")
            continue
        old = before.get(path, "").splitlines(keepends=True)
        new = text.splitlines(keepends=True)
        if max(len(old), len(new)) > limits.diff_lines:
            parts.append(f"{path}: {len(old)} lines became {len(new)}; too long to show\n")
            continue
        names = (
            "/dev/null" if path not in before else f"a/{path}",
            "/dev/null" if change is None else f"b/{path}",
        )
        shown = "".join(
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
            for line in difflib.unified_diff(old, new, *names)
        )
        parts.append(shown)
        size += len(shown)
    return "".join(parts) + "".join(f"# {note}\n" for note in patch.notes)
