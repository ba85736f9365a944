"""``tugline up``: rollout server, node and engine; for runs, their console only."""

import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from tugline.cli.node_options import DEFAULT_NODE, NodeOptions, Processes, add_default_engine
from tugline.cli.options import DATA, Folder
from tugline.cli.output import echo
from tugline.cli.process import keep_running
from tugline.errors import UsageError
from tugline.launch.naming import is_run
from tugline.launch.server import STORE, run_server
from tugline.launch.settings import Settings
from tugline.launch.tokens import is_local


def up(
    *,
    folder: Folder = DATA,
    host: str | None = None,
    port: int | None = None,
    store: str | None = None,
    name: str | None = None,
    nodes: Processes = None,
    no_node: bool = False,
    cluster: Literal["ray"] | None = None,
    local: NodeOptions = DEFAULT_NODE,
) -> None:
    """Start server, node and engine, and run submitted tasks until stopped.

    Args:
        host: Address that the API listens on.
        port: Port of the API; 0 for a free port.
        store: Database, postgresql://... (default: a file in --dir).
        name: Name of the node (default: the machine's).
        nodes: Nodes on this machine, each a process of its own (default: one, in this process).
        no_node: Start only the server, for nodes on other machines.
        cluster: Run a node on each machine of this cluster, and none in this process.
    """
    server_flags = {"host": host, "port": port, "store": store}
    settings = local.load(server=server_flags, name=name, processes=nodes)
    if nodes is not None and (no_node or cluster):
        raise UsageError("--nodes starts nodes on this machine: omit --no-node and --cluster")
    if not is_local(settings.server.host) and settings.server.tls is None:
        echo(
            f"the API will listen on {settings.server.host} without TLS: tokens and results can be"
            " read in transit; give server.tls_cert and server.tls_key"
        )
    is_of_run = is_run(folder) and not cluster
    runs = [] if is_of_run or cluster else _find_runs(settings, folder)
    if is_of_run or runs:
        _refuse_flags(folder, {"--nodes": nodes, "--no-node": no_node or None, "--name": name})
    if runs:
        _serve_runs(settings, runs, folder, local.log_file)
        return
    if is_of_run:
        echo(f"{folder} is the folder of a run: its console is served, and nothing is run")
    if cluster:
        settings = add_default_engine(settings)
    if cluster or no_node or is_of_run:
        main = partial(
            run_server,
            settings,
            folder,
            echo,
            cluster=cluster is not None,
            page="runs" if is_of_run else None,
        )
        keep_running(main, local.log_file)
        return
    from tugline.launch.node import run_server_and_nodes  # noqa: PLC0415 - takes a second

    main = partial(run_server_and_nodes, add_default_engine(settings), folder, echo)
    keep_running(main, local.log_file)


def _refuse_flags(folder: Path, flags: Mapping[str, object]) -> None:
    """Raise `UsageError` for a flag about nodes; None is one that is not given."""
    given = [flag for flag, value in flags.items() if value is not None]
    if given:
        msg = f"{folder} has runs, whose console is served without nodes: omit {given[0]}"
        raise UsageError(f"{msg}, or choose another --dir")


def _find_runs(settings: Settings, folder: Path) -> list[Path]:
    """Return the runs below a folder that has no data of its own."""
    if (folder / STORE).exists() or settings.server.store is not None:
        return []
    from tugline.launch import collection  # noqa: PLC0415 - takes a second

    return collection.list_runs(folder)


def _serve_runs(settings: Settings, runs: list[Path], folder: Path, log_file: Path | None) -> None:
    """Serve the console of several runs."""
    from tugline.launch import collection  # noqa: PLC0415 - takes a second

    # A server deletes blobs that its store does not know, and the copies know none but their own.
    settings = replace(settings, server=replace(settings.server, blobs=None, keep_tasks_days=None))
    count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    with tempfile.TemporaryDirectory(prefix="tugline-") as temporary:
        echo(f"reading {count} of {folder}; nothing is run")
        for left_out in collection.collect(runs, Path(temporary)):
            echo(left_out)
        main = partial(run_server, settings, Path(temporary), echo, page="runs")
        keep_running(main, log_file)
