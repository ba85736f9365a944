"""Options shared by commands, and the client that they configure."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from tugline.client.api import Client
from tugline.client.sync import SyncClient
from tugline.client.transport import SERVER
from tugline.errors import Missing, ServerError, UsageError
from tugline.protocol import SessionView, TaskView
from tugline.recording.folder import list_recordings, resolve

Count = Annotated[int, Parameter(validator=Number(gte=1))]
"""Positive integer."""
NotNegative = Annotated[float, Parameter(validator=Number(gte=0))]
Required = Annotated[str, Parameter(required=True)]
"""Positional argument that must be given at least once."""
Json = Annotated[bool, Parameter("--json", help="Print JSON.")]
DATA = Path("tugline-data")
Folder = Annotated[Path, Parameter("--dir", help="Folder of all data.")]
Changes = Annotated[
    list[str] | None,
    Parameter("--set", help="Set a value of the configuration, such as node.slots=4; repeatable."),
]
DEMO_MODEL = Path(__file__).parents[1] / "demo" / "warm_start_model"
"""Tiny model that is served or trained by default."""
_DEADLINE_S = 10.0
"""Deadline of requests; streams and waits continue after a restart of the server."""
LOOK_S = 3.0
"""Deadline of commands that check whether the server answers."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Remote:
    """Options of commands that call a server."""

    server: str | None = None
    """URL of the server (default: TUGLINE_SERVER, else --dir)."""
    token: str | None = None
    """Token of the server (default: TUGLINE_TOKEN, else --dir)."""
    folder: Annotated[Path | None, Parameter("--dir")] = None
    """Folder of `tugline up` (default: tugline-data)."""

    @property
    def is_named(self) -> bool:
        """Whether options or the environment name a server."""
        return bool(self.server or self.folder or os.environ.get(SERVER))

    @property
    def is_known(self) -> bool:
        """Whether a server is named, or one was started in the default folder."""
        return self.is_named or (DATA / "server.json").exists()

    def connect(self, deadline_s: float = _DEADLINE_S) -> Client:
        """Create the client of a command, an async context manager."""
        return Client(self.server, self.token, folder=self.folder, deadline_s=deadline_s)

    @contextlib.contextmanager
    def find_recordings(self, name: str) -> Iterator[list[Path]]:
        """Yield the recordings of a file, of a folder, or of a session by id.

        An id is looked up in ``runs``, then on the server; files from the server are removed at the
        end of the block.
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
                raise UsageError(f"{name} has {len(paths)} recordings; name one, e.g. {paths[0]}")
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
"""Server given by the environment or the working folder."""


async def find_by_id(client: Client, name: str) -> TaskView | SessionView:
    """Read the task or session with this id. Raises `Missing` if there is neither."""
    with contextlib.suppress(Missing):
        return await client.task(name)
    try:
        return await client.session(name)
    except Missing as error:
        raise Missing(f"{name!r} is neither a task nor a session of {client.url}") from error


def make_new_folder(keep: Path) -> None:
    """Create the folder of ``--keep``. Raises `UsageError` if it exists or cannot be created."""
    try:
        keep.mkdir(parents=True)
    except OSError as error:
        raise UsageError(
            f"cannot create {keep}: {error.strerror}; choose another --keep"
        ) from error
