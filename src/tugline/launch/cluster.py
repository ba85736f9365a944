"""The process that places nodes on a Ray cluster, kept running beside the server.

It is a separate process, since Ray aborts a process whose cluster is lost.
"""

import asyncio
import contextlib
import os
import sys
from pathlib import Path

import msgspec

from tugline.atomic import write_file
from tugline.errors import UsageError
from tugline.launch.settings import Echo, Settings
from tugline.server.http.route import Tokens

CLUSTER_AGAIN_S = 5.0
"""Pause before the process that places nodes on a cluster is restarted, in seconds."""
CLUSTER = "cluster.json"
"""File with the settings of a cluster's nodes."""
DIES_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")
"""Prefix of the command of a program that is killed when this process ends."""


async def keep_nodes(
    settings: Settings, folder: Path, url: str, tokens: Tokens, stopped: asyncio.Event, echo: Echo
) -> None:
    """Keep ``tugline node --cluster ray`` running for the server at `url`, until `stopped`.

    It drains all nodes at the end. Raises `UsageError` if it cannot place them.
    """
    data = msgspec.json.encode(settings, enc_hook=encode_path)
    write_file(folder / CLUSTER, data, 0o600)
    env = {**os.environ, "TUGLINE_JOIN_TOKEN": tokens.join, "TUGLINE_TOKEN": tokens.read}
    command = [*DIES_WITH_PARENT, sys.executable, "-m", "tugline.cli.app", "node"]
    command += ["--cluster", "ray", "--server", url, "--config", str(folder / CLUSTER)]
    while not stopped.is_set():
        program = await asyncio.create_subprocess_exec(*command, env=env, start_new_session=True)
        ended = asyncio.ensure_future(program.wait())
        stop = asyncio.ensure_future(stopped.wait())
        await asyncio.wait({ended, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if stopped.is_set():
            with contextlib.suppress(ProcessLookupError):
                program.terminate()
            echo("draining: running sessions may finish; stop again to end at once")
            await ended
        elif await ended == 2:
            raise UsageError("the nodes cannot be placed, for the reason above")
        else:
            echo(f"the process that places nodes ended with code {await ended}; it starts again")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), CLUSTER_AGAIN_S)


def encode_path(path: Path) -> str:
    """Convert a path of the settings to an absolute one for other processes and machines."""
    return str(path.absolute())
