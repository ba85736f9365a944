"""Options that several commands share, and the client that they configure."""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from tugline.client.api import Client
from tugline.client.sync import SyncClient
from tugline.errors import ServerError, UsageError
from tugline.recording.folder import list_recordings, resolve

INTERRUPTED = 130
"""Exit code of a command that was interrupted."""

Count = Annotated[int, Parameter(validator=Number(gte=1))]
"""A number from 1."""
NotNegative = Annotated[float, Parameter(validator=Number(gte=0))]
Required = Annotated[str, Parameter(required=True)]
"""A positional argument of which at least one must be given."""
Json = Annotated[bool, Parameter("--json", help="Print JSON.")]
DEMO_MODEL = Path(__file__).parents[1] / "demo" / "warm_start_model"
"""The tiny model that is served or trained where none is named."""
_DEADLINE_S = 10.0
"""A server that does not answer is reported soon; streams and waits survive its restarts."""
LOOK_S = 3.0
"""The same for commands that look whether it answers."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Remote:
    """Options of commands that call a server."""

    server: str | None = None
    """URL of the server (default: TUGLINE_SERVER, else --dir)."""
    token: str | None = None
    """Its token (default: TUGLINE_TOKEN, else --dir)."""
    folder: Annotated[Path | None, Parameter("--dir")] = None
    """Folder of `tugline up` (default: tugline-data)."""

    def connect(self, deadline_s: float = _DEADLINE_S) -> Client:
        """Create the client of a command, to be used as an async context manager."""
        return Client(self.server, self.token, folder=self.folder, deadline_s=deadline_s)

    @contextlib.contextmanager
    def find_recordings(self, name: str) -> Iterator[list[Path]]:
        """Yield the recordings of a file, of a folder or of the session with this id.

        An id is looked up below ``runs``, then on the server; what the server sends is removed at
        the end of the block.
        """
        with tempfile.TemporaryDirectory(prefix="tugline-recording-") as folder:
            try:
                paths = resolve(name)
            except UsageError as error:
                if Path(name).exists():
                    raise
                paths = self._download(name, Path(folder), error)
            yield paths

    @contextlib.contextmanager
    def find_recording(self, name: str) -> Iterator[Path]:
        """Yield the only recording of `name`; see `find_recordings`."""
        with self.find_recordings(name) as paths:
            if len(paths) > 1:
                raise UsageError(f"{name} has {len(paths)} recordings; name one, as {paths[0]}")
            yield paths[0]

    def _download(self, session: str, folder: Path, local: UsageError) -> list[Path]:
        try:
            with SyncClient(
                self.server, self.token, folder=self.folder, deadline_s=_DEADLINE_S
            ) as client:
                client.recording(session, folder)
        except (UsageError, ServerError) as error:
            raise UsageError(f"{local}; {error}") from error
        return list_recordings(folder)


DEFAULT_SERVER = Remote()
"""The server that environment and working folder name."""


def make_new_folder(keep: Path) -> None:
    """Create the folder of ``--keep``. Raises `UsageError` if it is there or cannot be made."""
    try:
        keep.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"cannot make {keep}: {error.strerror}; choose another --keep") from error
