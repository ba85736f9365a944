"""Where this machine keeps what is made once: programs, images, bases, views."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """``$TUGLINE_CACHE``, else ``~/.cache/tugline``."""
    given = os.environ.get("TUGLINE_CACHE")
    return Path(given).expanduser().absolute() if given else Path.home() / ".cache" / "tugline"
