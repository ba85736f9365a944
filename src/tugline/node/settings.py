"""Settings of a node. The defaults of sizes that are None follow from the others."""

from typing import Annotated, Literal

from msgspec import Meta, field

from tugline.config import Config
from tugline.schema import NonNegativeFloat, NonNegativeInt, Port, PositiveFloat, PositiveInt


class NodeSettings(Config, frozen=True):
    """Limits, admission and retention of a node. Times are in seconds."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{0,100}$")] = ""
    """Name of the node, unique among all running nodes. Empty: the machine's name."""
    processes: Annotated[int, Meta(ge=1, le=64)] | Literal["auto"] | None = None
    """Nodes of this machine, each a process with a gateway; None: one, in the process of the
    command; `auto`: one per 16 processors. They divide `slots` and `quota_gb`."""
    slots: PositiveInt = 8
    """Agents that may run at once."""
    max_initializing: PositiveInt | None = None
    """Sessions in INIT at once; None: as many as `slots`."""
    ready_max: NonNegativeInt | None = None
    """Sessions in INIT or READY while all slots are taken; None: as many as `slots`."""
    max_building: PositiveInt = 2
    """Trajectories that are built at once."""
    max_evaluating: PositiveInt | None = None
    """Evaluations at once; None: as many as `slots`."""
    memory_floor_mb: NonNegativeInt = 512
    """Available memory below which no session starts INIT before a slot is free."""
    engines: tuple[str, ...] = ()
    """Base URLs of engines whose ``/metrics`` are polled for admission; none: agents never wait."""
    engine_waiting: NonNegativeInt = 8
    """New agents wait while every engine has more requests than this in its queue."""
    engine_kv: PositiveFloat = 0.95
    """New agents also wait while every engine uses more than this fraction of its KV memory."""
    grace_s: NonNegativeFloat = 600.0
    """Time that agents have to finish when the node is asked to stop."""
    keep_s: NonNegativeFloat = 7 * 86400.0
    """Time for which folders and recordings of committed sessions are kept."""
    quota_gb: PositiveFloat = 50.0
    """Total size of these folders and recordings, beyond which the oldest are removed."""
    disk_floor_gb: NonNegativeFloat = 1.0
    """Free space below which old sessions are removed and no new ones are taken."""
    metrics_port: Port | None = None
    """Port of the node's ``/metrics``; None: no port, or that of a server in the same process."""
    labels: dict[str, str] = field(default_factory=dict)
    """Labels shown in the list of nodes."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of programs shown in the list of nodes, in addition to Tugline's."""

    @property
    def init_slots(self) -> int:
        """Maximum sessions in INIT at once."""
        return self.max_initializing or self.slots

    @property
    def ready_limit(self) -> int:
        """Maximum sessions in INIT and READY while all slots are taken."""
        return self.slots if self.ready_max is None else self.ready_max

    @property
    def eval_slots(self) -> int:
        """Maximum sessions in EVAL at once."""
        return self.max_evaluating or self.slots

    @property
    def capacity(self) -> int:
        """Maximum sessions in all stages, including `eval_slots` that wait for EVAL."""
        return self.slots + self.ready_limit + 2 * self.eval_slots + self.max_building
