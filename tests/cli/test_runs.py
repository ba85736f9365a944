"""``tugline runs``: runs of a server and of folders."""

from __future__ import annotations

import json
from pathlib import Path

from cli.conftest import Shell
from tugline.cli.runs import describe_state
from tugline.launch.folder_lock import folder_lock
from tugline.launch.naming import name_run
from tugline.launch.server import open_control_plane
from tugline.protocol import RunKind, RunStart, RunStep, RunView
from tugline.server.settings import ServerSettings
from tugline.server.store import runs


async def write_run(folder: Path, *, ended: bool) -> str:
    """Write the store of a training with one step; returns the name of the run."""
    name = name_run(folder)
    start = RunStart(kind=RunKind.TRAIN, configuration={"model": "tiny"})
    async with open_control_plane(ServerSettings(), folder) as control:
        await control.database.write(runs.start, name, start)
        await control.database.write(runs.report_step, name, RunStep(step=3, figures={"a": 1.0}))
        if ended:
            await control.database.write(runs.end, name)
    return name


async def test_runs_of_the_server_and_of_folders_are_listed(shell: Shell) -> None:
    """With kind, step and state; a name shows the configuration; a locked folder is left out."""
    for name in ("repair", "busy", "no run"):
        (shell.folder / "runs" / name).mkdir(parents=True)
    ended = await write_run(shell.folder / "runs" / "repair", ended=True)
    await write_run(shell.folder / "runs" / "busy", ended=False)
    async with shell.live.client() as client:
        await client.start_run("theirs", RunKind.EVAL)
    with folder_lock(shell.folder / "runs" / "busy", instead=""):
        done = await shell.run("runs", "--json")
        table = await shell.run("runs")
    assert done.returncode == 0, done.stderr
    views = {view["name"]: view for view in json.loads(done.stdout)}
    assert {name: (view["kind"], view["step"]) for name, view in views.items()} == {
        ended: ("train", 3),
        "theirs": ("eval", None),
    }
    assert ended in table.stdout
    assert "running, last report" in table.stdout
    one = await shell.run("runs", ended)
    assert '"model": "tiny"' in one.stdout
    missing = await shell.run("runs", "nothing")
    assert (missing.returncode, "unknown run 'nothing'" in missing.stderr) == (2, True)


def test_a_quiet_run_counts_as_interrupted() -> None:
    """Without an end and a report for ten minutes."""
    view = RunView(name="a", kind=RunKind.TRAIN, created=0.0, updated=100.0)
    assert describe_state(view, 160.0) == "running, last report 60 s ago"
    assert describe_state(view, 100.0 + 3 * 3600) == "interrupted, last report 3 h ago"
