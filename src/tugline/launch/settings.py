"""Settings of server, node, gateway and engine; ``up``, ``node`` and ``run`` share one file.

Each command reads the tables that concern it. Defaults work on a laptop; a flag of the command line
overrides the file.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from tugline.config import Config, from_mapping
from tugline.node.settings import NodeSettings
from tugline.schema import NonNegativeFloat, Port, PositiveFloat, PositiveInt, read_values
from tugline.server.settings import ServerSettings
from tugline.types import Mode


class EngineSettings(Config, frozen=True):
    """The inference engine: running servers, or a model in this process."""

    urls: tuple[Annotated[str, Meta(pattern="^https?://[^/]")], ...] = ()
    """Addresses of the engine's replicas; none: a model in this process."""
    model: Path | None = None
    """Folder of the model that is served in this process; None: the tiny one of the demo."""
    served_name: str | None = None
    """The model's name at the engine; None: the first one that it lists."""
    api_key_env: str | None = None
    """Environment variable with the engine's API key; None: it wants none."""
    mode: Mode | None = None
    """Who renders prompts to ids; None: `exact` where there is a tokenizer, else `observed`."""
    tokenizer: Path | None = None
    """A `tokenizer.json` or the folder of one, for `exact`."""
    renderer: str | None = None
    """The chat template, for `exact`, such as `qwen3`; None: the one of the published model."""
    thinking_retention: Literal["all", "tool_cycle", "template"] = "all"
    """How long reasoning stays in the context (`exact`)."""
    wait_s: NonNegativeFloat = 600.0
    """Seconds to wait for an engine that does not answer yet."""
    silent_s: PositiveFloat = 30.0
    """Seconds without a token after which a replica is probed; one that does not answer hangs."""


class GatewaySettings(Config, frozen=True):
    """The gateway, which agents send their model calls to."""

    host: str = "127.0.0.1"
    """Address that the gateway listens on; loopback suffices for agents on this machine."""
    port: Port = 0
    """Its port; 0 takes any free one. Further processes have the ports after it."""
    workers: Annotated[int, Meta(ge=1, le=64)] | Literal["auto"] = 1
    """Processes for model calls: 1 is the node's own, `auto` means one for each 16 processors."""


class RaySettings(Config, frozen=True):
    """Nodes on the machines of a Ray cluster, which ``--cluster ray`` places."""

    address: str = "auto"
    """Address of the cluster's head; `auto` finds that of this machine."""
    folder: Path = Path("/tmp/tugline")  # noqa: S108
    """Folder on each machine for the data of its node, which has one of its own there."""
    cpus: PositiveFloat = 1.0
    """Processors that Ray reserves on each machine for its agents."""
    resource: str | None = None
    """Only machines that have this resource of Ray; None: all."""
    engine_actors: str | None = None
    """The engines are actors whose names begin so, such as `vllm_server_`; None: `engine.urls`."""
    max: PositiveInt | None = None
    """Ask Ray's autoscaler for so many machines at most, as the queue needs; None: ask for none."""
    idle_s: PositiveFloat = 60.0
    """Seconds without a session before a machine that is too many is drained."""


class Settings(Config, frozen=True):
    """The configuration file of ``tugline up``, ``tugline node`` and ``tugline run``."""

    server: ServerSettings = ServerSettings()
    """The rollout server."""
    node: NodeSettings = NodeSettings()
    """The node."""
    gateway: GatewaySettings = GatewaySettings()
    """Its gateway."""
    engine: EngineSettings = EngineSettings()
    """The engine behind it."""
    ray: RaySettings = RaySettings()
    """Machines of Ray that run nodes."""


Flags = Mapping[str, object]
"""Values of a command's flags by configuration key; None where one was not given."""


def load_settings(config: Path | None, *, server: Flags, node: Flags, engine: Flags) -> Settings:
    """The file at `config`, if any, overridden by flags. Raises `ConfigError`."""
    values = (read_values(config) if config else None) or {}
    from_mapping(values, Settings, source=str(config))
    merged = {table: dict(keys) for table, keys in values.items()}
    for table, given in (("server", server), ("node", node), ("engine", engine)):
        flags = {key: value for key, value in given.items() if value is not None}
        merged.setdefault(table, {}).update(flags)
    return from_mapping(merged, Settings, source="options")
