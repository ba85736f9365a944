"""What a server, a node and its engine can be told; one file serves ``up``, ``node`` and ``run``.

Each command reads the tables that concern it. What is left out has a default that works on a
laptop; a flag of the command line goes before the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from msgspec import field

from tugline.config import Config, from_mapping
from tugline.node.settings import NodeSettings
from tugline.schema import NonNegativeFloat, Port, PositiveFloat, read_values
from tugline.types import Mode


class ServerSettings(Config, frozen=True):
    """The rollout server: its address, its store and its promises."""

    host: str = "127.0.0.1"
    """Address that the API listens on; anything but loopback belongs behind TLS."""
    port: Port = 7700
    """Port of the API; 0 takes any free one."""
    store: str | None = None
    """Where tasks are kept: `sqlite:PATH` or `postgresql://...`; None is a file in the folder."""
    blobs: str | None = None
    """Where results are kept: a path or `s3://bucket/prefix`; None is ``blobs`` in the folder."""
    lease_s: PositiveFloat = 30.0
    """A node that is not heard of for so many seconds loses its sessions to others."""
    tenants: dict[str, PositiveFloat] = field(default_factory=dict)
    """Weights of tenants; one that is not named has 1."""
    callback_hosts: tuple[str, ...] | None = None
    """Hosts that callbacks may go to; None: any."""
    keep_events_days: PositiveFloat = 30.0
    """How long events can be read again."""
    keep_tasks_days: PositiveFloat | None = None
    """Forget tasks with their results so long after their end, once acknowledged; None: never."""


class EngineSettings(Config, frozen=True):
    """What samples the tokens: running servers, or a model in this process."""

    urls: tuple[str, ...] = ()
    """Addresses of the engine's replicas; none: a model in this process."""
    model: Path | None = None
    """Folder of the model that is served in this process; None: the tiny one of the demo."""
    served_name: str | None = None
    """The model's name at the engine; the first one that it tells if not given."""
    mode: Mode | None = None
    """Who makes the prompt's ids; None: `exact` where there is a tokenizer, else `observed`."""
    tokenizer: Path | None = None
    """A `tokenizer.json` or the folder of one, for `exact`."""
    renderer: str | None = None
    """The chat template, for `exact`, such as `qwen3`; None: the one of the published model."""
    thinking_retention: Literal["all", "tool_cycle", "template"] = "all"
    """How long reasoning stays in the context (`exact`)."""
    wait_s: NonNegativeFloat = 600.0
    """Seconds to wait for an engine that does not answer yet."""


class GatewaySettings(Config, frozen=True):
    """Where agents reach the models."""

    host: str = "127.0.0.1"
    """Address that the gateway listens on; loopback is enough for agents on this machine."""
    port: Port = 0
    """Its port; 0 takes any free one."""


class Settings(Config, frozen=True):
    """All that ``tugline up``, ``tugline node`` and ``tugline run`` can be told in a file."""

    server: ServerSettings = ServerSettings()
    """The rollout server."""
    node: NodeSettings = NodeSettings()
    """The node."""
    gateway: GatewaySettings = GatewaySettings()
    """Its gateway."""
    engine: EngineSettings = EngineSettings()
    """The engine behind it."""


Given = Mapping[str, object]
"""Flags of a command by the key that they stand for; None where one was not given."""


def settings(config: Path | None, *, server: Given, node: Given, engine: Given) -> Settings:
    """The file at `config`, if any, with what the flags say before it. Raises `ConfigError`."""
    values = read_values(config) if config else {}
    if config:
        from_mapping(values or {}, Settings, source=str(config))
    merged = {table: dict(keys) for table, keys in (values or {}).items()}
    for table, given in (("server", server), ("node", node), ("engine", engine)):
        flags = {key: value for key, value in given.items() if value is not None}
        merged.setdefault(table, {}).update(flags)
    return from_mapping(merged, Settings, source="options")
