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
    """Its share of the slots, relative to those of other tenants with work."""
    sessions: PositiveInt | None = None
    """Most of its sessions that nodes hold at once; the others wait. None: any number."""
    queued: PositiveInt | None = None
    """Most of its sessions that are not final; more are refused. None: any number."""
    requests_per_minute: PositiveInt | None = None
    """Most submissions of one token that a server takes. None: any number."""


_of_weight = functools.cache(lambda weight: TenantSettings(weight=weight))


class ServerSettings(Config, frozen=True):
    """The rollout server: address, store and time limits."""

    host: str = "127.0.0.1"
    """Address that the API listens on; anything but loopback belongs behind TLS."""
    port: Port = 7700
    """Port of the API; 0 takes any free one."""
    tls_cert: Path | None = None
    """PEM file of the API's certificate and its chain; None: it speaks plain HTTP."""
    tls_key: Path | None = None
    """PEM file of the certificate's key."""
    store: str | None = None
    """Store of tasks: `sqlite:PATH` or `postgresql://...`; None: a file in the folder."""
    blobs: str | None = None
    """Store of results: a path or `s3://bucket/prefix`; None: ``blobs`` in the folder."""
    lease_s: PositiveFloat = 30.0
    """A node that does not renew within so many seconds loses its sessions to others."""
    tenants: dict[Tenant, PositiveFloat | TenantSettings] = field(default_factory=dict)
    """By name, `default` for each without an entry: a weight, or a weight and limits."""
    callback_hosts: tuple[str, ...] | None = None
    """Hosts that callbacks may go to, `*` for any; None: those with a public address."""
    keep_events_days: PositiveFloat = 30.0
    """How long events can be read."""
    keep_tasks_days: PositiveFloat | None = None
    """Delete tasks with their acknowledged results so long after their end; None: never."""
    keep_consumers_days: PositiveFloat | None = 30.0
    """A consumer that has acknowledged nothing for so long holds no task back; None: it does."""

    def find_tenant(self, name: str) -> TenantSettings:
        """Share and limits of a tenant."""
        found = self.tenants.get(name) or self.tenants.get("default") or 1.0
        return found if isinstance(found, TenantSettings) else _of_weight(found)

    @property
    def tls(self) -> tuple[Path, Path] | None:
        """Certificate and key. Raises `UsageError` for one without the other."""
        if self.tls_cert is None or self.tls_key is None:
            if self.tls_cert or self.tls_key:
                raise UsageError("server.tls_cert and server.tls_key must be given together")
            return None
        return self.tls_cert, self.tls_key


DEFAULTS = ServerSettings()
