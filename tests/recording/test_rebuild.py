"""Trajectories rebuilt from recordings equal the committed ones, byte for byte, every time."""

import asyncio
import os
import shutil
from pathlib import Path

import msgspec
import pytest

from launch.test_local import local, make
from recording.verify.recorded import work
from support.calls import write_calls
from support.commands import TUGLINE, run_program
from support.server import flip_bit
from tugline.errors import CaptureError, UsageError
from tugline.recording import file as recordings
from tugline.recording.file import write_result
from tugline.recording.folder import list_recordings
from tugline.recording.records import RecordedResult
from tugline.recording.trajectories import (
    INDEX,
    pack,
    read,
    read_folder,
    read_index,
    rebuild,
    rebuild_all,
)
from tugline.types import Boundary, Ledger, Limits, PluginSpec, Reward, SpentLimit, Status


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The recording of a session of four calls, without a result."""
    asyncio.run(work(tmp_path / "recordings"))
    return tmp_path / "recordings" / "s1.0.rec"


async def test_a_rebuilt_trajectory_equals_the_committed_one(tmp_path: Path) -> None:
    """Traces, ledger, reward, status, report and seconds follow from the recording alone."""
    cut = msgspec.structs.replace(
        make("b", samples=1, turns=3), limits=Limits(agent_s=20, max_turns=2)
    )
    async with local(tmp_path) as cluster:
        committed = await cluster.run([make("a"), cut])
    where, out = tmp_path / "recordings", tmp_path / "out"
    rebuild_all(list_recordings(where), where, out, None)
    rebuilt = {each.session: each for each in read_folder(out)}
    assert rebuilt.keys() == {each.session for each in committed}
    assert [pack(rebuilt[each.session]) for each in committed] == [pack(each) for each in committed]
    assert all(each.reward and each.seconds for each in rebuilt.values())
    limits = [rebuilt[each.session].spent for each in committed]
    assert limits == [None, None, SpentLimit.MAX_TURNS]


def test_rewards_per_trace_are_kept_for_the_same_builder(path: Path) -> None:
    """Traces of another builder have the session's reward alone."""
    reward = Reward(1.0, {"tests": 1.0}, per_trace=(1.0, 0.5))
    result = RecordedResult(
        status=Status.COMPLETED, builder="prefix_merging", ledger=Ledger(), reward=reward
    )
    write_result(path, result)
    recording = recordings.read(path)
    for spec in (None, PluginSpec("prefix_merging")):
        assert rebuild(recording, spec).reward == reward
    assert rebuild(recording, PluginSpec("per_request")).reward == Reward(1.0, {"tests": 1.0})


def test_two_processes_write_the_same_bytes(path: Path, tmp_path: Path) -> None:
    """The bytes do not depend on the seed of Python's hashes."""
    outputs = []
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        run_program(TUGLINE, "rebuild", path, "--out", tmp_path / seed, env=env, check=True)
        outputs.append({file.name: file.read_bytes() for file in (tmp_path / seed).iterdir()})
    assert outputs[0] == outputs[1]
    assert outputs[0].keys() == {INDEX, "s1.traj"}


def test_a_session_without_a_result_has_failed(path: Path, tmp_path: Path) -> None:
    """The session is not trained on, but its traces can be inspected."""
    (entry,) = rebuild_all([path], path.parent, tmp_path / "out", None).entries
    assert "no result is recorded" in entry.note
    trajectory = read(tmp_path / "out" / entry.file, entry.sha256)
    assert (trajectory.status, trajectory.reward) == (Status.FAILED, None)
    assert trajectory.failure.boundary is Boundary.INFRASTRUCTURE
    assert entry.ledger.trained == sum(int(trace.mask.sum()) for trace in trajectory.traces) > 0


def test_only_the_last_attempt_is_rebuilt(path: Path, tmp_path: Path) -> None:
    """A session is not trained on twice; the index lists the other recordings."""
    later = path.with_name("s1.10.rec")
    recording = recordings.read(path)
    write_calls(later, recording.calls[:1], recording.header)
    (tmp_path / "copies").mkdir()
    copy = Path(shutil.copy(later, tmp_path / "copies"))
    earlier, _, again = rebuild_all([path, later, copy], tmp_path, tmp_path / "out", None).entries
    for entry in (earlier, again):
        assert (entry.file, entry.note) == ("", "superseded by another attempt or copy")
    (trajectory,) = read_folder(tmp_path / "out")
    assert len(trajectory.traces) == 1


def test_damage_is_reported_and_the_rest_is_rebuilt(path: Path, tmp_path: Path) -> None:
    """A flipped bit costs one session, or with `salvage` the calls after it."""
    bad = Path(shutil.copy(path, path.with_name("s0.0.rec")))
    flip_bit(bad)
    index = rebuild_all([bad, path], path.parent, tmp_path / "out", None)
    assert "is damaged at offset" in index.entries[0].error
    assert [bool(entry.file) for entry in index.entries] == [False, True]
    index = rebuild_all([bad], path.parent, tmp_path / "more", None, salvage=True)
    assert "is damaged at offset" in index.entries[0].note
    assert len(list(read_folder(tmp_path / "more"))) == 1


def test_a_changed_file_is_refused_by_its_digest(path: Path, tmp_path: Path) -> None:
    """Reading the folder gives what was rebuilt, or an error that names the file."""
    out = tmp_path / "out"
    rebuild_all([path], path.parent, out, None)
    (file,) = out.glob("*.traj")
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(CaptureError, match=r"s1\.traj differs from index\.json"):
        list(read_folder(out))
    file.unlink()
    with pytest.raises(CaptureError, match="cannot read trajectory"):
        list(read_folder(out))
    with pytest.raises(UsageError, match=r"has no index\.json"):
        read_index(tmp_path)


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    """Nothing is written to the folder."""
    (tmp_path / "x").touch()
    with pytest.raises(UsageError, match="must be a new or an empty folder"):
        rebuild_all([], tmp_path, tmp_path, None)
