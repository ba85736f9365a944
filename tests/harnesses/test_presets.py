"""What each preset starts its program with; installation itself is judged by the long suite."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tugline.errors import ConfigError, DiskFull, HarnessError
from tugline.harnesses import install
from tugline.harnesses.base import Launch, LaunchContext
from tugline.harnesses.install import install_once
from tugline.harnesses.mini_swe_agent import PythonPackage
from tugline.harnesses.npm import Npm
from tugline.harnesses.preset import Preset
from tugline.plugins import find, make
from tugline.rollout.parts import Parts
from tugline.sandbox.base import Exit
from tugline.types import PluginSpec

CONTEXT = LaunchContext(
    instruction='-n "a" @b',
    workdir="/w",
    home="/h",
    base_url="http://127.0.0.1:1/s/a",
    key="secret",
    model="m",
)
PRESETS = ["claude_code", "codex", "gemini_cli", "mini_swe_agent", "opencode", "pi", "qwen_code"]


async def no_trial(_: Path) -> None:
    """Nothing is started."""


def launch(name: str, instruction: str = CONTEXT.instruction, **options: Any) -> Launch:
    """As if the program were installed."""
    harness = make("harness", PluginSpec(name, options), Preset)
    harness.package._command = ("/program",)
    made: Launch = harness.launch(msgspec.structs.replace(CONTEXT, instruction=instruction))
    return made


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_gets_all_and_keeps_to_its_home(name: str) -> None:
    """Address, key, model and instruction arrive; settings are the session's own; versions too."""
    made = launch(name)
    text = json.dumps([made.argv, made.env, made.files])
    assert all(word in text for word in (CONTEXT.base_url, "secret", CONTEXT.model, r"-n \"a\" @b"))
    assert made.env["HOME"] == "/h"
    assert not any(path.startswith("/") for path in made.files)
    with pytest.raises(ConfigError, match=f"harness '{name}': version is 'latest', must be exact"):
        find("harness", name)(version="latest")
    with pytest.raises(HarnessError, match=f"harness '{name}' is not installed yet"):
        find("harness", name)().launch(CONTEXT)


def instruction_of(made: Launch) -> str:
    """The instruction that a program is started with: on stdin, or its last argument."""
    if made.argv[3:4] == ("/h/instruction.txt",):
        return made.files["instruction.txt"]
    return made.argv[-1].removeprefix("--prompt=")


@pytest.mark.parametrize("name", PRESETS)
def test_an_instruction_is_no_command_of_the_program(name: str) -> None:
    """Three take a slash in front for theirs, and pi an @ for a file: not after a space."""
    slash = " /init it" if name in {"claude_code", "gemini_cli", "qwen_code"} else "/init it"
    assert instruction_of(launch(name, "/init it")) == slash
    assert instruction_of(launch(name, "@a it")) == (" @a it" if name == "pi" else "@a it")
    assert instruction_of(launch(name, "see /a and @b")) == "see /a and @b"


@pytest.mark.parametrize("name", PRESETS)
def test_an_instruction_longer_than_any_argument_is_read_from_a_file(name: str) -> None:
    """Linux has a limit in bytes; who can take it in no other way says so."""
    short, long = "é" * 65_500, "é" * 65_501
    assert instruction_of(launch(name, short)) == short
    if name == "mini_swe_agent":
        with pytest.raises(ConfigError, match="is 131002 bytes long, must be at most 131000"):
            launch(name, long)
        return
    made = launch(name, long)
    assert made.argv[0] == "sh"
    assert instruction_of(made) == long
    assert all(len(word) < 1000 for word in made.argv)


