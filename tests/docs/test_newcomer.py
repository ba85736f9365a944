"""The recorded first steps of a new user, which the README shows."""

import json
import os
import re
from pathlib import Path

import pytest
from newcomer_terminal import Step, Terminal, hide_token

ROOT = Path(__file__).resolve().parents[2]


def test_a_terminal_records_what_is_printed(tmp_path: Path) -> None:
    """Output, status and prompt are recorded; a failure is an error; Ctrl-C ends a server."""
    with Terminal({"PATH": os.environ["PATH"], "HOME": str(tmp_path)}, tmp_path) as shell:
        command = shell.run("echo grün; mkdir mine; cd mine")
        assert (command.prompt, command.code, shell.prompt) == ("~ $ ", 0, "~/mine $ ")
        assert "".join(text for _, text in command.events).splitlines()[1:] == ["grün"]
        with pytest.raises(RuntimeError, match=r"\$ false: exit status 1"):
            shell.run("false")
        server = shell.start("sh -c 'echo up; exec sleep 100'")  # one job: Ctrl-C ends all of it
        shell.follow(server, "\nup", 20)
        shell.interrupt(server)
        assert server.code == 130
        assert shell.run("true").code == 0
    Step("name", "title", 0.5, [command]).write(tmp_path / "step.json")
    assert Step.read(tmp_path / "step.json").seconds == command.seconds


def test_a_token_is_not_drawn() -> None:
    """The console's address is shown without its token."""
    assert hide_token("at http://host/#token=read.a-b_c\r\n") == "at http://host/#token=...\r\n"


def test_the_page_has_the_measured_times() -> None:
    """The table of the results equals the committed record."""
    steps = json.loads((ROOT / "docs/newcomer.json").read_text("utf-8"))["steps"]
    page = (ROOT / "docs/results.md").read_text("utf-8")
    rows = re.findall(r"^\| .* \| ([\d.]+) s \| [\d.]+ \|$", page, re.MULTILINE)
    assert rows == [f"{step['seconds']:.0f}" for step in steps]
