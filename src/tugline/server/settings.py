"""Settings of a rollout server."""

from pathlib import Path

from msgspec import field

from tugline.config import Config
from tugline.errors import UsageError
from tugline.schema import Port, PositiveFloat


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
    tenants: dict[str, PositiveFloat] = field(default_factory=dict)
    """Weights of tenants; the default is 1."""
    callback_hosts: tuple[str, ...] | None = None
    """Hosts that callbacks may go to, `*` for any; None: those with a public address."""
    keep_events_days: PositiveFloat = 30.0
    """How long events can be read."""
    keep_tasks_days: PositiveFloat | None = None
    """Delete tasks with their acknowledged results so long after their end; None: never."""
    keep_consumers_days: PositiveFloat | None = 30.0
    """A consumer that has acknowledged nothing for so long holds no task back; None: it does."""

    @property
    def tls(self) -> tuple[Path, Path] | None:
        """Certificate and key. Raises `UsageError` for one without the other."""
        if self.tls_cert is None or self.tls_key is None:
            if self.tls_cert or self.tls_key:
                raise UsageError("server.tls_cert and server.tls_key must be given together")
            return None
        return self.tls_cert, self.tls_key