@pytest.mark.parametrize(
    ("dialect", "of_pi", "of_opencode"),
    [
        ("openai_chat", ("openai-completions", "/v1"), ("openai-compatible", "/v1")),
        ("openai_responses", ("openai-responses", "/v1"), ("openai", "/v1")),
        ("anthropic", ("anthropic-messages", ""), ("anthropic", "/v1")),
        ("google", ("google-generative-ai", "/v1beta"), ("google", "/v1beta")),
    ],
)
def test_each_dialect_is_spoken_where_it_is_served(
    dialect: str, of_pi: tuple[str, str], of_opencode: tuple[str, str]
) -> None:
    """Programs append only part of the path, another one for each of their APIs."""
    made = launch("pi", dialect=dialect, tools=["read", "edit"])
    provider = json.loads(made.files[".pi/agent/models.json"])["providers"]["tugline"]
    assert (provider["api"], provider["baseUrl"]) == (of_pi[0], CONTEXT.base_url + of_pi[1])
    assert made.argv[made.argv.index("--tools") + 1] == "read,edit"
    config = json.loads(launch("opencode", dialect=dialect).files[".config/opencode/opencode.json"])
    provider = config["provider"]["tugline"]
    assert provider["npm"] == f"@ai-sdk/{of_opencode[0]}"
    assert provider["options"] == {"baseURL": CONTEXT.base_url + of_opencode[1], "apiKey": "secret"}
    assert config["agent"] == {"title": {"disable": True}}


def test_an_unknown_dialect_lists_the_known_ones() -> None:
    """mini-swe-agent has no Google model class, and says what it has."""
    with pytest.raises(ConfigError, match="one of anthropic, openai_chat, openai_responses"):
        launch("mini_swe_agent", dialect="google")


def test_codex_keeps_to_itself() -> None:
    """Its settings are TOML with every feature that asks for foreign hosts, or waits, off."""
    config = tomllib.loads(launch("codex", context_window=9000).files[".codex/config.toml"])
    assert config["model_context_window"] == 9000
    assert config["web_search"] == "disabled"
    assert not any(config["features"].values())
    assert config["model_providers"]["tugline"]["wire_api"] == "responses"
    teams = tomllib.loads(launch("codex", sub_agents=True).files[".codex/config.toml"])
    assert [name for name, on in teams["features"].items() if on] == ["multi_agent"]


def test_any_text_is_a_text_in_the_settings_of_codex() -> None:
    """Beyond the BMP, and DEL, which JSON writes otherwise than TOML or not at all."""
    odd = '\U0001f680 \x7f \t" \\ é'
    for server in ({"command": odd, "args": [odd], "env": {odd: odd}}, {"url": odd}):
        files = launch("codex", mcp={"a": server}).files
        assert tomllib.loads(files[".codex/config.toml"])["mcp_servers"]["a"].items() >= (
            server.items()
        )


def test_claude_code_is_lean_by_default() -> None:
    """Lean: four tools and no moving cache markers; the window is set either way."""
    lean, full = launch("claude_code"), launch("claude_code", lean=False)
    assert lean.argv[lean.argv.index("--tools") + 1] == "Bash,Edit,Read,Write"
    assert lean.argv[lean.argv.index("--tools") + 2].startswith("-")
    assert "--tools" not in full.argv
    assert lean.env["DISABLE_PROMPT_CACHING"] == "1"
    assert "DISABLE_PROMPT_CACHING" not in full.env
    assert lean.env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "131072"
    assert lean.env["IS_SANDBOX"] == full.env["IS_SANDBOX"] == "1"


async def test_an_installation_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """The folder is there when it is whole, and not before."""

    async def broken(fresh: Path) -> None:
        (fresh / "half").write_text("")
        msg = "no network"
        raise HarnessError(msg)

    with pytest.raises(HarnessError, match="no network"):
        await install_once(tmp_path / "x-1", broken)
    assert os.listdir(tmp_path) == ["x-1.lock"]  # noqa: PTH208 - quick, in a test


