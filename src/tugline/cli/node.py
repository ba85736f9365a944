"""``tugline node``: a node for a server that runs elsewhere.

It needs the join token of the server (``tokens.json`` in the server's folder), which permits
nothing but joining as a node.
"""

from typing import Annotated

import typer

from tugline.cli.up import (
    DATA,
    ConfigFile,
    Engines,
    Folder,
    LogFile,
    Model,
    Name,
    Renderer,
    Slots,
    Tokenizer,
    add_default_engine,
    echo,
    engine_flags,
    keep_running,
)
from tugline.launch.node import run_node
from tugline.launch.settings import load_settings


def node(  # noqa: PLR0913 - each is a flag
    *,
    server: Annotated[
        str, typer.Option(envvar="TUGLINE_SERVER", help="Address, such as http://10.0.0.1:7700.")
    ],
    token: Annotated[
        str, typer.Option(envvar="TUGLINE_JOIN_TOKEN", help="The server's join token.")
    ],
    config: ConfigFile = None,
    folder: Folder = DATA,
    engine: Engines = None,
    model: Model = None,
    tokenizer: Tokenizer = None,
    renderer: Renderer = None,
    slots: Slots = None,
    name: Name = None,
    log_file: LogFile = None,
) -> None:
    """Run sessions for a server, as many as there are slots, until it is stopped."""
    settings = load_settings(
        config,
        server={},
        node={"slots": slots, "name": name},
        engine=engine_flags(engine, model, tokenizer, renderer),
    )
    keep_running(run_node(add_default_engine(settings), folder, server, token, echo), log_file)
