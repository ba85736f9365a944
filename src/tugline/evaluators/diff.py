"""Patches as people read them. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

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
