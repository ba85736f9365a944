"""``tugline replay``: reports, exit codes and the recordings that it writes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from replay.played import TURNS, observed, record, see_wallaby, tampered
from support.commands import run_command


def tugline(*options: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``tugline replay`` to its end."""
    tests = str(Path(__file__).parents[1])  # where the evaluator of these sessions is
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    return run_command("replay", *options, cwd=cwd, env={"PATH": path, "PYTHONPATH": tests})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one recorded run."""
    folder = tmp_path_factory.mktemp("work")
    asyncio.run(record(folder / "runs" / "one"))
    return folder


def test_a_session_is_replayed_by_its_id(run: Path) -> None:
    """Requests as recorded exit with code 0, and no recording is left behind."""
    before = sorted(run.rglob("*.rec"))
    done = tugline("s1", cwd=run)
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert first == "s1 by shell: 3 of 3 requests as recorded"
    assert "  reward: recorded 1, now 1" in rest
    assert sorted(run.rglob("*.rec")) == before


def test_a_difference_is_reported(run: Path, tmp_path: Path) -> None:
    """A difference is exit code 1, with its place and both versions; --keep keeps the recording."""
    recording = run / "runs" / "one" / "recordings" / "s1.0.rec"
    changed = tampered(recording, tmp_path / "tampered", see_wallaby)
    done = tugline(changed)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[0] == "s1 by shell: 1 of 3 requests answered, 1 differ"
    assert lines[1].startswith(
        "request 1, compared with call 1: message 3 (tool), the result of bash "
    )
    assert "cat one.txt" in lines[1]
    assert lines[2:4] == ["  - tool: wallaby", "  - <time>"]
    assert "  + tool: walrus" in lines
    output = tugline(changed, "--json", "--keep", tmp_path / "kept")
    assert output.returncode == 1
    (session,) = json.loads(output.stdout)["sessions"]
    assert (session["replayed"], session["differences"][0]["request"]) == (1, 1)
    assert Path(session["recording"]).is_relative_to(tmp_path / "kept")
    assert Path(session["recording"]).exists()


async def test_a_fork_is_kept_below_runs(run: Path) -> None:
    """The engine format is probed; each fork has a folder and a recording of its own."""
    async with observed(TURNS) as model:
        options = ("s1", "--fork-at", "2", "--engine", model.upstream.replicas[0].url)
        done = await asyncio.to_thread(tugline, *options, cwd=run)
        assert done.returncode == 0, done.stdout + done.stderr
        first, *_, last = done.stdout.splitlines()
        assert first == "s1-at2-0 by shell: 2 of 2 requests as recorded, then 1 live"
        assert last == "  runs/s1-at2/recordings/s1-at2-0.0.rec"
        again = await asyncio.to_thread(tugline, *options, cwd=run)
    assert again.stdout.splitlines()[-1] == "  runs/s1-at2-2/recordings/s1-at2-1.0.rec"
