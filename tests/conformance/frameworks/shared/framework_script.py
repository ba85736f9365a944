"""The tool of each framework's agent, and the runs of its script."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable

_paths: list[str] = []


def read(path: str) -> str:
    """Read a file.

    Args:
        path: Where it is.
    """
    _paths.append(path)
    return f"{path} is there"


def run(main: Callable[..., Awaitable[str]]) -> None:
    """Run `main(url, key, api, streamed=...)` for every session in the JSON of the first argument.

    Writes the last answers and what was read, as JSON on the last line.
    """

    async def run_all() -> list[dict[str, object]]:
        reports: list[dict[str, object]] = []
        for url, key, api, streamed in json.loads(sys.argv[1]):
            _paths.clear()
            text = await main(url, key, api, streamed=streamed)
            reports.append({"text": text, "read": [*_paths]})
        return reports

    print("\n" + json.dumps(asyncio.run(run_all())))
