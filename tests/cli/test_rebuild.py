"""``tugline rebuild``: trajectories in a folder, and its mistakes at the door."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path

import pytest

from commands import run_command
from recording.verify.recorded import work
from tugline.recording.trajectories import read_folder


def rebuild(*options: str | Path) -> subprocess.CompletedProcess[str]:
    """The command, to its end."""
    return run_command("rebuild", *options)


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one session."""
    folder = tmp_path_factory.mktemp("rebuild")
    asyncio.run(work(folder))
    return folder


def test_a_folder_is_rebuilt_with_another_builder_and_its_options(
    recordings: Path, tmp_path: Path
) -> None:
    """The index is told as JSON, and a trainer can load what it names."""
    options = ("--builder", "per_request", "--option", "max_length=500", "--out", tmp_path / "out")
    done = rebuild(recordings, *options, "--json")
    assert done.returncode == 0, done.stderr
    index = json.loads(done.stdout)
    assert index["builder"] == {"name": "per_request", "options": {"max_length": 500}}
    (entry,) = index["entries"]
    assert (entry["session"], entry["file"], entry["traces"]) == ("s1", "s1.traj", 4)
    (one,) = read_folder(tmp_path / "out")
    assert len(one.traces) == 4
    assert max(len(trace.ids) for trace in one.traces) == 500


def test_a_damaged_recording_is_named_and_exit_code_1(recordings: Path, tmp_path: Path) -> None:
    """The others are built all the same."""
    (good,) = recordings.glob("*.rec")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.0.rec").write_bytes(good.read_bytes())
    (tmp_path / "in" / "b.0.rec").write_bytes(b"not a recording")
    done = rebuild(tmp_path / "in", "--out", tmp_path / "out")
    assert done.returncode == 1
    assert "b.0.rec" in done.stdout
    assert "1 of 2 recordings" in done.stdout
    assert len(list(read_folder(tmp_path / "out"))) == 1


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--builder", "prefix"], "unknown builder 'prefix'; did you mean 'prefix_merging'?"),
        (["--option", "a=1"], "--option a=1 is for a builder; name it with --builder"),
        (["--builder", "per_request", "--option", "a"], "must be key=value"),
        (
            ["--builder", "per_request", "--option", "a=1"],
            "there is no option 'a' (its options: max_length, train_side)",
        ),
    ],
)
def test_mistakes_are_told_in_one_line(
    options: list[str], line: str, recordings: Path, tmp_path: Path
) -> None:
    """Exit code 2, nothing written."""
    done = rebuild(recordings, *options, "--out", tmp_path / "out")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert line in done.stderr
    assert not (tmp_path / "out").exists()
