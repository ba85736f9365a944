"""The process that places nodes on a Ray cluster, kept running beside the server.

It is a separate process, since Ray aborts a process whose cluster is lost.
"""

import asyncio
from pathlib import Path

import msgspec

from tugline.atomic import write_file
from tugline.launch.programs import keep_program
from tugline.launch.settings import Echo, Settings, encode_path
from tugline.launch.tokens import load_tokens

CLUSTER = "cluster.json"
"""File with the settings of a cluster's nodes."""


async def keep_cluster(
    settings: Settings, folder: Path, url: str, stopped: asyncio.Event, echo: Echo
) -> None:
    """Keep ``tugline node --cluster ray`` running for the server at `url`, until `stopped`.

    It drains all nodes at the end. Raises `UsageError` if it cannot place them.
    """
    data = msgspec.json.encode(settings, enc_hook=encode_path)
    write_file(folder / CLUSTER, data, 0o600)
    tokens = load_tokens(folder)
    env = {"TUGLINE_JOIN_TOKEN": tokens.join, "TUGLINE_TOKEN": tokens.read}
    config = str(folder / CLUSTER)
    arguments = ("node", "--cluster", "ray", "--server", url, "--config", config)
    await keep_program("the process that places nodes", arguments, env, stopped, echo)