async def test_what_a_killed_installation_left_is_removed(tmp_path: Path) -> None:
    """Its half-made folders, by the next one; nothing else that lies there."""
    for name in ("x-1.ab12", "x-1.cd34", "x-10.ab12", "y-1"):
        (tmp_path / name / "new").mkdir(parents=True)

    async def fill(fresh: Path) -> None:
        assert fresh.parent.name not in {"x-1.ab12", "x-1.cd34"}

    await install_once(tmp_path / "x-1", fill)
    there = os.listdir(tmp_path)  # noqa: PTH208 - quick, in a test
    assert set(there) == {"x-1", "x-1.lock", "x-10.ab12", "y-1"}


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/usr/bin/python"),
        shutil.Error([("/a", "/b", "[Errno 28] No space left on device: '/b'")]),
        HarnessError("npm could not install x (exit 228): npm error code ENOSPC: no space left"),
    ],
    ids=["one file", "a tree", "npm"],
)
async def test_a_full_disk_names_the_install_folder(tmp_path: Path, error: Exception) -> None:
    """Not that of the file which was to be copied."""

    async def full(_: Path) -> None:
        raise error

    with pytest.raises(DiskFull, match=rf"cannot install x-1: no room in {tmp_path} "):
        await install_once(tmp_path / "x-1", full)


PACKAGE = """mkdir -p node_modules/x/lib && cd node_modules/x && touch lib/cli.js
echo '{"bin": %s}' > package.json"""


@pytest.mark.parametrize("declared", ['"./lib/cli.js"', '{"x": "lib/cli.js", "y": "y.js"}'])
async def test_the_program_is_the_one_that_the_package_declares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, declared: str
) -> None:
    """Versions of one harness call it differently: qwen-code's was ``cli.js`` once."""
    fake_npm(tmp_path, monkeypatch, PACKAGE % declared)
    package = Npm("x", "x", "1.2.3")
    await package.install(no_trial)
    assert Path(package.command[-1]).name == "cli.js"


