"""``tugline node``: run sessions for a server on this or on another machine.

A node of a server on another machine needs that server's join token (``tokens.json`` in its
folder), which only permits joining.
"""

from functools import partial
from typing import Annotated, Literal

from cyclopts import Parameter

from tugline import log
from tugline.cli.node_options import DEFAULT_NODE, NodeOptions, Processes, add_default_engine
from tugline.cli.options import DATA, Folder
from tugline.cli.output import background_stderr, echo
from tugline.cli.process import keep_running
from tugline.plugins import import_extra


def node(
    *,
    server: Annotated[str, Parameter(env_var="TUGLINE_SERVER")],
    token: Annotated[str, Parameter(env_var="TUGLINE_JOIN_TOKEN")],
    folder: Folder = DATA,
    name: str | None = None,
    processes: Processes = None,
    cluster: Literal["ray"] | None = None,
    local: NodeOptions = DEFAULT_NODE,
) -> None:
    """Run sessions for a server, one per slot, until stopped.

    Args:
        server: URL of the server, such as http://10.0.0.1:7700.
        token: Join token of the server.
        name: Name of the node (default: the machine's).
        processes: Nodes on this machine, each a process of its own (default: one, in this process).
        cluster: Run a node on each machine of this cluster, and none in this process.
    """
    settings = add_default_engine(local.load(name=name, processes=processes))
    if cluster:
        log.configure(level="info" if local.log_file else "warning", path=local.log_file)
        ray = import_extra("tugline.launch.ray", "ray", "--cluster ray")
        with background_stderr():
            ray.keep_nodes(settings, server, token, echo)
        return
    from tugline.launch.node import run_node  # noqa: PLC0415 - takes a second

    keep_running(partial(run_node, settings, folder, server, token, echo), local.log_file)
