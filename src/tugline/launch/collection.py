"""Several runs of one folder as the data of one server, whose console compares them.

Stores are copied, so that runs may go on; recordings, patches and trajectories are linked.
"""

from collections.abc import Sequence
from pathlib import Path

from tugline.launch.naming import is_run, name_run
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


def collect(runs: Sequence[Path], into: Path) -> None:
    """Make the data of a server in the new folder `into`; ids begin with the name of the run."""
    store = into / STORE
    driver = Sqlite(store)
    driver.prepare()
    driver.release()
    copy = into / _COPY
    for run in runs:
        prefix = f"{name_run(run)}."
        snapshot(run / STORE, copy)
        merge(store, copy, prefix)
        copy.unlink()
        _link(run, prefix, into)


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
