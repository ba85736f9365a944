"""Settings of server, node, gateway and engine; ``up``, ``node`` and ``run`` share one file.

Each command reads the tables that it needs. The defaults work on a laptop; command-line flags
override the file.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta
from msgspec.structs import replace

from tugline.config import NO_CHANGES, Config, anchor_paths, change, from_mapping
from tugline.launch.prices import Prices
from tugline.node.settings import NodeSettings
from tugline.schema import NonNegativeFloat, Port, PositiveFloat, PositiveInt, read_values
from tugline.server.settings import ServerSettings
from tugline.types import Mode

Echo = Callable[[str], None]
"""Function that prints a line for people."""


class EngineSettings(Config, frozen=True):
    """Inference engine: running servers, or a model in this process."""

    urls: tuple[Annotated[str, Meta(pattern="^https?://[^/]")], ...] = ()
    """URLs of the engine's replicas; none: a model in this process."""
    model: Path | None = None
    """Folder of the model to serve in this process; None: the tiny model of the demo."""
    served_name: str | None = None
    """Name of the model at the engine; None: the first model that the engine lists."""
    api_key_env: str | None = None
    """Environment variable with the engine's API key; None: no key."""
    mode: Mode | None = None
    """Mode of rendering and capture; None: `exact` with a tokenizer, else `observed`."""
    tokenizer: Path | None = None
    """Path of `tokenizer.json` or of its folder, for `exact`."""
    renderer: str | None = None
    """Chat template for `exact`, such as `qwen3`; None: the template of the published model."""
    thinking_retention: Literal["all", "tool_cycle", "template"] = "all"
    """Turns whose reasoning stays in the context, for `exact`."""
    special_tokens_in_contents: Literal["text", "tokens"] = "text"
    """Encoding of special tokens written in messages, tools and arguments, for `exact`."""
    wait_s: NonNegativeFloat = 600.0
    """Seconds to wait for an engine that does not answer yet."""
    silent_s: PositiveFloat = 30.0
    """Seconds without a token until a replica is probed; without an answer, the replica hangs."""


class GatewaySettings(Config, frozen=True):
    """Gateway that serves the model calls of agents."""

    host: str = "127.0.0.1"
    """Address that the gateway listens on; loopback is enough for agents on this machine."""
    port: Port = 0
    """Port of the gateway; 0 selects a free port. Further nodes use the following ports."""


class RaySettings(Config, frozen=True):
    """Nodes on the machines of a Ray cluster, for ``--cluster ray``."""

    address: str = "auto"
    """Address of the cluster's head; `auto` uses the cluster of this machine."""
    folder: Path = Path("/tmp/tugline")  # noqa: S108
    """Folder on each machine; the node's data are in a subfolder with the machine's name."""
    cpus: PositiveFloat = 1.0
    """Processors that Ray reserves for agents on each machine."""
    resource: str | None = None
    """Ray resource that machines must have; None: all machines."""
    engine_actors: str | None = None
    """Name prefix of the actors that are engines, such as `vllm_server_`; None: `engine.urls`."""
    max: PositiveInt | None = None
    """Maximum number of machines requested from Ray's autoscaler for the queue; None: none."""
    idle_s: PositiveFloat = 60.0
    """Seconds without a session until an unneeded machine is drained."""


class Settings(Config, frozen=True):
    """Configuration file of ``tugline up``, ``tugline node`` and ``tugline run``."""

    server: ServerSettings = ServerSettings()
    """Settings of the rollout server."""
    node: NodeSettings = NodeSettings()
    """Settings of the node."""
    gateway: GatewaySettings = GatewaySettings()
    """Settings of the node's gateway."""
    engine: EngineSettings = EngineSettings()
    """Settings of the gateway's engine."""
    ray: RaySettings = RaySettings()
    """Settings of nodes on a Ray cluster."""
    prices: Prices = Prices()
    """Prices for the cost of `eval`, `run` and `generate`."""


Flags = Mapping[str, object]
"""Values of a command's flags by configuration key; None for a flag that is not given."""


def load_settings(
    config: Path | None,
    *,
    server: Flags,
    node: Flags,
    engine: Flags,
    changes: Mapping[str, object] = NO_CHANGES,
) -> Settings:
    """Load the file at `config`, if any, and override it. Raises `ConfigError`.

    Paths in the file are relative to its folder, other paths to the current directory.

    `changes` override values by dotted key, then flags those of their tables.
    """
    values = (read_values(config) if config else None) or {}
    from_mapping(values, Settings, source=str(config))
    if config is not None:
        values = anchor_paths(values, Settings, config.parent)
    if changes:
        values = change(values, changes)
        from_mapping(values, Settings, source="--set")
    merged = {table: dict(keys) for table, keys in values.items()}
    for table, overrides in (("server", server), ("node", node), ("engine", engine)):
        flags = {key: value for key, value in overrides.items() if value is not None}
        merged.setdefault(table, {}).update(flags)
    return from_mapping(merged, Settings, source="options")


def name_model(settings: Settings, model: str) -> Settings:
    """Set the served name of an engine elsewhere, or the folder of the model to serve here."""
    engine = settings.engine
    if engine.urls:
        return replace(settings, engine=replace(engine, served_name=model))
    return replace(settings, engine=replace(engine, model=Path(model)))


def encode_path(path: Path) -> str:
    """Convert a path of the settings to an absolute one for other processes and machines."""
    return str(path.absolute())
