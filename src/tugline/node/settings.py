"""What a node is told about itself. Sizes that are None follow from the others."""

from __future__ import annotations

from pydantic import Field

from tugline.config import Config


class NodeSettings(Config):
    """How much a node takes on, and what it keeps. Times are seconds."""

    name: str = Field(default="", pattern=r"^[A-Za-z0-9._-]{0,100}$")
    """Its name, kept over restarts: it takes the place of its predecessor. Empty: the machine's."""
    slots: int = Field(default=8, ge=1)
    """Agents that may run at once."""
    inits: int | None = Field(default=None, ge=1)
    """Sessions that may be made ready at once; None: as many as `slots`."""
    ready_max: int | None = Field(default=None, ge=0)
    """Sessions that may be made ready, or wait so, while all slots are taken; None: `slots`."""
    builds: int = Field(default=2, ge=1)
    """Trajectories that are built at once."""
    evals: int | None = Field(default=None, ge=1)
    """Evaluations at once; None: as many as `slots`."""
    spares: int | None = Field(default=None, ge=0)
    """Boxes opened for evaluations while their agents still run; None: one for each slot."""
    memory_floor_mb: int = Field(default=512, ge=0)
    """Nothing is made ready ahead while less memory than this is available."""
    engines: tuple[str, ...] = ()
    """Base URLs whose ``/metrics`` say how busy the engines are; without any, nothing is held."""
    engine_waiting: int = Field(default=8, ge=0)
    """New agents wait while every engine has more requests than this in its queue."""
    engine_kv: float = Field(default=0.95, gt=0)
    """They also wait while every engine uses more than this share of its KV memory."""
    grace_s: float = Field(default=600.0, ge=0)
    """How long agents may go on after the node is asked to stop."""
    keep_s: float = Field(default=7 * 86400.0, ge=0)
    """How long the folders and recordings of committed sessions stay."""
    quota_gb: float = Field(default=50.0, gt=0)
    """How much they may take up together; the oldest go first."""
    disk_floor_gb: float = Field(default=1.0, ge=0)
    """Below this much free space, old sessions are removed, and no new ones are taken."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of its own page of metrics; with a server in its process, that one has them."""
    labels: dict[str, str] = Field(default={})
    """Whatever tells it apart from others, shown in the list of nodes."""
    versions: dict[str, str] = Field(default={})
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
