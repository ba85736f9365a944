from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from tugline.errors import ConfigError
from tugline.harnesses.base import LaunchContext
from tugline.harnesses.shell import Shell
from tugline.sandbox.base import Mount

CONTEXT = LaunchContext(
    instruction="Fix it",
    workdir="/w",
    home="/h",
    base_url="http://127.0.0.1:1/s/a",
    key="k",
    model="m",
)


def test_shell_gives_each_sdk_its_variables() -> None:
    """OpenAI's SDK wants /v1 in its base URL, the others do not; the instruction is also a file."""
    launch = Shell(command=["agent", "--fast"], env={"MORE": "1"}).launch(CONTEXT)
    assert launch.argv == ("agent", "--fast")
    assert launch.env["OPENAI_BASE_URL"] == "http://127.0.0.1:1/s/a/v1"
    assert launch.env["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:1/s/a"
    assert (launch.env["OPENAI_API_KEY"], launch.env["OPENAI_MODEL"]) == ("k", "m")
    assert launch.env["TUGLINE_INSTRUCTION"] == "Fix it"
    assert launch.env["MORE"] == "1"
    assert launch.files == {"instruction.txt": "Fix it"}


def test_shell_finds_scripts_where_tugline_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent runs in another folder, so a relative script is made absolute; other words stay."""
    folder = tmp_path / "my agents"
    folder.mkdir()
    (folder / "a.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert Shell(command=["python3", "my agents/a.py", "b.py"]).launch(CONTEXT).argv == (
        *("python3", str(folder / "a.py")),
        "b.py",
    )
    monkeypatch.chdir(folder)
    line = Shell(command="cd src && python3 a.py | tee out").launch(CONTEXT).argv
    assert line == ("sh", "-c", f"cd src && python3 '{folder}/a.py' | tee out")


def test_a_sandbox_shows_what_the_command_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its script and its `folders`, at their own paths; nothing of the system."""
    (tmp_path / "a.py").write_text("")
    monkeypatch.chdir(tmp_path)
    shell = Shell(command=[sys.executable, "a.py"], folders=["/opt/mine"])
    paths = (str(tmp_path / "a.py"), "/opt/mine")
    assert shell.mounts == tuple(Mount(path, path) for path in paths)
    with pytest.raises(ConfigError, match=r"folders names 'mine', must be an absolute path"):
        Shell(command="true", folders=["mine"])


def test_a_script_may_be_a_word() -> None:
    """No file has so long a name; the word stays what it is."""
    script = "print(1);" * 1000
    assert Shell(command=["python3", "-c", script]).launch(CONTEXT).argv == (
        "python3",
        "-c",
        script,
    )


def test_a_long_instruction_is_only_in_the_file() -> None:
    """The system would refuse to start a program with so large a variable."""
    context = msgspec.structs.replace(CONTEXT, instruction="x" * 200_000)
    launch = Shell(command=["a"]).launch(context)
    assert "TUGLINE_INSTRUCTION" not in launch.env
    assert len(launch.files["instruction.txt"]) == 200_000


def test_wrong_options_are_named() -> None:
    """A command must have a program in it."""
    for empty in ("", [], " "):
        with pytest.raises(ConfigError, match="must name a program"):
            Shell(command=empty)
