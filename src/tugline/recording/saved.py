"""Results as files: a line of ``results.jsonl`` for each, and its trajectory in ``trajectories/``.

A result counts as saved once its line is on the disk, which is written after its trajectory; so
whatever is killed in between, and a line that was cut short, is simply saved again (I3).
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec

from tugline.protocol import ResultView
from tugline.recording.trajectories import INDEX, Index, IndexEntry, read

LINES = "results.jsonl"
TRAJECTORIES = "trajectories"


class ResultFolder:
    """The results in `folder`, which is made. Its methods wait for the disk."""

    def __init__(self, folder: Path) -> None:
        """Raises `OSError` if the folder cannot be used."""
        self._folder = folder
        self._lines = folder / LINES
        (folder / TRAJECTORIES).mkdir(parents=True, exist_ok=True)
        data = self._lines.read_bytes() if self._lines.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        if whole != data:
            os.truncate(self._lines, len(whole))
        views = [msgspec.json.decode(line, type=ResultView) for line in whole.splitlines()]
        self.views = {view.session: view for view in views}
        """By session, in the order in which they were saved."""

    def add(self, view: ResultView, packed: bytes) -> None:
        """Keep a result with its trajectory (`pack`; empty if it has none), once."""
        if view.session in self.views:
            return
        if packed:
            self._keep(self.path(view.session), packed)
        with self._lines.open("ab") as file:
            file.write(msgspec.json.encode(view) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.views[view.session] = view

    def path(self, session: str) -> Path:
        """The file of a session's trajectory."""
        return self._folder / TRAJECTORIES / f"{session}.traj"

    def index(self) -> Path:
        """Write the index by which a trainer loads them (`read_folder`); returns their folder."""
        folder = self._folder / TRAJECTORIES
        entries = tuple(self._entry(view) for view in self.views.values())
        self._keep(folder / INDEX, msgspec.json.encode(Index(builder=None, entries=entries)))
        return folder

    def _entry(self, view: ResultView) -> IndexEntry:
        path = self.path(view.session)
        if not view.bytes:
            return IndexEntry(session=view.session, recording="", error=f"it was {view.status}")
        trajectory = read(path)
        return IndexEntry(
            session=view.session,
            recording="",
            file=path.name,
            sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
            traces=len(trajectory.traces),
            tokens=sum(len(trace.ids) for trace in trajectory.traces),
            ledger=trajectory.ledger,
        )

    def _keep(self, path: Path, data: bytes) -> None:
        draft = path.with_suffix(".part")
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
