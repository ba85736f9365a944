"""Several runs of one folder as the data of one server, whose console compares them.

Stores are copied, so that runs may go on; recordings, patches and trajectories are linked.
"""

import sqlite3
from collections.abc import Sequence
from pathlib import Path

from tugline.errors import TuglineError, first_line
from tugline.launch.naming import is_run, make_prefix, name_run
from tugline.launch.node import RECORDINGS
from tugline.launch.processes import NODES
from tugline.launch.server import BLOBS, STORE
from tugline.server.blobs import spread
from tugline.server.store.merge import merge, snapshot
from tugline.server.store.sqlite import Sqlite

_COPY = "copy.db"


def list_runs(folder: Path) -> list[Path]:
    """Return the folders of runs with a store directly below `folder`, by name."""
    if not folder.is_dir():
        return []
    return [path for path in sorted(folder.iterdir()) if is_run(path) and (path / STORE).exists()]


def collect(runs: Sequence[Path], into: Path) -> list[str]:
    """Make the data of a server in the new folder `into`; ids begin with the name of the run.

    Return a line about each run that is left out: a copy of another one, or of another release.
    """
    left_out = []
    known: dict[str, Path] = {}
    store = into / STORE
    driver = Sqlite(store)
    driver.prepare()
    driver.release()
    copy = into / _COPY
    for run in runs:
        unique = make_prefix(run)
        if unique in known:
            left_out.append(f"{run} is left out: it is a copy of {known[unique]}")
            continue
        try:
            snapshot(run / STORE, copy)
            merge(store, copy, f"{name_run(run)}.")
        except (TuglineError, sqlite3.Error) as error:
            left_out.append(f"{run} is left out: its store cannot be read: {first_line(error)}")
            continue
        finally:
            copy.unlink(missing_ok=True)
        known[unique] = run
        _link(run, f"{name_run(run)}.", into)
    return left_out


def _link(run: Path, prefix: str, into: Path) -> None:
    """Link the files of a run under the names that they have in the merged store."""
    for blob in (run / BLOBS).glob("??/*"):
        link = spread(into / BLOBS, prefix + blob.name)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob.absolute())
    for number, folder in enumerate([run / RECORDINGS, *(run / NODES).glob(f"*/{RECORDINGS}")]):
        here = into / NODES / f"{prefix}{number}" / RECORDINGS
        for file in folder.iterdir() if folder.is_dir() else ():
            here.mkdir(parents=True, exist_ok=True)
            name = prefix + file.name if file.suffix == ".rec" else file.name
            (here / name).symlink_to(file.absolute())