async def test_a_package_without_its_program_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The installer succeeded, yet what was promised is not there."""
    fake_npm(tmp_path, monkeypatch, "exit 0")
    with pytest.raises(HarnessError, match=r"could not install x@1\.2\.3: it has no program"):
        await Npm("x", "x", "1.2.3").install(no_trial)


def fake_npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, npm: str) -> None:
    """The only npm there is, as a shell script."""
    monkeypatch.setenv("TUGLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    programs = (tmp_path / "node", (str(tmp_path / "npm"),))
    monkeypatch.setattr("tugline.harnesses.npm.find_node", lambda: programs)
    for program, script in (("node", "echo v24.0.0"), ("npm", npm)):
        (tmp_path / program).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / program).chmod(0o755)


async def test_pip_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last words are in the error, with what it was asked for."""
    monkeypatch.setenv("TUGLINE_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(HarnessError, match=r"cannot install no-such-package==9\.9\.9 \(exit 1\)"):
        await PythonPackage("x", "no-such-package", "9.9.9").install(no_trial)


MCP = {
    "here": {"command": "python3", "args": ["-m", "it"], "env": {"KEY": 'a "b"'}},
    "far": {"url": "http://tools.test/mcp", "headers": {"authorization": "x"}},
}
SKILL = "---\nname: a-b\ndescription: What for.\n---\nHow.\n"


async def test_libraries_are_put_beside_what_lies_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Python that needs libraries has its standard library in the same folder, ``lib``."""
    library = tmp_path / "libown.so.1"
    library.write_bytes(b"ELF")
    (tmp_path / "python/lib/python3.11").mkdir(parents=True)
    program = tmp_path / "python/bin/python3.11"
    asked: list[str] = []

    async def find_needed(_program: Path) -> dict[str, Path]:
        return {"libc.so.6": Path("/lib/libc.so.6"), library.name: library}

    async def take(_purpose: str, *argv: str, **_options: Any) -> str:
        asked.extend(argv[4:] if argv[1] == "--force-rpath" else ())
        return ""

    monkeypatch.setattr(install, "_find_needed", find_needed)
    monkeypatch.setattr(install, "run_installer", take)
    await install.bundle_libraries(program, tmp_path / "python", [])
    assert asked == [str(program), str(tmp_path / "python/lib" / library.name)]
    assert (tmp_path / "python/lib" / library.name).read_bytes() == b"ELF"


@pytest.mark.parametrize("name", ["claude_code", "codex", "gemini_cli", "opencode", "qwen_code"])
def test_mcp_servers_are_written_in_each_program_s_own_format(name: str) -> None:
    """What is started and what is asked over HTTP, with variables and headers."""
    made = launch(name, mcp=MCP)
    here, there = ("python3", ["-m", "it"], {"KEY": 'a "b"'}), {"authorization": "x"}
    if name == "codex":
        found = tomllib.loads(made.files[".codex/config.toml"])["mcp_servers"]
        assert found["far"] == {"url": "http://tools.test/mcp", "http_headers": there}
    elif name == "claude_code":
        found = json.loads(made.files["mcp.json"])["mcpServers"]
        assert found["far"] == {"type": "http", "url": "http://tools.test/mcp", "headers": there}
        at = made.argv.index("--mcp-config")
        assert made.argv[at + 1 : at + 3] == ("/h/mcp.json", "--strict-mcp-config")
    elif name == "opencode":
        found = json.loads(made.files[".config/opencode/opencode.json"])["mcp"]
        assert found["far"] == {"type": "remote", "url": "http://tools.test/mcp", "headers": there}
        command = ["python3", "-m", "it"]
        assert found["here"] == {"type": "local", "command": command, "environment": here[2]}
        return
    else:
        settings = f".{name.split('_', maxsplit=1)[0]}/settings.json"
        found = json.loads(made.files[settings])["mcpServers"]
        assert (found["far"]["httpUrl"], found["far"]["headers"]) == (MCP["far"]["url"], there)
    assert (found["here"]["command"], found["here"]["args"], found["here"]["env"]) == here


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("claude_code", ".claude"),
        ("codex", ".codex"),
        ("gemini_cli", ".gemini"),
        ("opencode", ".config/opencode"),
        ("pi", ".pi/agent"),
        ("qwen_code", ".qwen"),
    ],
)
def test_skills_lie_where_each_program_looks(name: str, folder: str) -> None:
    """As SKILL.md in a folder of its name."""
    assert launch(name, skills={"a-b": SKILL}).files[f"{folder}/skills/a-b/SKILL.md"] == SKILL


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"mcp": {"a b": {"command": "x"}}}, r"mcp\.a b: a name has letters"),
        ({"mcp": {"a": {}}}, r"mcp\.a must have either command .* or url"),
        ({"mcp": {"a": {"command": "x", "url": "http://y"}}}, "must have either command"),
        ({"mcp": {"a": {"cmd": "x"}}}, r"unknown key 'mcp\.a\.cmd'"),
        ({"skills": {"A B": SKILL}}, r"skills\['A B'\]: a name has small letters"),
        ({"skills": {"a-b": "How."}}, "must be the text of a SKILL.md"),
    ],
)
def test_wrong_extensions_are_named(options: dict[str, Any], line: str) -> None:
    """The option, the value and what would be right, where the task is accepted."""
    with pytest.raises(ConfigError, match=line):
        launch("codex", **options)


def test_what_a_program_does_not_know_is_no_option_of_its_preset() -> None:
    """Pi has no MCP servers: the error lists what it has."""
    with pytest.raises(ConfigError, match=r"there is no option 'mcp' \(its options: .*"):
        Parts().harness(PluginSpec("pi", {"mcp": MCP}))


def test_a_status_in_an_exit_code_is_no_crash() -> None:
    """Gemini CLI ends with the HTTP status modulo 256, and with 52 when it refuses its settings."""
    gemini = find("harness", "gemini_cli")()
    refused = Exit(52, timed_out=False, seconds=1.0)
    assert gemini.find_crash(refused, "") == "it refused its settings"
    assert gemini.find_crash(Exit(144, timed_out=False, seconds=1.0), "Error 400") is None
    assert gemini.find_crash(Exit(0, timed_out=False, seconds=1.0), "Node.js v24.1.0") is None
    assert gemini.find_crash(Exit(-11, timed_out=True, seconds=1.0), "") is None
