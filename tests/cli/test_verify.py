"""``tugline verify``: what it prints, and how it ends."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path

import pytest

from commands import run_command
from recording.verify.recorded import changed, read_in, rewritten, work


def verify(*options: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command, to its end."""
    return run_command("verify", *options, cwd=cwd)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one session, ``s1``."""
    folder = tmp_path_factory.mktemp("verify")
    asyncio.run(work(folder / "runs" / "one" / "recordings"))
    return folder


def test_a_session_by_its_id_is_told_turn_by_turn(run: Path) -> None:
    """One line per call, one per check, a sum, and exit code 0."""
    done = verify("s1", cwd=run)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[1:3] for line in lines if line and line[0] in {"1", "3"}] == [
        ["echo_changed", "arguments"],
        ["forked", "history_edited"],
    ]
    assert ["pass", "lineage"] in lines
    sums = (
        "sessions: 1, 0 failed; turns: 1 first, 1 exact, 1 echo_changed, 1 forked; checks: 5 pass"
    )
    assert done.stdout.splitlines()[-1] == sums


def test_json_has_every_turn_and_the_sum(run: Path) -> None:
    """One object on stdout, for a folder as for a session."""
    output = json.loads(verify(run, "--json").stdout)
    (session,) = output["sessions"]
    assert session["session"] == "s1"
    assert [turn["continuation"] for turn in session["turns"]] == [
        "first",
        "echo_changed",
        "exact",
        "forked",
    ]
    assert {check["verdict"] for check in session["checks"].values()} == {"pass"}
    assert output["summary"]["sessions"] == 1
    assert output["summary"]["failed"] == 0
    assert "max_dlogprob" in session["turns"][0]


def test_a_falsehood_is_exit_code_1(tmp_path: Path) -> None:
    """The line that fails names the call and what is wrong with it."""
    asyncio.run(work(tmp_path))
    path, recording = read_in(tmp_path)
    rewritten(path, recording, changed(3, branch=None))
    done = verify(path)
    assert done.returncode == 1
    assert "fail lineage: call 3 has only" in done.stdout


def test_damage_is_told_and_salvaged(tmp_path: Path) -> None:
    """Without `--salvage` the error with its offset; with it what stands before, and a note."""
    asyncio.run(work(tmp_path))
    path, _ = read_in(tmp_path)
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    done = verify(path)
    assert done.returncode == 1
    assert f"{path} is damaged at offset" in done.stdout
    done = verify(path, "--salvage", "--json")
    (session,) = json.loads(done.stdout)["sessions"]
    assert done.returncode == 0
    assert len(session["turns"]) == 3
    assert "is damaged at offset" in session["notes"][0]


@pytest.mark.parametrize(
    ("options", "code", "line"),
    [
        (["nobody"], 2, "there is no recording 'nobody', and no session of that id below runs/"),
        (["."], 2, "holds no recording (*.rec)"),
        (["s1", "--engine", "http://127.0.0.1:9"], 1, "no usable engine at http://127.0.0.1:9"),
        (["s1", "--tokenizer", "nowhere"], 2, "cannot read the tokenizer nowhere"),
    ],
)
def test_mistakes_are_told_in_one_line(
    options: list[str], code: int, line: str, run: Path, tmp_path: Path
) -> None:
    """No traceback, nothing on stdout."""
    done = verify(*options, cwd=run if options[0] == "s1" else tmp_path)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert line in done.stderr
    assert not done.stdout
