"""``tugline server check | backup``: the data of a server, which may be running or stopped."""

import contextlib
import shutil
import sqlite3
from pathlib import Path

from cyclopts import App

from tugline.cli.options import DATA, Folder, Json
from tugline.cli.output import print_report, print_text
from tugline.errors import CaptureError, Missing, StoreError, UsageError
from tugline.launch.server import STORE, locate_data
from tugline.launch.settings import Settings, load_settings
from tugline.recording.file import read
from tugline.recording.folder import list_recordings
from tugline.server.blobs import read_blob
from tugline.server.store.results import list_digests

server = App(name="server")


@server.command
async def check(
    *,
    folder: Folder = DATA,
    config: Path | None = None,
    store: str | None = None,
    recordings: list[Path] | None = None,
    as_json: Json = False,
) -> None:
    """Check that a server's store and results are intact; it may be running or stopped.

    Args:
        config: YAML or TOML file of `tugline up`, for its stores.
        store: Database, postgresql://... (default: a file in --dir).
        recordings: Also check the recordings in this folder, such as a node's; repeatable.
    """
    settings = load_settings(config, server={"store": store}, node={}, engine={}).server
    database, blobs = locate_data(settings, folder)
    sessions = database.check(list_digests)
    damaged: dict[str, str] = {}
    for session, (name, digest) in sessions.items():
        try:
            await read_blob(blobs, name, digest)
        except (Missing, StoreError) as error:
            damaged[session] = str(error)
    if damaged:
        left = database.check(list_digests)  # a running server may delete old results
        damaged = {session: fault for session, fault in damaged.items() if session in left}
    paths = [path for where in recordings or () for path in list_recordings(where)]
    for path in paths:
        try:
            read(path)
        except CaptureError as error:
            damaged[path.name] = str(error)
    counts = f"{len(sessions)} results and {len(paths)} recordings were read"
    report = {"results": len(sessions), "recordings": len(paths), "damaged": damaged}
    lines = [f"{name}: {fault}" for name, fault in damaged.items()]
    lines.append(f"{counts}; {len(damaged)} are damaged or missing")
    print_report(report, lambda: print_text(*lines), as_json=as_json, failed=bool(damaged))


@server.command
def backup(copy: Path, /, *, folder: Folder = DATA) -> None:
    """Copy the data of a server with SQLite to a new folder; it may be running or stopped.

    `tugline up --dir COPY` continues from the copy. Data of nodes are not copied.

    Args:
        copy: The new folder.
    """
    if copy.exists():
        raise UsageError(f"{copy} already exists; choose a new folder")
    if not (folder / STORE).is_file():
        raise UsageError(f"{folder} has no {STORE}; back up PostgreSQL with its own tools")
    database, _ = locate_data(Settings().server, folder)
    database.check(list_digests)  # a damaged store is no backup
    copy.mkdir(parents=True)
    source = sqlite3.connect(folder / STORE)
    target = sqlite3.connect(copy / STORE)
    with contextlib.closing(source), contextlib.closing(target):
        (copy / STORE).chmod(0o600)
        source.backup(target)
    # Files are copied after the store, so that no file of a stored result is missing.
    others = shutil.ignore_patterns(f"{STORE}*", ".lock", "server.json", "nodes")
    shutil.copytree(folder, copy, ignore=others, copy_function=_copy, dirs_exist_ok=True)


def _copy(source: str, target: str) -> None:
    with contextlib.suppress(FileNotFoundError):  # deleted by the running server
        shutil.copy2(source, target)
