"""``tugline server check``: compare a server's store with its blobs, and read recordings.

It only reads, so a server may be running. Exit code 1 if anything is damaged or lost.
"""

import sys
from pathlib import Path

from cyclopts import App
from rich.console import Console

from tugline.cli.options import Json, print_json
from tugline.cli.up import DATA, Folder
from tugline.errors import CaptureError, Missing, StoreError
from tugline.launch.server import locate_data
from tugline.launch.settings import load_settings
from tugline.recording.file import read
from tugline.recording.folder import list_recordings
from tugline.server.blobs import Blobs
from tugline.server.control import read_blob
from tugline.server.store.results import list_digests

server = App(help="The data of a server.")


@server.command
async def check(
    *,
    folder: Folder = DATA,
    config: Path | None = None,
    store: str | None = None,
    recordings: list[Path] | None = None,
    as_json: Json = False,
) -> None:
    """Check that a server's store and results are whole; it may be running or stopped.

    Args:
        config: YAML or TOML file of `tugline up`, for its stores.
        store: postgresql://..., if not a file in --dir.
        recordings: Also check the recordings in this folder, such as a node's; repeat for more.
    """
    settings = load_settings(config, server={"store": store}, node={}, engine={}).server
    database, blobs = locate_data(settings, folder)
    sessions = database.check(list_digests)
    damaged = await _find_damaged(blobs, sessions)
    if damaged:
        left = database.check(list_digests)  # a running server may delete what is old
        damaged = {session: what for session, what in damaged.items() if session in left}
    paths = [path for where in recordings or () for path in list_recordings(where)]
    for path in paths:
        try:
            read(path, bodies=False)
        except CaptureError as error:
            damaged[path.name] = str(error)
    if as_json:
        print_json({"results": len(sessions), "recordings": len(paths), "damaged": damaged})
    else:
        console = Console(highlight=False, markup=False, soft_wrap=True)
        for name, what in damaged.items():
            console.print(f"{name}: {what}", style="red")
        counts = f"{len(sessions)} results and {len(paths)} recordings were read"
        console.print(f"{counts}, {len(damaged)} are damaged or lost")
    if damaged:
        sys.exit(1)


async def _find_damaged(blobs: Blobs, sessions: dict[str, tuple[str, str]]) -> dict[str, str]:
    """Read every result; session to what is wrong with it."""
    damaged = {}
    for session, (name, digest) in sessions.items():
        try:
            await read_blob(blobs, name, digest)
        except (Missing, StoreError) as error:
            damaged[session] = str(error)
    return damaged
