"""``tugline up``: the rollout server, a node and its engine in one process.

Flags override the configuration file, which can set everything else.
"""

import asyncio
from collections.abc import Coroutine
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec.structs import replace
from rich.console import Console

from tugline import log
from tugline.cli.options import INTERRUPTED
from tugline.errors import UsageError
from tugline.launch.server import is_local, run_server
from tugline.launch.settings import Flags, Settings, load_settings
from tugline.types import Mode
from tugline.web import serve

DATA = Path("tugline-data")
_MODEL = "warm_start_model"

ConfigFile = Annotated[Path | None, typer.Option(help="YAML or TOML file with any setting.")]
Folder = Annotated[Path, typer.Option("--dir", help="Folder of all data.")]
Engines = Annotated[
    list[str] | None, typer.Option("--engine", help="Address of the engine; repeat for replicas.")
]
Model = Annotated[
    Path | None, typer.Option(help="Without --engine: model folder to serve in this process.")
]
Tokenizer = Annotated[
    Path | None, typer.Option(help="With --engine: its tokenizer.json, for exact mode.")
]
Renderer = Annotated[str | None, typer.Option(help="Chat template for exact mode, such as qwen3.")]
KeyEnv = Annotated[
    str | None,
    typer.Option("--api-key-env", help="With --engine: environment variable with its API key."),
]
Served = Annotated[
    str | None, typer.Option(help="With --engine: name of the model (default: the first).")
]
MessagesOnly = Annotated[
    bool, typer.Option("--messages-only", help="For an API that reports no token ids.")
]
Slots = Annotated[int | None, typer.Option(help="Agents that run concurrently.")]
Name = Annotated[str | None, typer.Option(help="Name of the node (default: the machine's).")]
LogFile = Annotated[Path | None, typer.Option("--log", help="Write a log of JSON lines here.")]


def up(  # noqa: PLR0913 - each is a flag
    *,
    config: ConfigFile = None,
    folder: Folder = DATA,
    host: Annotated[str | None, typer.Option(help="Address of the API.")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the API; 0 for any.")] = None,
    store: Annotated[
        str | None, typer.Option(help="postgresql://..., if not a file in --dir.")
    ] = None,
    engine: Engines = None,
    model: Model = None,
    tokenizer: Tokenizer = None,
    renderer: Renderer = None,
    slots: Slots = None,
    name: Name = None,
    no_node: Annotated[
        bool, typer.Option("--no-node", help="Only the server, for nodes on other machines.")
    ] = False,
    log_file: LogFile = None,
) -> None:
    """Start server, node and engine, and run what is submitted until it is stopped."""
    settings = load_settings(
        config,
        server={"host": host, "port": port, "store": store},
        node={"slots": slots, "name": name},
        engine=engine_flags(engine, model, tokenizer, renderer),
    )
    if not is_local(settings.server.host):
        echo(
            f"[yellow]the API will listen on {settings.server.host} without TLS:[/] tokens and"
            " results can be read in transit; put it behind a proxy that serves HTTPS"
        )
    if no_node:
        keep_running(run_server(settings, folder, echo), log_file)
        return
    from tugline.launch.node import run_server_and_node  # noqa: PLC0415 - takes a second, see there

    keep_running(run_server_and_node(add_default_engine(settings), folder, echo), log_file)


def engine_flags(
    urls: list[str] | None, model: Path | None, tokenizer: Path | None, renderer: str | None
) -> Flags:
    """Settings of the engine from its flags."""
    return {"urls": urls or None, "model": model, "tokenizer": tokenizer, "renderer": renderer}


def api_flags(key_env: str | None, served_name: str | None, *, messages_only: bool) -> Flags:
    """Settings of an API of somebody else from the flags of ``tugline generate`` and ``eval``."""
    mode = Mode.TEXT.value if messages_only else None
    return {"api_key_env": key_env, "served_name": served_name, "mode": mode}


def local_settings(
    config: Path | None, slots: int | None, engine: Flags, name: str | None = None
) -> Settings:
    """Settings of a node and its engine from their file and flags. Raises `UsageError`."""
    node = {"slots": slots, "name": name}
    return add_default_engine(load_settings(config, server={}, node=node, engine=engine))


def add_default_engine(settings: Settings) -> Settings:
    """Serve the demo's tiny model if no engine is given.

    Raises `UsageError` if file and flags contradict each other.
    """
    engine = settings.engine
    if engine.urls and engine.model:
        msg = "--model is for an engine in this process; leave it out beside --engine"
        raise UsageError(msg)
    if engine.tokenizer and not engine.urls:
        msg = "--tokenizer is for an engine at an address; a model folder brings its own"
        raise UsageError(msg)
    if engine.api_key_env and not engine.urls:
        msg = "--api-key-env is for an engine at an address: add --engine, or leave it out"
        raise UsageError(msg)
    if engine.urls or engine.model:
        return settings
    model = Path(str(files("tugline.demo"))) / _MODEL
    echo("no engine given: serving the demo's tiny model ([bold]--engine URL[/] for a real one)")
    return replace(settings, engine=replace(engine, model=model))


def echo(line: str) -> None:
    """Print a line for people on stderr."""
    Console(stderr=True, highlight=False).print(line, soft_wrap=True)


def keep_running(main: Coroutine[Any, Any, None], log_file: Path | None) -> None:
    """Run until `main` ends, or exit with 130 at a second signal."""
    log.configure(level="info" if log_file else "warning", path=log_file)
    try:
        serve.run(main)
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise typer.Exit(INTERRUPTED) from None
