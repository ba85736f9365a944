"""What a gateway needs to know to open a session, and what it reports about one."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tugline.types import Failure, SpentLimit


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTerms:
    """Properties of a session's harness and sandbox that its gateway needs."""

    spent_status: int = 400
    """HTTP status of a refusal for a spent budget: the one on which the harness stops."""
    offers_tools: bool = False
    """Whether the harness declares tools in its main calls; a call without is a side call."""
    compaction_phrases: Sequence[str] = ()
    """Phrases in the harness's prompts that ask for a summary of the conversation."""
    side_phrases: Sequence[str] = ()
    """Phrases in the prompts of the harness's side calls."""
    workdir: str = ""
    """Working folder in the sandbox, recorded for a replay."""
    home: str = ""
    """Home folder in the sandbox, recorded for a replay."""
    key: str = ""
    """Session key issued by an earlier process; the session continues from its recording."""


DEFAULT_TERMS = SessionTerms()
"""Terms for an unknown harness."""


@dataclass(frozen=True, slots=True)
class Opened:
    """Address and key of an open session."""

    base_url: str
    """URL without ``/v1``; each harness appends the suffix that its CLI expects."""
    key: str


@dataclass(frozen=True, slots=True)
class SessionState:
    """State of a live session, or final state of a closed one."""

    path: Path
    """Path of the recording."""
    failure: Failure | None = None
    """Reason why the last call failed, if the cause was the engine or its window.

    A session that exceeds the window later has answers that can be evaluated.
    """
    spent: SpentLimit | None = None
    """The budget that refused a call or cut off the last answer."""
