"""``tugline verify``: output and exit codes."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest

from recording.verify.recorded import changed, read_in, rewritten, work
from recording.view.synthetic import small
from support.commands import run_command

verify = partial(run_command, "verify")


async def test_a_session_is_verified_turn_by_turn(tmp_path: Path) -> None:
    """Each call and check is a line, or all are one JSON object; a failure is exit code 1."""
    await work(tmp_path / "runs" / "one" / "recordings")
    done = verify("s1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^ *1 +echo_changed +arguments ", done.stdout, re.MULTILINE)
    assert "  pass lineage\n" in done.stdout
    sums = (
        "sessions: 1, 0 failed; turns: 1 first, 1 exact, 1 echo_changed, 1 forked; checks: 5 pass"
    )
    assert done.stdout.splitlines()[-1] == sums
    output = json.loads(verify(tmp_path, "--json").stdout)
    (session,) = output["sessions"]
    turns = [(turn["continuation"], turn["detail"]) for turn in session["turns"]]
    assert turns == [
        ("first", ""), ("echo_changed", "arguments"), ("exact", ""), ("forked", "history_edited"),
    ]  # fmt: skip
    assert 0 < session["turns"][3]["shared"] < session["turns"][3]["prompt"]
    verdicts = {name: check["verdict"] for name, check in session["checks"].items()}
    assert verdicts == dict.fromkeys(("lineage", "text", "numbers", "ledger", "traces"), "pass")
    assert session["notes"] == ["no result is recorded"]
    assert (output["summary"]["sessions"], output["summary"]["failed"]) == (1, 0)
    path, recording = read_in(tmp_path)
    rewritten(path, recording, changed(3, branch=None))
    done = verify(path)
    assert done.returncode == 1
    assert "fail lineage: call 3 repeats only" in done.stdout


@pytest.mark.parametrize(
    ("command", "salvaged"), [("verify", "turns: 1 first, 1 exact;"), ("view", "I read it.")]
)
def test_damage_is_reported_and_salvaged(command: str, salvaged: str, tmp_path: Path) -> None:
    """The error names file and offset; `--salvage` prints it, and uses the calls before it."""
    path = small(tmp_path)
    data = bytearray(path.read_bytes())
    data[-len(data) // 4] ^= 255
    path.write_bytes(data)
    done = run_command(command, path)
    assert done.returncode == 1
    assert f"{path} is damaged at offset" in done.stdout + done.stderr
    output = run_command(command, path, "--salvage").stdout
    assert f"{path} is damaged at offset" in output
    assert salvaged in output
