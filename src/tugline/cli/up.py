"""``tugline up``: rollout server, node and engine; for a run that has ended, its console only."""

from functools import partial
from typing import Literal

from tugline.cli.node_options import DEFAULT_NODE, NodeOptions, Processes, add_default_engine
from tugline.cli.options import DATA, Folder
from tugline.cli.output import echo
from tugline.cli.process import keep_running
from tugline.errors import UsageError
from tugline.launch.naming import is_run
from tugline.launch.server import run_server
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
    if is_run(folder) and not cluster:
        echo(f"{folder} is the folder of a run: its console is served, and nothing is run")
        no_node = True
    if cluster:
        settings = add_default_engine(settings)
    if cluster or no_node:
        main = partial(run_server, settings, folder, echo, cluster=cluster is not None)
        keep_running(main, local.log_file)
        return
    from tugline.launch.node import run_server_and_nodes  # noqa: PLC0415 - takes a second

    main = partial(run_server_and_nodes, add_default_engine(settings), folder, echo)
    keep_running(main, local.log_file)
