"""``tugline up`` and ``tugline node`` as processes, from the command line to saved results."""

from __future__ import annotations

import signal
import stat

from launch.processes import DATA, EXACT, World, task, until, write
from tugline.recording import file as recordings
from tugline.recording.trajectories import read_folder


def test_everything_in_one_process_outlives_its_death(world: World) -> None:
    """Submit, kill -9 in the middle, start again: each result is there once, with its tokens."""
    up = ("up", "--port", "0", "--slots", "4", "--name", "n", "--engine", world.engine(), *EXACT)
    world.tugline("up", *up)
    world.up("up", "node n is up")
    assert stat.S_IMODE((world.folder / DATA / "tokens.json").stat().st_mode) == 0o600
    tokens = (world.folder / DATA / "tokens.json").read_bytes()
    quick, slow = task("quick", samples=3), task("slow", turns=3, pause_s=0.5)
    world.ask("submit", write(world.folder / "tasks.jsonl", [quick, slow]))
    recorded = world.folder / DATA / "nodes/n/recordings"
    until(lambda: any(recorded.glob("slow-0.*")), "a slow session", lambda: world.said("up"))
    world.end("up", signal.SIGKILL)
    world.tugline("up", *up)
    until(lambda: world.said("up").count("node n is up") == 2, "it again", lambda: world.said("up"))
    world.ask("submit", "tasks.jsonl", "--wait")  # the same again: nothing new, but it waits
    views = world.ask("results", "--out", "kept")
    assert {one["session"]: one["reward"] for one in views} == {
        f"{name}-{n}": 1.0 for name, many in (("quick", 3), ("slow", 2)) for n in range(many)
    }
    assert len(views) == 5
    saved = list(read_folder(world.folder / "kept/trajectories"))
    assert all(one.ledger.balanced and one.ledger.trained for one in saved)
    assert (world.folder / DATA / "tokens.json").read_bytes() == tokens
    assert world.end("up") == 0


def test_a_signal_drains_what_runs_and_hands_back_what_waits(world: World) -> None:
    """SIGTERM: the running agent finishes and is committed, the others stay in the queue."""
    up = ("up", "--port", "0", "--slots", "1", "--engine", world.engine(), *EXACT)
    world.tugline("up", *up)
    world.up("up", "is up: 1 slots")
    world.ask(
        "submit", write(world.folder / "t.jsonl", [task("t", samples=4, turns=3, pause_s=0.4)])
    )
    until(lambda: _running(world, "t"), "an agent", lambda: world.said("up"))
    assert world.end("up") == 0
    assert "draining" in world.said("up")
    world.tugline("up", "up", "--no-node", "--port", "0")
    world.up("up", "no node yet")
    (view,) = world.ask("status", "t")
    assert view["task"]["counts"] == {"completed": 1, "queued": 3}
    assert {one["attempt"] for one in view["sessions"]} == {0}
    assert world.end("up") == 0


def _running(world: World, name: str) -> bool:
    """Whether an agent of the task has made a call; a session that has not begun is given back."""
    found = (world.folder / DATA).glob(f"nodes/*/recordings/{name}-*.rec")
    return any(recordings.read(path).calls for path in found)
