"""``tugline node``: a node for a server that runs elsewhere.

It needs the join token of the server (``tokens.json`` in the server's folder), which permits
nothing but joining as a node.
"""

from typing import Annotated

from cyclopts import Parameter

from tugline.cli import up
from tugline.launch.node import run_node


def node(
    *,
    server: Annotated[str, Parameter(env_var="TUGLINE_SERVER")],
    token: Annotated[str, Parameter(env_var="TUGLINE_JOIN_TOKEN")],
    folder: up.Folder = up.DATA,
    name: str | None = None,
    local: up.NodeOptions = up.DEFAULT_NODE,
) -> None:
    """Run sessions for a server, as many as there are slots, until it is stopped.

    Args:
        server: Address, such as http://10.0.0.1:7700.
        token: The server's join token.
        name: Name of the node (default: the machine's).
    """
    settings = up.add_default_engine(local.load(name=name))
    up.keep_running(run_node(settings, folder, server, token, up.echo), local.log_file)
