"""Several nodes on one machine: each a process of its own with its own gateway.

A node is one Python process: its agents and tools may use all processors, its gateway only one. So
a machine with many processors runs several nodes. They are started, watched and drained together,
and share nothing: each has its sessions, recordings and folder. A node that dies is started again
under its name, and the server runs its sessions again.
"""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from tugline import log
from tugline.atomic import write_file
from tugline.errors import UsageError
from tugline.launch.programs import keep_program
from tugline.launch.settings import Echo, Settings, encode_path

NODES = "nodes"
"""Folder of the nodes' folders, and of their settings if they are processes of their own."""
_CORES = 16
"""Processors per node; the gateway for agents on 16 processors uses about half of one."""


def count_nodes(settings: Settings) -> int:
    """Return the number of nodes for ``node.processes``. Raises `UsageError` for too few slots."""
    wanted = settings.node.processes
    if wanted == "auto":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        return max(1, min((cores or 1) // _CORES, settings.node.slots))
    count = wanted or 1
    if settings.node.slots < count:
        msg = f"node.slots is {settings.node.slots}, must be at least node.processes ({count})"
        raise UsageError(msg)
    return count


def divide(settings: Settings, name: str) -> list[Settings]:
    """Return the settings of each node: its name, and its share of slots, disk and ports."""
    count = count_nodes(settings)
    return [_settings_of(settings, name, number, count) for number in range(count)]


def _settings_of(settings: Settings, name: str, number: int, count: int) -> Settings:
    node, gateway = settings.node, settings.gateway
    slots = node.slots // count + (number < node.slots % count)
    own = replace(
        node,
        name=f"{name}-{number + 1}",
        processes=None,
        slots=slots,
        quota_gb=node.quota_gb / count,
        metrics_port=node.metrics_port and node.metrics_port + number,
    )
    port = gateway.port and gateway.port + number
    return replace(settings, node=own, gateway=replace(gateway, port=port))


async def keep_nodes(
    nodes: Sequence[Settings],
    folder: Path,
    server: str,
    token: str,
    stopped: asyncio.Event,
    echo: Echo,
) -> None:
    """Keep a node of `server` running for each of `nodes`, in `folder`, until `stopped`.

    The nodes then drain; when cancelled, they end at once. Their engine must have a URL. Raises
    `UsageError` if a node refuses its settings; the others end.
    """
    try:
        async with asyncio.TaskGroup() as group:
            for settings in nodes:
                name = settings.node.name
                arguments = await asyncio.to_thread(_write_settings, settings, folder)
                command = ("node", "--server", server, "--dir", str(folder), *arguments)
                env = {"TUGLINE_JOIN_TOKEN": token}
                keeping = keep_program(f"node {name}", command, env, stopped, echo)
                group.create_task(keeping, name=f"keep-{name}")
    except* UsageError as refused:
        raise refused.exceptions[0] from None


def _write_settings(settings: Settings, folder: Path) -> tuple[str, ...]:
    """Write the settings of a node; return the options with which it reads them and logs."""
    name = settings.node.name
    file = folder / NODES / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    tables = {"node": settings.node, "gateway": settings.gateway, "engine": settings.engine}
    write_file(file, msgspec.json.encode(tables, enc_hook=encode_path), 0o600)
    path = log.configured.get("path")
    if path is None:
        return ("--config", str(file))
    return ("--config", str(file), "--log", str(path.with_name(f"{path.stem}-{name}{path.suffix}")))
