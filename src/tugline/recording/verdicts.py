"""History of the verdicts on recorded sessions: who judged when, by which evaluator, and how.

Lines are only added, so no verdict is lost. Each line is on disk before the next session is judged,
so a killed command continues after it (I3). A verdict that is put in force is added to the
recording as another result, of which the last one counts.
"""

from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from tugline.atomic import append_line, read_whole_lines
from tugline.errors import CaptureError, UsageError
from tugline.recording.file import read, write_result
from tugline.recording.records import RecordedVerdict
from tugline.schema import copy_fields
from tugline.types import Reward

VERDICTS = "verdicts.jsonl"
Key = tuple[str, str, int]
"""Recording, digest of the evaluator, and round of a verdict."""


class VerdictEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A verdict on a recorded session, or the reason why there is none."""

    recording: str
    """Path of the recording, relative to the folder of the run."""
    session: str
    task: str
    at: float
    """Unix seconds."""
    by: str
    """User and machine."""
    evaluator: str
    """Name of the evaluator."""
    name: str = ""
    """Name of the evaluator's file without suffix; empty for the evaluator of each task."""
    digest: str
    """Digest of its options and of the files that they name."""
    round: int = 1
    """2 for the second verdict of ``--twice``."""
    patch: str
    """Digest of the agent's changes."""
    before: float | None
    """Reward in the recording; None if it has none."""
    reward: Reward | None = None
    report: dict[str, Any] = {}
    error: str = ""
    """Why there is no verdict; such a session is judged again by the same command."""
    seconds: float = 0.0

    @property
    def key(self) -> Key:
        """What the verdict is on, and by what."""
        return self.recording, self.digest, self.round


class VerdictHistory:
    """The history in a folder. All methods block on the disk."""

    def __init__(self, folder: Path) -> None:
        """Read the history in `folder`, if any. Raises `UsageError` if it is none."""
        self._path = folder / VERDICTS
        self.verdicts: dict[Key, VerdictEntry] = {}
        """The last verdict of each kind on each recording."""
        try:
            lines = read_whole_lines(self._path)
            entries = [msgspec.json.decode(line, type=VerdictEntry) for line in lines]
        except (OSError, msgspec.DecodeError) as error:
            msg = f"{self._path} is not a history of `tugline rejudge`: {error}"
            raise UsageError(msg) from error
        for entry in entries:
            self._take(entry)

    def add(self, entry: VerdictEntry) -> None:
        """Add a line. Raises `OSError`."""
        append_line(self._path, msgspec.json.encode(entry))
        self._take(entry)

    def _take(self, entry: VerdictEntry) -> None:
        if not entry.error:
            self.verdicts[entry.key] = entry


def put_in_force(path: Path, entry: VerdictEntry | None) -> bool:
    """Put a verdict in force for the recording at `path`; return whether another one was.

    None is the verdict of the session's own evaluation. Raises `CaptureError` if the recording has
    no result, or cannot be read or written.
    """
    recording = read(path)
    now = recording.result
    own = recording.own_result
    if now is None or own is None:
        raise CaptureError(f"{path} has no result")
    result = own
    if entry is not None:
        verdict = copy_fields(RecordedVerdict, entry)
        result = replace(own, reward=entry.reward, report=entry.report, verdict=verdict)
    if result.verdict == now.verdict:
        return False
    write_result(path, result)
    return True
