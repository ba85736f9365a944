"""Trajectories made from recordings are the committed ones, byte for byte, run after run."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from launch.test_local import local, task
from recording.verify.recorded import work
from tugline.errors import CaptureError, UnknownPlugin, UsageError
from tugline.recording import file as recordings
from tugline.recording.file import Writer, write_result
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

REBUILD = (
    "import sys; from pathlib import Path; from tugline.types import PluginSpec;"
    "from tugline.recording.trajectories import rebuild_all as r; a, b = map(Path, sys.argv[1:]);"
    "r(sorted(a.rglob('*.rec')), a, b, PluginSpec('per_request'))"
)


def files(folder: Path) -> dict[str, bytes]:
    """Everything below a folder."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


async def test_a_rebuilt_trajectory_is_the_one_that_was_committed(tmp_path: Path) -> None:
    """From the recording alone: traces, ledger, reward, end, report and seconds, to the byte."""
    cut = msgspec.structs.replace(task("b", samples=1), limits=Limits(agent_s=20, max_turns=2))
    async with local(tmp_path) as cluster:
        committed = await cluster.run([task("a"), cut])
    where, out = tmp_path / "recordings", tmp_path / "out"
    rebuild_all(recordings_of(where), where, out, None)
    again = {one.session: one for one in read_folder(out)}
    assert again.keys() == {one.session for one in committed}
    assert [pack(again[one.session]) for one in committed] == [pack(one) for one in committed]
    assert all(one.reward and one.reward.value == 1.0 and one.seconds for one in again.values())
    assert [again[one.session].spent for one in committed] == [None, None, SpentLimit.MAX_TURNS]


async def test_rewards_per_trace_stay_with_the_traces_they_are_for(tmp_path: Path) -> None:
    """Another builder's traces get the session's reward alone."""
    await work(tmp_path)
    (path,) = recordings_of(tmp_path)
    reward = Reward(1.0, {"tests": 1.0}, per_trace=(1.0, 0.5))
    result = RecordedResult(
        status=Status.COMPLETED, builder="prefix_merging", ledger=Ledger(), reward=reward
    )
    write_result(path, result)
    recording = recordings.read(path)
    assert (
        rebuild(recording).reward
        == rebuild(recording, PluginSpec("prefix_merging")).reward
        == reward
    )
    assert rebuild(recording, PluginSpec("per_request")).reward == Reward(1.0, {"tests": 1.0})


def recordings_of(folder: Path) -> list[Path]:
    """Its recordings, in order."""
    return sorted(folder.rglob("*.rec"))


def test_two_processes_write_the_same_bytes(tmp_path: Path) -> None:
    """Whatever seed Python's hashes have."""
    asyncio.run(work(tmp_path / "recordings"))
    for seed in ("1", "2"):
        command = [
            sys.executable,
            "-c",
            REBUILD,
            str(tmp_path / "recordings"),
            str(tmp_path / seed),
        ]
        env = {**os.environ, "PYTHONHASHSEED": seed}
        subprocess.run(command, env=env, check=True, timeout=60)
    assert files(tmp_path / "1") == files(tmp_path / "2")
    assert files(tmp_path / "1").keys() == {INDEX, "s1.traj"}


async def test_a_session_without_a_result_is_a_failed_one(tmp_path: Path) -> None:
    """No trainer learns from a session whose end is not known; its traces are there to look at."""
    await work(tmp_path / "recordings")
    found = recordings_of(tmp_path / "recordings")
    index = rebuild_all(found, tmp_path / "recordings", tmp_path / "out", None)
    (entry,) = index.entries
    assert "no result is recorded" in entry.note
    one = read(tmp_path / "out" / entry.file, entry.sha256)
    assert (one.status, one.reward) == (Status.FAILED, None)
    assert one.failure is not None
    assert one.failure.boundary is Boundary.INFRASTRUCTURE
    assert entry.ledger.trained == sum(int(trace.mask.sum()) for trace in one.traces) > 0


async def test_of_several_attempts_the_last_one_counts(tmp_path: Path) -> None:
    """A session is not trained twice; the index says what became of the other recording."""
    await work(tmp_path / "recordings")
    (path,) = recordings_of(tmp_path / "recordings")
    later = path.with_name("s1.10.rec")
    recording = recordings.read(path)
    with Writer(later, recording.header) as writer:
        writer.append(recording.calls[0])
    index = rebuild_all([path, later], path.parent, tmp_path / "out", None)
    earlier, _ = index.entries
    assert (earlier.file, earlier.note) == ("", "a later attempt counts")
    (one,) = read_folder(tmp_path / "out")
    assert len(one.traces) == 1


async def test_damage_is_named_and_the_rest_is_built(tmp_path: Path) -> None:
    """A flipped byte costs one session, or with `salvage` what comes behind it."""
    for name in ("a", "b"):
        await work(tmp_path / name)
    bad, good = recordings_of(tmp_path / "a")[0], recordings_of(tmp_path / "b")[0]
    data = bytearray(bad.read_bytes())
    data[-40] ^= 1
    bad.write_bytes(data)
    index = rebuild_all([bad, good], tmp_path, tmp_path / "out", None)
    assert "is damaged at offset" in index.entries[0].error
    assert [bool(entry.file) for entry in index.entries] == [False, True]
    index = rebuild_all([bad], tmp_path, tmp_path / "more", None, salvage=True)
    assert "is damaged at offset" in index.entries[0].note
    assert len(list(read_folder(tmp_path / "more"))) == 1


async def test_a_changed_file_is_refused_by_its_digest(tmp_path: Path) -> None:
    """A trainer that reads the folder gets what was built, or an error that names the file."""
    await work(tmp_path / "recordings")
    out = tmp_path / "out"
    rebuild_all(recordings_of(tmp_path / "recordings"), tmp_path / "recordings", out, None)
    (path,) = out.glob("*.traj")
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(CaptureError, match=r"s1\.traj is not the file that index\.json names"):
        list(read_folder(out))
    path.unlink()
    with pytest.raises(CaptureError, match="cannot read trajectory"):
        list(read_folder(out))
    with pytest.raises(UsageError, match=r"has no index\.json"):
        read_index(tmp_path)


def test_mistakes_are_found_before_anything_is_written(tmp_path: Path) -> None:
    """A builder that nobody knows, and a folder that holds something."""
    out = tmp_path / "out"
    with pytest.raises(UnknownPlugin, match="did you mean 'per_request'"):
        rebuild_all([], tmp_path, out, PluginSpec("per_requests"))
    assert not out.exists()
    out.mkdir()
    (out / "x").touch()
    with pytest.raises(UsageError, match="must be a new or an empty folder"):
        rebuild_all([], tmp_path, out, None)


def test_an_index_reads_as_it_was_written(tmp_path: Path) -> None:
    """Every field is there, by name, for whoever has no Python of ours."""
    rebuild_all([], tmp_path, tmp_path / "out", PluginSpec("per_request", {"max_length": 5}))
    told = msgspec.json.decode((tmp_path / "out" / INDEX).read_bytes())
    assert told == {"builder": {"name": "per_request", "options": {"max_length": 5}}, "entries": []}
