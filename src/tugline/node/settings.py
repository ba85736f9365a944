"""What a node is told about itself. Sizes that are None follow from the others."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, field

from tugline.config import Config
from tugline.schema import NonNegativeFloat, NonNegativeInt, Port, PositiveFloat, PositiveInt


class NodeSettings(Config, frozen=True):
    """How much a node takes on, and what it keeps. Times are seconds."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{0,100}$")] = ""
    """Its name, kept over restarts: it takes the place of its predecessor. Empty: the machine's."""
    slots: PositiveInt = 8
    """Agents that may run at once."""
    inits: PositiveInt | None = None
    """Sessions that may be made ready at once; None: as many as `slots`."""
    ready_max: NonNegativeInt | None = None
    """Sessions that may be made ready, or wait so, while all slots are taken; None: `slots`."""
    builds: PositiveInt = 2
    """Trajectories that are built at once."""
    evals: PositiveInt | None = None
    """Evaluations at once; None: as many as `slots`."""
    spares: NonNegativeInt | None = None
    """Boxes opened for evaluations while their agents still run; None: one for each slot."""
    memory_floor_mb: NonNegativeInt = 512
    """Nothing is made ready ahead while less memory than this is available."""
    engines: tuple[str, ...] = ()
    """Base URLs whose ``/metrics`` say how busy the engines are; without any, nothing is held."""
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
    """Below this much free space, old sessions are removed, and no new ones are taken."""
    metrics_port: Port | None = None
    """Port of its own page of metrics; with a server in its process, that one has them."""
    labels: dict[str, str] = field(default_factory=dict)
    """Whatever tells it apart from others, shown in the list of nodes."""
    versions: dict[str, str] = field(default_factory=dict)
    """Of its programs, shown in the list of nodes, beside that of Tugline."""

    @property
    def at_once(self) -> int:
        """Sessions in INIT at once."""
        return self.inits or self.slots

    @property
    def ahead(self) -> int:
        """The most sessions in INIT and READY while all slots are taken."""
        return self.slots if self.ready_max is None else self.ready_max

    @property
    def judges(self) -> int:
        """Sessions in EVAL at once."""
        return self.evals or self.slots

    @property
    def boxes(self) -> int:
        """Boxes that may wait for evaluations at once."""
        return self.slots if self.spares is None else self.spares

    @property
    def room(self) -> int:
        """Sessions in all stages together: those that end may queue for their evaluation."""
        return self.slots + self.ahead + 2 * self.judges + self.builds
