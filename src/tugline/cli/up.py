"""``tugline up``: the rollout server, a node and its engine in one process; where one begins.

The flags are what people change most; a configuration file gives any setting, and the flags go
before it.
"""

from __future__ import annotations

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
from tugline.web import serve

DATA = Path("tugline-data")
_MODEL = "warm_start_model"

ConfigFile = Annotated[Path | None, typer.Option(help="YAML or TOML file with any setting.")]
Folder = Annotated[Path, typer.Option("--dir", help="Folder of everything that is kept.")]
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
Slots = Annotated[int | None, typer.Option(help="Agents that run at once.")]
Name = Annotated[
    str | None, typer.Option(help="Name of the node; that of the machine if not given.")
]
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
        bool, typer.Option("--no-node", help="The server alone, for nodes on other machines.")
    ] = False,
    log_file: LogFile = None,
) -> None:
    """Start server, node and engine, and run what is submitted until it is stopped."""
    told = load_settings(
        config,
        server={"host": host, "port": port, "store": store},
        node={"slots": slots, "name": name},
        engine=engine_flags(engine, model, tokenizer, renderer),
    )
    if not is_local(told.server.host):
        say(
            f"[yellow]the API will listen on {told.server.host} without TLS:[/] tokens and results"
            " can be read on the way; put it behind a proxy that speaks HTTPS"
        )
    if no_node:
        keep_running(run_server(told, folder, say), log_file)
        return
    from tugline.launch.node import run_server_and_node  # noqa: PLC0415 - takes a second, see there

    keep_running(run_server_and_node(with_an_engine(told), folder, say), log_file)


def engine_flags(
    urls: list[str] | None, model: Path | None, tokenizer: Path | None, renderer: str | None
) -> Flags:
    """What the flags say of the engine."""
    return {"urls": urls or None, "model": model, "tokenizer": tokenizer, "renderer": renderer}


def with_an_engine(told: Settings) -> Settings:
    """Without any engine the tiny model of the demo: it shows that everything works.

    Raises `UsageError` where file and flags contradict each other.
    """
    engine = told.engine
    if engine.urls and engine.model:
        msg = "--model is for an engine in this process; leave it out beside --engine"
        raise UsageError(msg)
    if engine.tokenizer and not engine.urls:
        msg = "--tokenizer is for an engine at an address; a model folder brings its own"
        raise UsageError(msg)
    if engine.urls or engine.model:
        return told
    model = Path(str(files("tugline.demo"))) / _MODEL
    say("no engine was given: the demo's tiny model answers ([bold]--engine URL[/] for a real one)")
    return replace(told, engine=replace(engine, model=model))


def say(line: str) -> None:
    """A line for people, on stderr."""
    Console(stderr=True, highlight=False).print(line, soft_wrap=True)


def keep_running(main: Coroutine[Any, Any, None], log_file: Path | None) -> None:
    """Run until it ends by itself, exit code 0, or at once by a second signal, exit code 130."""
    log.configure(level="info" if log_file else "warning", path=log_file)
    try:
        serve.run(main)
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise typer.Exit(INTERRUPTED) from None
