"""Install and run third-party clients, with the answers that they get."""

import asyncio
import hashlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tugline.harnesses.install import install_once, run_installer
from tugline.harnesses.npm import find_node
from tugline.sandbox.cache import cache_folder
from tugline.types import Call

CALLS = "".join(
    f'<tool_call>\n{{"name": "read", "arguments": {{"path":  "{path}"}}}}\n</tool_call>\n'
    for path in ("a.py", "b.py")
).rstrip()
"""Two parallel tool calls as the model writes them, with a space that JSON does not need."""
THINKS = f"<think>\nHm, ä. It is a file.\n</think>\n\nI look.\n{CALLS}"


def exact(calls: Sequence[Call]) -> bool:
    """Whether each call's prompt begins with all ids of the call before it."""
    return all(
        np.array_equal(after.prompt_ids[: len(whole)], whole)
        for before, after in itertools.pairwise(calls)
        for whole in [np.concatenate((before.prompt_ids, before.sampled_ids))]
    )


async def install(kind: str, packages: bytes, *command: str | Path) -> Path:
    """Install these packages with a command, on first use; return their folder."""
    folder = cache_folder() / kind / hashlib.sha256(packages).hexdigest()[:12]

    async def fill(fresh: Path) -> None:
        (fresh / "package.json").write_text("{}")  # where npm installs
        print(f"installing {kind}, once ...", file=sys.__stderr__, flush=True)
        await run_installer(f"{kind} could not be installed", *map(str, command), cwd=fresh)

    folder.parent.mkdir(parents=True, exist_ok=True)
    await install_once(folder, fill)
    return folder


async def install_from_npm(kind: str, packages: Sequence[str]) -> Path:
    """Install npm packages on first use, without their install scripts; return their folder."""
    _, npm = find_node()
    options = ("--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error")
    names = " ".join(packages).encode()
    return await install(kind, names, *npm, "install", *options, *packages)


async def run_on_node(kind: str, packages: Sequence[str], script: Path, *arguments: str) -> Any:
    """Run a JavaScript program, whose first argument is the folder with its packages."""
    folder = await install_from_npm(kind, packages)
    return await run([find_node()[0], script, folder, *arguments])


async def run(argv: Sequence[str | Path], **env: str) -> Any:
    """Run a program and return the JSON in the last line of its output."""
    known = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    done = await asyncio.to_thread(
        subprocess.run,
        argv,
        env={**known, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
