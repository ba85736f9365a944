"""Settings of a rollout server."""

import functools
from pathlib import Path

from msgspec import field

from tugline.config import Config
from tugline.errors import UsageError
from tugline.schema import Port, PositiveFloat, PositiveInt
from tugline.types.task import Tenant


class TenantSettings(Config, frozen=True):
    """Share and limits of a tenant."""

    weight: PositiveFloat = 1.0
    """Share of the slots, relative to other tenants with queued sessions."""
    sessions: PositiveInt | None = None
    """Maximum number of leased sessions; further sessions wait. None: no limit."""
    queued: PositiveInt | None = None
    """Maximum number of unfinished sessions; further tasks are rejected. None: no limit."""
    requests_per_minute: PositiveInt | None = None
    """Maximum number of submissions per minute, by token and server. None: no limit."""


_of_weight = functools.cache(lambda weight: TenantSettings(weight=weight))


class ServerSettings(Config, frozen=True):
    """The rollout server: address, store and time limits."""

    host: str = "127.0.0.1"
    """Address that the API listens on; use TLS for any address other than loopback."""
    port: Port = 7700
    """Port of the API; 0 selects a free port."""
    tls_cert: Path | None = None
    """PEM file of the API's certificate and chain; None: plain HTTP."""
    tls_key: Path | None = None
    """PEM file of the certificate's key."""
    store: str | None = None
    """Store of tasks: `sqlite:PATH` or `postgresql://...`; None: a file in the folder."""
    blobs: str | None = None
    """Store of results: a path or `s3://bucket/prefix`; None: ``blobs`` in the folder."""
    lease_s: PositiveFloat = 30.0
    """Duration of a node's lease in seconds; after it, other nodes get the node's sessions."""
    tenants: dict[Tenant, PositiveFloat | TenantSettings] = field(default_factory=dict)
    """Weight, or weight and limits, by tenant; `default` applies to tenants without an entry."""
    callback_hosts: tuple[str, ...] | None = None
    """Allowed hosts of callbacks, `*` for any; None: hosts with a public address."""
    keep_events_days: PositiveFloat = 30.0
    """Days after which events, and the load of nodes and engines, are deleted."""
    keep_tasks_days: PositiveFloat | None = None
    """Days after their end until tasks and acknowledged results are deleted; None: never."""
    keep_consumers_days: PositiveFloat | None = 30.0
    """Days without acknowledgement until a consumer no longer delays deletion; None: never."""

    def find_tenant(self, name: str) -> TenantSettings:
        """Return share and limits of a tenant."""
        entry = self.tenants.get(name) or self.tenants.get("default") or 1.0
        return entry if isinstance(entry, TenantSettings) else _of_weight(entry)

    @property
    def tls(self) -> tuple[Path, Path] | None:
        """Paths of certificate and key, or None. Raises `UsageError` for one without the other."""
        if self.tls_cert is None or self.tls_key is None:
            if self.tls_cert or self.tls_key:
                raise UsageError("server.tls_cert and server.tls_key must be given together")
            return None
        return self.tls_cert, self.tls_key


DEFAULTS = ServerSettings()
