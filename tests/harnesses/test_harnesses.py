from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import msgspec
import pytest

from tugline.errors import ConfigError, HarnessError, UsageError
from tugline.harnesses.base import LaunchContext
from tugline.harnesses.install import install_dir, install_once, measure, read_manifest
from tugline.harnesses.pi import Pi
from tugline.harnesses.shell import Shell
from tugline.sandbox.base import Mount
from tugline.sandbox.cache import cache_folder

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


def _program(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


ASKING = """
[ "$1" = --version ] && echo v22.19.0 && exit
exec python3 - <<'EOF'
import json, os, urllib.error, urllib.request
folder = os.environ["PI_CODING_AGENT_DIR"]
url = json.load(open(f"{folder}/models.json"))["providers"]["tugline"]["baseUrl"]
try:
    urllib.request.urlopen(f"{url}/chat/completions", data=b"{}")
except urllib.error.HTTPError:
    pass
EOF
"""
"""As much of Node, with pi in it, as a trial needs: it asks its model once."""
INSTALLING = """
mkdir -p node_modules/@earendil-works/pi-coding-agent
cd node_modules/@earendil-works/pi-coding-agent
touch cli.js && echo '{"bin": {"pi": "cli.js"}}' > package.json"""
"""As much of npm as an installation of pi needs."""


@pytest.fixture
def own_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Node and an npm of our own, and an empty cache."""
    monkeypatch.setenv("TUGLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}/usr/bin{os.pathsep}/bin")
    programs = (tmp_path / "bin" / "node", (str(tmp_path / "bin" / "npm"),))
    monkeypatch.setattr("tugline.harnesses.npm.find_node", lambda: programs)
    return tmp_path / "bin"


async def test_a_missing_node_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The person reads one command that mends it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(UsageError, match=r"need Node and npm .*; pip install 'tugline"):
        await Pi().install()


async def test_npm_that_fails_is_quoted_and_leaves_nothing(own_node: Path) -> None:
    """Its last words are in the error; the next try starts afresh."""
    _program(own_node, "node", "echo v22.19.0")
    _program(own_node, "npm", "mkdir half; echo 'ERR! ETARGET no such version' >&2; exit 1")
    with pytest.raises(HarnessError, match=r"exit 1\): ERR! ETARGET"):
        await Pi().install()
    assert [path.name for path in install_dir().glob("pi-*")] == ["pi-0.87.1.lock"]


async def test_two_that_install_at_once_install_once(own_node: Path) -> None:
    """The second waits for the lock and finds the work done."""
    _program(own_node, "node", ASKING)
    _program(own_node, "npm", f"echo x >> {cache_folder()}/count; sleep 0.2; {INSTALLING}")
    await asyncio.gather(Pi().install(), Pi().install())
    assert (cache_folder() / "count").read_text() == "x\n"


async def test_a_program_that_asks_no_model_is_not_installed(own_node: Path) -> None:
    """The error has its last words, and nothing of it stays."""
    _program(own_node, "node", "[ $1 = --version ] && echo v22.19.0 || echo 'no such thing'")
    _program(own_node, "npm", INSTALLING)
    with pytest.raises(HarnessError, match=r"pi 0\.87\.1 .* asked no model: no such thing"):
        await Pi().install()
    assert not (install_dir() / "pi-0.87.1").exists()


async def test_a_changed_file_is_seen(tmp_path: Path) -> None:
    """The seal is of every file's path, mode and content; a folder without one is made again."""

    async def fill(fresh: Path) -> None:
        (fresh / "program").write_text("right")
        (fresh / "link").symlink_to("program")

    folder = tmp_path / "x-1"
    await install_once(folder, fill)
    assert read_manifest(folder) == measure(folder)
    (folder / "program").chmod(0o755)
    assert read_manifest(folder) != measure(folder)
    (folder / "program").chmod(0o644)
    (folder / "program").write_text("wrong")
    assert read_manifest(folder) != measure(folder)
    (folder / "tugline.json").unlink()
    await install_once(folder, fill)
    assert (folder / "program").read_text() == "right"
    assert read_manifest(folder) == measure(folder)
