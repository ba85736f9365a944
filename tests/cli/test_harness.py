"""``tugline harness``: the list of harnesses and damaged installations."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from support.commands import run_command
from tugline.harnesses.install import install_dir, install_once
from tugline.plugins import BUILT_IN

tugline = partial(run_command, "harness")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty installation folder."""
    monkeypatch.setenv("TUGLINE_CACHE", str(tmp_path))


def test_every_harness_is_listed_with_its_version() -> None:
    """The list has names, pinned versions and tested API dialects."""
    done = tugline("list")
    assert done.returncode == 0
    rows = {line.split()[0]: line for line in done.stdout.splitlines()[1:] if line.strip()}
    assert set(rows) >= set(BUILT_IN["harness"])
    assert "0.171.0" in rows["codex"]
    assert "openai_responses" in rows["codex"]


async def test_a_damaged_installation_is_reported() -> None:
    """Installed files are checked: a changed one is exit code 1 and must be removed by hand."""

    async def fill(fresh: Path) -> None:
        (fresh / "program").write_text("right")

    for version in ("1.6.0", "1.7.0"):
        await install_once(install_dir() / f"pi-{version}", fill)
    (install_dir() / "pi-1.7.0" / "program").write_text("wrong")
    done = tugline("list", "--json")
    assert done.returncode == 1
    report = [row for row in json.loads(done.stdout)["harnesses"] if row["name"] == "pi"]
    assert [(row["version"], row["pinned"], row["sound"]) for row in report] == [
        ("1.6.0", True, True),
        ("1.7.0", False, False),
    ]
    assert report[0]["bytes"] == len("right")
    assert tugline("list").returncode == 1
    again = tugline("install", "pi", "--version", "1.7.0")
    assert (again.returncode, again.stdout) == (1, "")
    assert "pi 1.7.0 was modified: remove" in again.stderr


AGENT = Path(__file__).resolve().parents[2] / "examples" / "agents" / "openai_loop.py"


def test_a_harness_of_ones_own_is_checked() -> None:
    """An agent passes all checks if the options name the tool that runs a command."""
    options = json.dumps({"command": ["python3", str(AGENT)]})
    own = ("tugline.harnesses.shell:Shell", "--tool", "bash", "--options", options)
    done = tugline("check", *own, "--runtime", "local", "--json")
    (result,) = json.loads(done.stdout)["results"]
    assert (done.returncode, set(result["checks"].values())) == (0, {"pass"}), result
    assert (result["dialect"], result["turns"], result["exact_turns"]) == ("openai_chat", 4, 4)
    other = tugline("check", *own, "--argument", "cmd", "--runtime", "local", "--json")
    (result,) = json.loads(other.stdout)["results"]
    assert other.returncode == 1
    assert result["checks"]["tool_call_executed"].startswith("fail: ")


def test_a_check_without_a_tool_says_what_to_give() -> None:
    """A harness that is not a preset needs a tool; the error names what is missing or wrong."""
    name = "tugline.harnesses.shell:Shell"
    for given, error in (
        ((name,), f"harness '{name}' has no known shell tool"),
        ((name, "--tool", "x", "--arguments", "[]"), "--arguments: the body is [], must be"),
        ((name, "--tool", "x", "--options", "{"), "--options is not valid JSON"),
        ((name, "--tool", "x"), "missing option 'command'"),
        (("nothing:Such", "--tool", "x"), "harness 'nothing:Such' cannot be loaded"),
    ):
        done = tugline("check", *given)
        assert (done.returncode, error in done.stderr) == (2, True), done
