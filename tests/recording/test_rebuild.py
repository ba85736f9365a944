"""Trajectories made from recordings are the committed ones, byte for byte, run after run."""

import asyncio
import os
import shutil
from pathlib import Path

import msgspec
import pytest

from calls import write_calls
from commands import TUGLINE, run_program
from launch.test_local import local, make
from recording.verify.recorded import work
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
    """The recording of a session of four calls that has no result yet."""
    asyncio.run(work(tmp_path / "recordings"))
    return tmp_path / "recordings" / "s1.0.rec"


async def test_a_rebuilt_trajectory_is_the_one_that_was_committed(tmp_path: Path) -> None:
    """From the recording alone: traces, ledger, reward, end, report and seconds, to the byte."""
    cut = msgspec.structs.replace(
        make("b", samples=1, turns=3), limits=Limits(agent_s=20, max_turns=2)
    )
    async with local(tmp_path) as cluster:
        committed = await cluster.run([make("a"), cut])
    where, out = tmp_path / "recordings", tmp_path / "out"
    rebuild_all(list_recordings(where), where, out, None)
    again = {one.session: one for one in read_folder(out)}
    assert again.keys() == {one.session for one in committed}
    assert [pack(again[one.session]) for one in committed] == [pack(one) for one in committed]
    assert all(one.reward and one.seconds for one in again.values())
    assert [again[one.session].spent for one in committed] == [None, None, SpentLimit.MAX_TURNS]


def test_rewards_per_trace_stay_with_the_traces_they_are_for(path: Path) -> None:
    """Another builder's traces get the session's reward alone."""
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
    """Whatever seed Python's hashes have."""
    outputs = []
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        run_program(TUGLINE, "rebuild", path, "--out", tmp_path / seed, env=env, check=True)
        outputs.append({file.name: file.read_bytes() for file in (tmp_path / seed).iterdir()})
    assert outputs[0] == outputs[1]
    assert outputs[0].keys() == {INDEX, "s1.traj"}


def test_a_session_without_a_result_is_a_failed_one(path: Path, tmp_path: Path) -> None:
    """No trainer learns from a session whose end is not known; its traces are there to look at."""
    (entry,) = rebuild_all([path], path.parent, tmp_path / "out", None).entries
    assert "no result is recorded" in entry.note
    one = read(tmp_path / "out" / entry.file, entry.sha256)
    assert (one.status, one.reward) == (Status.FAILED, None)
    assert one.failure is not None
    assert one.failure.boundary is Boundary.INFRASTRUCTURE
    assert entry.ledger.trained == sum(int(trace.mask.sum()) for trace in one.traces) > 0


def test_of_several_attempts_the_last_one_counts(path: Path, tmp_path: Path) -> None:
    """A session is not trained twice; the index says what became of the other recording."""
    later = path.with_name("s1.10.rec")
    recording = recordings.read(path)
    write_calls(later, recording.calls[:1], recording.header)
    (tmp_path / "copies").mkdir()
    copy = Path(shutil.copy(later, tmp_path / "copies"))
    earlier, _, again = rebuild_all([path, later, copy], tmp_path, tmp_path / "out", None).entries
    for one in (earlier, again):
        assert (one.file, one.note) == ("", "another attempt or copy counts")
    (one,) = read_folder(tmp_path / "out")
    assert len(one.traces) == 1


def test_damage_is_named_and_the_rest_is_built(path: Path, tmp_path: Path) -> None:
    """A flipped byte costs one session, or with `salvage` what comes behind it."""
    bad = path.with_name("s0.0.rec")
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    bad.write_bytes(data)
    index = rebuild_all([bad, path], path.parent, tmp_path / "out", None)
    assert "is damaged at offset" in index.entries[0].error
    assert [bool(entry.file) for entry in index.entries] == [False, True]
    index = rebuild_all([bad], path.parent, tmp_path / "more", None, salvage=True)
    assert "is damaged at offset" in index.entries[0].note
    assert len(list(read_folder(tmp_path / "more"))) == 1


def test_a_changed_file_is_refused_by_its_digest(path: Path, tmp_path: Path) -> None:
    """A trainer that reads the folder gets what was built, or an error that names the file."""
    out = tmp_path / "out"
    rebuild_all([path], path.parent, out, None)
    (file,) = out.glob("*.traj")
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(CaptureError, match=r"s1\.traj is not the file that index\.json names"):
        list(read_folder(out))
    file.unlink()
    with pytest.raises(CaptureError, match="cannot read trajectory"):
        list(read_folder(out))
    with pytest.raises(UsageError, match=r"has no index\.json"):
        read_index(tmp_path)


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    """Before anything is written."""
    (tmp_path / "x").touch()
    with pytest.raises(UsageError, match="must be a new or an empty folder"):
        rebuild_all([], tmp_path, tmp_path, None)
