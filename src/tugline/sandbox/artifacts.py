"""An agent's own log, taken out of its home once it has ended.

The home is hostile ground: only regular files are read, no link is followed, and how much is looked
at and copied has a bound. What is kept lies beside the log of its output, under the same paths.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from tugline.sandbox import files
from tugline.sandbox.patch import strange

FOLDER = "home"
"""In the folder of a box's logs."""
_ENTRIES = 20_000
_FILE = 64 << 20
_ALL = 256 << 20


def keep(home: Path, patterns: Sequence[str], logs: Path) -> tuple[str, ...]:
    """Copy regular files below `home` that match into ``<logs>/home``; returns their paths.

    A pattern is a relative POSIX path with ``*`` within a name and ``**`` for any folders. Files
    over 64 MiB, those beyond 256 MiB in all and those with strange names are left. Blocks. Raises
    as `files.put` does.
    """
    wanted = re.compile("|".join(map(_regex, patterns)) or r"(?!)")
    kept: list[str] = []
    left = _ALL
    for path in _paths(home) if home.is_dir() else ():
        if wanted.fullmatch(path) is None or strange(path) is not None:
            continue
        data = files.get(home, path, min(_FILE, left))
        if data is not None:
            (logs / FOLDER).mkdir(exist_ok=True)
            files.put(logs / FOLDER, {path: data})
            kept.append(path)
            left -= len(data)
    return tuple(kept)


def _paths(home: Path) -> Iterator[str]:
    seen = 0
    for folder, folders, names in os.walk(home):
        folders.sort()
        for name in sorted(names):
            yield os.path.relpath(os.path.join(folder, name), home)  # noqa: PTH118 - quicker
        seen += len(folders) + len(names)
        if seen > _ENTRIES:
            return


def _regex(pattern: str) -> str:
    parts = re.split(r"(\*\*/|\*)", pattern)
    means = {"**/": "(?:.*/)?", "*": "[^/]*"}
    return "".join(means.get(part, re.escape(part)) for part in parts)
