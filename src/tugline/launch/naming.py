"""Name of the run in a folder, unique among all runs of a server."""

import re
import secrets
from pathlib import Path

from tugline.atomic import read_or_make

_NAME = "name"
"""File with the unique part of the name."""


def name_run(folder: Path) -> str:
    """Return the name of the run in `folder`, which is unique and stays the same."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", folder.absolute().name)[:100]
    return f"{name}-{make_prefix(folder).rstrip('.')}"


def make_prefix(folder: Path) -> str:
    """Return a unique prefix of task ids, stored in `folder` so that a resumed run keeps it."""
    return read_or_make(folder / _NAME, lambda: f"{secrets.token_hex(4)}.")


def is_run(folder: Path) -> bool:
    """Whether `folder` is that of a run, with a server of its own."""
    return (folder / _NAME).exists()
