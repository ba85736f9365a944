"""``tugline up`` as a process, from the command line to saved results."""

from __future__ import annotations

import signal
import stat

from launch.processes import DATA, EXACT, World, task, write
from tugline.recording import file as recordings
from tugline.recording.trajectories import read_folder


def test_sessions_survive_a_killed_process(world: World) -> None:
    """After ``kill -9`` and a restart each result is there once, with its tokens."""
    up = ("up", "--port", "0", "--slots", "4", "--name", "n", "--engine", world.engine(), *EXACT)
    world.tugline("up", *up)
    world.wait_for_log("up", "node n is up")
    assert stat.S_IMODE((world.folder / DATA / "tokens.json").stat().st_mode) == 0o600
    tokens = (world.folder / DATA / "tokens.json").read_bytes()
    quick, slow = task("quick", samples=3), task("slow", turns=3, pause_s=0.5)
    world.ask("submit", write(world.folder / "tasks.jsonl", [quick, slow]))
    recorded = world.folder / DATA / "nodes/n/recordings"
    world.wait_until(lambda: any(recorded.glob("slow-0.*")), "up")
    world.end("up", signal.SIGKILL)
    world.tugline("up", *up)
    world.wait_for_log("up", "node n is up", times=2)
    world.ask("submit", "tasks.jsonl", "--wait")  # the tasks are known, so it only waits
    views = world.ask("results", "--out", "kept")
    assert {view["session"]: view["reward"] for view in views} == {
        f"{name}-{n}": 1.0 for name, samples in (("quick", 3), ("slow", 2)) for n in range(samples)
    }
    assert len(views) == 5
    saved = list(read_folder(world.folder / "kept/trajectories"))
    assert all(each.ledger.balanced and each.ledger.trained for each in saved)
    assert (world.folder / DATA / "tokens.json").read_bytes() == tokens
    assert world.end("up") == 0


def test_sigterm_drains_running_sessions_and_releases_queued_ones(world: World) -> None:
    """The running agent finishes and is committed; the others stay in the queue."""
    up = ("up", "--port", "0", "--slots", "1", "--engine", world.engine(), *EXACT)
    world.tugline("up", *up)
    world.wait_for_log("up", "is up: 1 slots")
    world.ask(
        "submit", write(world.folder / "t.jsonl", [task("t", samples=4, turns=3, pause_s=0.4)])
    )
    world.wait_until(lambda: _has_called(world, "t"), "up")
    assert world.end("up") == 0
    assert "draining" in world.read_log("up")
    world.tugline("up", "up", "--no-node", "--port", "0")
    world.wait_for_log("up", "no node has joined yet")
    (view,) = world.ask("status", "t")
    assert view["task"]["counts"] == {"completed": 1, "queued": 3}
    assert {session["attempt"] for session in view["sessions"]} == {0}
    assert world.end("up") == 0


def _has_called(world: World, name: str) -> bool:
    """Whether an agent of the task has called its model; before that a drain releases it."""
    paths = (world.folder / DATA).glob(f"nodes/*/recordings/{name}-*.rec")
    return any(recordings.read(path).calls for path in paths)
