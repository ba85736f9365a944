"""Arguments of each framework's script, the tool of its agent, and its report."""

import json
import sys

URL, KEY, API, HOW = sys.argv[1:]
"""Of the gateway; which of its APIs; ``whole`` or ``streamed``."""
_paths: list[str] = []


def read(path: str) -> str:
    """Read a file.

    Args:
        path: Where it is.
    """
    _paths.append(path)
    return f"{path} is there"


def report(text: str) -> None:
    """Write the last answer and what was read, on a line of its own."""
    print("\n" + json.dumps({"text": text, "read": _paths}))
