"""``tugline up``, ``node`` and ``server``: rollout server, node and engine; a server's data.

Flags override the configuration file, which has all settings. A node of a server on another machine
needs that server's join token (``tokens.json`` in its folder), which only permits joining.
"""

import asyncio
import contextlib
import shutil
import sqlite3
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import uvloop
from cyclopts import App, Parameter
from msgspec.structs import replace

from tugline import log
from tugline.cli.options import DEMO_MODEL, INTERRUPTED, Json
from tugline.cli.output import background_stderr, print_report, print_text
from tugline.errors import CaptureError, Missing, StoreError, UsageError
from tugline.launch.server import STORE, locate_data, run_server
from tugline.launch.settings import Flags, Settings, load_settings
from tugline.launch.tokens import is_local
from tugline.plugins import import_extra
from tugline.recording.file import read
from tugline.recording.folder import list_recordings
from tugline.server.control import read_blob
from tugline.server.store.results import list_digests
from tugline.types import Mode

DATA = Path("tugline-data")

Processes = int | Literal["auto"] | None
Folder = Annotated[Path, Parameter("--dir", help="Folder of all data.")]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """Options of commands that run sessions in this process."""

    config: Path | None = None
    """YAML or TOML file with any setting."""
    engine: list[str] | None = None
    """URL of the engine; repeat for replicas."""
    model: str | None = None
    """With --engine: served name of the model (default: the first); else: model folder."""
    tokenizer: Path | None = None
    """With --engine: path of the model's tokenizer.json, for exact mode."""
    renderer: str | None = None
    """Chat template for exact mode, such as qwen3."""
    api_key_env: str | None = None
    """With --engine: environment variable with the engine's API key."""
    messages_only: bool = False
    """Use an API that reports no token ids."""
    slots: int | None = None
    """Number of concurrent agents."""
    log_file: Annotated[Path | None, Parameter("--log")] = None
    """File to write the log to, as JSON lines."""

    def load(
        self,
        *,
        server: Flags | None = None,
        name: str | None = None,
        processes: int | str | None = None,
    ) -> Settings:
        """Load the settings from their file and these flags. Raises `UsageError`."""
        engine = {
            "urls": self.engine or None,
            "tokenizer": self.tokenizer,
            "renderer": self.renderer,
            "api_key_env": self.api_key_env,
            "mode": Mode.TEXT.value if self.messages_only else None,
        }
        node = {"slots": self.slots, "name": name, "processes": processes}
        settings = load_settings(self.config, server=server or {}, node=node, engine=engine)
        if self.model is None:
            return settings
        if settings.engine.urls:
            return replace(settings, engine=replace(settings.engine, served_name=self.model))
        return replace(settings, engine=replace(settings.engine, model=Path(self.model)))


DEFAULT_NODE = NodeOptions()
"""Options that override nothing."""


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
    if cluster:
        settings = add_default_engine(settings)
    if cluster or no_node:
        main = partial(run_server, settings, folder, echo, cluster=cluster is not None)
        keep_running(main, local.log_file)
        return
    from tugline.launch.node import run_server_and_nodes  # noqa: PLC0415 - takes a second

    main = partial(run_server_and_nodes, add_default_engine(settings), folder, echo)
    keep_running(main, local.log_file)


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


def add_default_engine(settings: Settings) -> Settings:
    """Serve the demo's tiny model if no engine is given.

    Raises `UsageError` if file and flags contradict each other.
    """
    engine = settings.engine
    elsewhere = engine.urls or settings.ray.engine_actors
    if elsewhere and engine.model:
        msg = "engine.model is for an engine in this process; with engine.urls, set served_name"
        raise UsageError(msg)
    if engine.tokenizer and not elsewhere:
        msg = "--tokenizer requires the URL of an engine; a model folder has its own tokenizer"
        raise UsageError(msg)
    if elsewhere or engine.model:
        return settings
    echo("no engine is configured: serving the demo's tiny model (--engine URL for another one)")
    return replace(settings, engine=replace(engine, model=DEMO_MODEL))


def echo(line: str) -> None:
    """Print a line for people on stderr."""
    print_text(line, stderr=True)


def keep_running(main: Callable[[], Coroutine[Any, Any, None]], log_file: Path | None) -> None:
    """Run until `main` ends, or exit with 130 at a second signal."""
    log.configure(level="info" if log_file else "warning", path=log_file)
    try:
        with background_stderr():
            uvloop.run(main())
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(INTERRUPTED)


# --------------------------------------------------------------------------- data of a server
server = App(help="Check or back up the data of a server.")


@server.command
async def check(
    *,
    folder: Folder = DATA,
    config: Path | None = None,
    store: str | None = None,
    recordings: list[Path] | None = None,
    as_json: Json = False,
) -> None:
    """Check that a server's store and results are intact; it may be running or stopped.

    Args:
        config: YAML or TOML file of `tugline up`, for its stores.
        store: Database, postgresql://... (default: a file in --dir).
        recordings: Also check the recordings in this folder, such as a node's; repeatable.
    """
    settings = load_settings(config, server={"store": store}, node={}, engine={}).server
    database, blobs = locate_data(settings, folder)
    sessions = database.check(list_digests)
    damaged: dict[str, str] = {}
    for session, (name, digest) in sessions.items():
        try:
            await read_blob(blobs, name, digest)
        except (Missing, StoreError) as error:
            damaged[session] = str(error)
    if damaged:
        left = database.check(list_digests)  # a running server may delete old results
        damaged = {session: fault for session, fault in damaged.items() if session in left}
    paths = [path for where in recordings or () for path in list_recordings(where)]
    for path in paths:
        try:
            read(path)
        except CaptureError as error:
            damaged[path.name] = str(error)
    counts = f"{len(sessions)} results and {len(paths)} recordings were read"
    report = {"results": len(sessions), "recordings": len(paths), "damaged": damaged}
    lines = [f"{name}: {fault}" for name, fault in damaged.items()]
    lines.append(f"{counts}; {len(damaged)} are damaged or missing")
    print_report(report, lambda: print_text(*lines), as_json=as_json, failed=bool(damaged))


@server.command
def backup(copy: Path, /, *, folder: Folder = DATA) -> None:
    """Copy the data of a server with SQLite to a new folder; it may be running or stopped.

    `tugline up --dir COPY` continues from the copy. Data of nodes are not copied.

    Args:
        copy: The new folder.
    """
    if copy.exists():
        raise UsageError(f"{copy} already exists; choose a new folder")
    if not (folder / STORE).is_file():
        raise UsageError(f"{folder} has no {STORE}; back up PostgreSQL with its own tools")
    database, _ = locate_data(Settings().server, folder)
    database.check(list_digests)  # a damaged store is no backup
    copy.mkdir(parents=True)
    source = sqlite3.connect(folder / STORE)
    target = sqlite3.connect(copy / STORE)
    with contextlib.closing(source), contextlib.closing(target):
        (copy / STORE).chmod(0o600)
        source.backup(target)
    # Files are copied after the store, so that no file of a stored result is missing.
    others = shutil.ignore_patterns(f"{STORE}*", ".lock", "server.json", "nodes")
    shutil.copytree(folder, copy, ignore=others, copy_function=_copy, dirs_exist_ok=True)


def _copy(source: str, target: str) -> None:
    with contextlib.suppress(FileNotFoundError):  # deleted by the running server
        shutil.copy2(source, target)
