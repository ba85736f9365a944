"""``tugline node``: a node for a server that runs elsewhere.

It needs the join token of the server (``tokens.json`` in the server's folder), which permits
nothing but joining as a node.
"""

from typing import Annotated

import typer

from tugline.cli import up
from tugline.launch.node import run_node


def node(  # noqa: PLR0913 - each is a flag
    *,
    server: Annotated[
        str, typer.Option(envvar="TUGLINE_SERVER", help="Address, such as http://10.0.0.1:7700.")
    ],
    token: Annotated[
        str, typer.Option(envvar="TUGLINE_JOIN_TOKEN", help="The server's join token.")
    ],
    config: up.ConfigFile = None,
    folder: up.Folder = up.DATA,
    engine: up.Engines = None,
    model: up.Model = None,
    tokenizer: up.Tokenizer = None,
    renderer: up.Renderer = None,
    slots: up.Slots = None,
    name: up.Name = None,
    log_file: up.LogFile = None,
) -> None:
    """Run sessions for a server, as many as there are slots, until it is stopped."""
    flags = up.engine_flags(engine, model, tokenizer, renderer)
    settings = up.local_settings(config, slots, flags, name)
    up.keep_running(run_node(settings, folder, server, token, up.echo), log_file)
