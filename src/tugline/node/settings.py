"""Settings of a node. Sizes that are None follow from the others."""

from typing import Annotated

from msgspec import Meta, field

from tugline.config import Config
from tugline.schema import NonNegativeFloat, NonNegativeInt, Port, PositiveFloat, PositiveInt


class NodeSettings(Config, frozen=True):
    """How much a node takes on, and what it keeps. Times are seconds."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{0,100}$")] = ""
    """Its name, which no other node may have at the same time. Empty: the machine's."""
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
    """With less memory available than this, no session starts INIT ahead of a free slot."""
    engines: tuple[str, ...] = ()
    """Base URLs of engines whose ``/metrics`` are polled for admission; none: agents never wait."""
    engine_waiting: NonNegativeInt = 8
    """New agents wait while every engine has more requests than this in its queue."""
    engine_kv: PositiveFloat = 0.95
    """They also wait while every engine uses more than this share of its KV memory."""
    grace_s: NonNegativeFloat = 600.0
    """How long agents may go on after the node is asked to stop."""
    keep_s: NonNegativeFloat = 7 * 86400.0
    """How long the folders and recordings of committed sessions stay."""
    quota_gb: PositiveFloat = 50.0
    """How much they may take up together; the oldest go first."""
    disk_floor_gb: NonNegativeFloat = 1.0
    """With less free space than this, old sessions are removed and no new ones are taken."""
    metrics_port: Port | None = None
    """Port of its own ``/metrics``; None: none, or those of the server in its process."""
    labels: dict[str, str] = field(default_factory=dict)
    """Labels shown in the list of nodes."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of programs shown in the list of nodes, beside that of Tugline."""

    @property
    def init_slots(self) -> int:
        """Sessions in INIT at once."""
        return self.max_initializing or self.slots

    @property
    def ready_limit(self) -> int:
        """The most sessions in INIT and READY while all slots are taken."""
        return self.slots if self.ready_max is None else self.ready_max

    @property
    def eval_slots(self) -> int:
        """Sessions in EVAL at once."""
        return self.max_evaluating or self.slots

    @property
    def capacity(self) -> int:
        """Sessions in all stages together, with a queue as long as EVAL behind the agents."""
        return self.slots + self.ready_limit + 2 * self.eval_slots + self.max_building
