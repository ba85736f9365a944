"""``tugline rebuild``: builders and damaged recordings."""

from __future__ import annotations

import json
from pathlib import Path

from recording.view.synthetic import small
from support.commands import run_command
from tugline.recording.trajectories import read_folder


def test_a_folder_is_rebuilt_with_another_builder_and_its_options(tmp_path: Path) -> None:
    """The index is printed as JSON, and a trainer can load its files."""
    small(tmp_path / "in")
    command = "rebuild in --builder per_request --option max_length=300 --out out --json"
    done = run_command(*command.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    index = json.loads(done.stdout)
    assert index["builder"] == {"name": "per_request", "options": {"max_length": 300}}
    (entry,) = index["entries"]
    (trajectory,) = read_folder(tmp_path / "out")
    assert (entry["session"], entry["file"]) == ("s-1", "s-1.traj")
    assert entry["traces"] == len(trajectory.traces) == 6
    assert max(len(trace.ids) for trace in trajectory.traces) == 300


def test_a_damaged_recording_is_named_with_exit_code_1(tmp_path: Path) -> None:
    """A damaged recording does not stop the others from being rebuilt."""
    small(tmp_path / "in")
    (tmp_path / "in" / "b.0.rec").write_bytes(b"not a recording")
    done = run_command("rebuild", "in", "--out", "out", cwd=tmp_path)
    assert done.returncode == 1
    assert "b.0.rec" in done.stdout
    assert "1 of 2 recordings" in done.stdout
    assert len(list(read_folder(tmp_path / "out"))) == 1
