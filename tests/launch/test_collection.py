"""Several runs as the data of one server."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from launch.engine import create_engine
from launch.test_local import RENDERING, make
from tugline.chat.engines.generate import Embedded
from tugline.errors import Missing
from tugline.gateway.replicas import Upstream
from tugline.launch.collection import collect, list_runs
from tugline.launch.engine import EngineConnection
from tugline.launch.local import open_local
from tugline.launch.naming import name_run
from tugline.launch.server import open_control_plane
from tugline.launch.settings import Settings
from tugline.node.settings import NodeSettings
from tugline.protocol import ResultQuery, RunKind, RunStep, StepQuery
from tugline.recording.folder import file_name
from tugline.recording.trajectories import unpack
from tugline.server.control import ControlPlane
from tugline.server.settings import ServerSettings
from tugline.server.store import results, runs, sessions, tasks
from tugline.web.serve import serve

STEP = RunStep(step=1, figures={"rollout/reward": 0.5})


async def run(folder: Path, samples: int) -> None:
    """A run of one task, whose id is the same in every run."""
    async with serve(create_engine()) as url:
        connection = EngineConnection((url,), Upstream(url, Embedded()), RENDERING)
        settings = Settings(node=NodeSettings(name="n", slots=2))
        async with open_local(settings, folder, connection) as local:
            local.run_name = name_run(folder)
            await local.start_run(local.run_name, RunKind.TRAIN, {"lr": samples})
            await local.control.database.write(runs.report_step, local.run_name, STEP)
            await local.run([make("a", samples=samples)])


async def test_runs_with_the_same_ids_are_kept_apart(tmp_path: Path) -> None:
    """Figures, tasks, results, trajectories and recordings of each run can be read."""
    home = tmp_path / "runs"
    for name in ("one", "two", "empty"):
        (home / name).mkdir(parents=True)
    for name, samples in (("one", 2), ("two", 3)):
        await run(home / name, samples)
    folders = list_runs(home)
    assert [folder.name for folder in folders] == ["one", "two"]
    before = {path: path.read_bytes() for path in home.glob("*/recordings/*.rec")}
    data = tmp_path / "data"
    data.mkdir()
    assert collect(folders, data) == []
    async with open_control_plane(ServerSettings(), data) as control:
        database = control.database
        for folder, samples in zip(folders, (2, 3), strict=True):
            name = name_run(folder)
            view = await database.read(runs.get, name)
            assert view.configuration == {"lr": samples}
            assert await database.read(runs.list_steps, name, StepQuery()) == [STEP]
            assert (await database.read(tasks.body, f"{name}.a")).samples == samples
            page = await control.results(ResultQuery(run=name))
            wanted = [f"{name}.a-{sample}" for sample in range(samples)]
            assert sorted(each.session for each in page.items) == wanted
            for session in wanted:
                result = await database.read(results.get, session)
                assert (result.task, result.reward) == (f"{name}.a", 1.0)
                assert unpack(await control.trajectory(session)).ledger.sampled == result.sampled
                row = await database.read(sessions.get, session)
                [recording] = data.glob(f"nodes/*/recordings/{file_name(row.session())}")
                assert recording.read_bytes() == before[recording.resolve()]
        positions = [each.position for each in (await control.results(ResultQuery())).items]
        assert len(set(positions)) == 5
        with pytest.raises(Missing):
            await database.read(results.get, "a-0")
    assert {path: path.read_bytes() for path in before} == before


def open_run(folder: Path) -> ControlPlane:
    """The server of a new run."""
    folder.mkdir(parents=True)
    return open_control_plane(ServerSettings(), folder)


async def test_a_run_that_goes_on_is_read_as_it_is_now(tmp_path: Path) -> None:
    """Its store is copied while its server uses it."""
    folder = tmp_path / "runs" / "live"
    async with open_run(folder) as control:
        await control.database.write(runs.report_step, name_run(folder), STEP)
        data = tmp_path / "data"
        data.mkdir()
        collect(list_runs(folder.parent), data)
        await control.database.write(runs.end, name_run(folder))
    async with open_control_plane(ServerSettings(), data) as copy:
        assert (await copy.database.read(runs.get, name_run(folder))).ended is None


async def test_a_copy_or_a_broken_run_is_left_out(tmp_path: Path) -> None:
    """The others can be read, and a line says why it is missing."""
    home = tmp_path / "runs"
    for name in ("a", "c"):
        async with open_run(home / name) as control:
            await control.database.write(runs.report_step, name_run(home / name), STEP)
    await asyncio.to_thread(shutil.copytree, home / "a", home / "b")
    (home / "c" / "server.db").write_bytes(b"not a database, but long" * 199)
    data = tmp_path / "data"
    data.mkdir()
    lines = collect(list_runs(home), data)
    assert lines[0] == f"{home / 'b'} is left out: it is a copy of {home / 'a'}"
    assert lines[1].startswith(f"{home / 'c'} is left out: its store cannot be read: ")
    assert len(lines) == 2
    async with open_control_plane(ServerSettings(), data) as control:
        assert [view.name for view in await control.database.read(runs.list_views)] == [
            name_run(home / "a")
        ]
