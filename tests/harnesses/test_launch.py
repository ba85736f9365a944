"""Arguments, environment and files with which each harness starts its program."""

from __future__ import annotations

import json
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from tugline.errors import ConfigError, HarnessError
from tugline.harnesses.base import Launch, LaunchContext
from tugline.harnesses.codex import Codex
from tugline.harnesses.preset import Preset
from tugline.harnesses.shell import Shell
from tugline.plugins import find, make
from tugline.sandbox.base import Exit, Mount
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


def launch(name: str, instruction: str = CONTEXT.instruction, **options: Any) -> Launch:
    """The launch of a preset, as if the program were installed."""
    harness = make("harness", PluginSpec(name, options), Preset)
    harness.package._command = ("/program",)
    made: Launch = harness.launch(msgspec.structs.replace(CONTEXT, instruction=instruction))
    return made


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_gets_its_settings_and_stays_in_its_home(name: str) -> None:
    """Address, key, model and instruction are set, in files of the session; versions are exact."""
    made = launch(name)
    text = json.dumps([made.argv, made.env, made.files])
    assert all(word in text for word in (CONTEXT.base_url, "secret", CONTEXT.model, r"-n \"a\" @b"))
    assert made.env["HOME"] == "/h"
    assert not any(path.startswith("/") for path in made.files)
    with pytest.raises(
        ConfigError, match=f"harness '{name}': version is 'latest', must be an exact version"
    ):
        find("harness", name)(version="latest")
    with pytest.raises(HarnessError, match=f"harness '{name}' is not installed yet"):
        find("harness", name)().launch(CONTEXT)


def instruction_of(made: Launch) -> str:
    """The instruction that a program is started with: on stdin, or its last argument."""
    if made.argv[3:4] == ("/h/instruction.txt",):
        return made.files["instruction.txt"]
    return made.argv[-1].removeprefix("--prompt=")


@pytest.mark.parametrize("name", PRESETS)
def test_instructions_are_not_taken_for_commands(name: str) -> None:
    """A space is put before a leading slash, or @ for pi, which would be a command or a file."""
    slash = " /init it" if name in {"claude_code", "gemini_cli", "qwen_code"} else "/init it"
    assert instruction_of(launch(name, "/init it")) == slash
    assert instruction_of(launch(name, "@a it")) == (" @a it" if name == "pi" else "@a it")
    assert instruction_of(launch(name, "see /a and @b")) == "see /a and @b"


@pytest.mark.parametrize("name", PRESETS)
def test_an_instruction_longer_than_any_argument_is_read_from_a_file(name: str) -> None:
    """Linux limits arguments in bytes; a program that reads no file raises an error."""
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
    """The base URL has the part of the path that a program does not append, by API."""
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
    """Google's dialect is refused for mini-swe-agent, with the list of those that it has."""
    with pytest.raises(ConfigError, match="one of anthropic, openai_chat, openai_responses"):
        launch("mini_swe_agent", dialect="google")


def test_codex_has_its_network_features_off() -> None:
    """In TOML, every feature that contacts foreign hosts, or waits, is off."""
    config = tomllib.loads(launch("codex", context_window=9000).files[".codex/config.toml"])
    assert config["model_context_window"] == 9000
    assert config["web_search"] == "disabled"
    assert not any(config["features"].values())
    assert config["model_providers"]["tugline"]["wire_api"] == "responses"
    teams = tomllib.loads(launch("codex", sub_agents=True).files[".codex/config.toml"])
    assert [name for name, on in teams["features"].items() if on] == ["multi_agent"]


def test_codex_settings_quote_any_text() -> None:
    """Characters beyond the BMP, and DEL, survive; JSON and TOML escape them differently."""
    odd = '\U0001f680 \x7f \t" \\ é'
    for server in ({"command": odd, "args": [odd], "env": {odd: odd}}, {"url": odd}):
        files = launch("codex", mcp={"a": server}).files
        assert tomllib.loads(files[".codex/config.toml"])["mcp_servers"]["a"].items() >= (
            server.items()
        )


def test_claude_code_is_lean_by_default() -> None:
    """There are four tools and no moving cache markers; the window is set either way."""
    lean, full = launch("claude_code"), launch("claude_code", lean=False)
    assert lean.argv[lean.argv.index("--tools") + 1] == "Bash,Edit,Read,Write"
    assert lean.argv[lean.argv.index("--tools") + 2].startswith("-")
    assert "--tools" not in full.argv
    assert "--strict-mcp-config" in lean.argv
    assert lean.env["DISABLE_PROMPT_CACHING"] == "1"
    assert "DISABLE_PROMPT_CACHING" not in full.env
    assert lean.env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "131072"
    assert lean.env["IS_SANDBOX"] == full.env["IS_SANDBOX"] == "1"


SKILL = "---\nname: a-b\ndescription: What for.\n---\nHow.\n"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"mcp": {"a b": {"command": "x"}}}, r"mcp\.a b: a name consists of 1 to 40 letters"),
        ({"mcp": {"a": {}}}, r"mcp\.a must have either `command` .* or `url`"),
        ({"mcp": {"a": {"command": "x", "url": "http://y"}}}, "must have either `command`"),
        ({"mcp": {"a": {"cmd": "x"}}}, r"unknown key 'mcp\.a\.cmd'"),
        ({"skills": {"A B": SKILL}}, r"skills\['A B'\]: a name consists of lower-case letters"),
        ({"skills": {"a-b": "How."}}, "must be the text of a SKILL.md"),
    ],
)
def test_wrong_extensions_are_named(options: dict[str, Any], line: str) -> None:
    """The error names the option, its value and what is allowed."""
    with pytest.raises(ConfigError, match=line):
        launch("codex", **options)


def test_a_status_in_an_exit_code_is_not_a_crash() -> None:
    """Gemini CLI ends with the HTTP status modulo 256, and with 52 when it refuses its settings."""
    gemini = find("harness", "gemini_cli")()
    refused = Exit(52, timed_out=False, seconds=1.0)
    assert gemini.find_crash(refused, "") == "it rejected its settings"
    assert gemini.find_crash(Exit(144, timed_out=False, seconds=1.0), "Error 400") is None
    assert gemini.find_crash(Exit(0, timed_out=False, seconds=1.0), "Node.js v24.1.0") is None
    assert gemini.find_crash(Exit(-11, timed_out=True, seconds=1.0), "") is None


def test_shell_gives_each_sdk_its_variables() -> None:
    """OpenAI's SDK needs /v1 in its base URL, the others do not; the instruction is also a file."""
    launch = Shell(command=["agent", "--fast"], env={"MORE": "1"}).launch(CONTEXT)
    assert launch.argv == ("agent", "--fast")
    assert launch.env["OPENAI_BASE_URL"] == f"{CONTEXT.base_url}/v1"
    assert launch.env["ANTHROPIC_BASE_URL"] == CONTEXT.base_url
    assert (launch.env["OPENAI_API_KEY"], launch.env["OPENAI_MODEL"]) == ("secret", "m")
    assert launch.env["TUGLINE_INSTRUCTION"] == CONTEXT.instruction
    assert launch.env["MORE"] == "1"
    assert launch.files == {"instruction.txt": CONTEXT.instruction}


def test_shell_finds_scripts_where_tugline_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent runs in another folder, so the path of a script becomes absolute."""
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
    """The command's script and `folders` are at their own paths; no system folder is shown."""
    (tmp_path / "a.py").write_text("")
    monkeypatch.chdir(tmp_path)
    shell = Shell(command=[sys.executable, "a.py"], folders=["/opt/mine"])
    paths = (str(tmp_path / "a.py"), "/opt/mine")
    assert shell.mounts == tuple(Mount(path, path) for path in paths)
    with pytest.raises(ConfigError, match=r"folders has 'mine', must be an absolute path"):
        Shell(command="true", folders=["mine"])


def test_a_script_may_be_an_argument() -> None:
    """A script too long for the name of a file stays as it is."""
    command = ["python3", "-c", "print(1);" * 1000]
    assert list(Shell(command=command).launch(CONTEXT).argv) == command


def test_a_long_instruction_is_only_in_the_file() -> None:
    """No variable has a long instruction, with which Linux would start no program."""
    context = msgspec.structs.replace(CONTEXT, instruction="x" * 200_000)
    launch = Shell(command=["a"]).launch(context)
    assert "TUGLINE_INSTRUCTION" not in launch.env
    assert len(launch.files["instruction.txt"]) == 200_000


def test_a_setup_of_shell_has_the_forms_of_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A setup is a string for the shell or a list, and its files are mounted, too."""
    (tmp_path / "login.py").write_text("")
    monkeypatch.chdir(tmp_path)
    script = str(tmp_path / "login.py")
    assert Shell(command="agent").launch(CONTEXT).setup == ()
    line = Shell(command="agent", setup="python3 login.py")
    assert line.launch(CONTEXT).setup == ("sh", "-c", f"python3 {script}")
    assert line.mounts == (Mount(script, script),)
    assert Shell(command="agent", setup=["a", ""]).launch(CONTEXT).setup == ("a", "")


def test_shell_takes_what_its_program_needs_as_options() -> None:
    """Options set the status on which the program stops, whether it has tools, and its logs."""
    options = {"offers_tools": True, "spent_status": 401, "log_globs": [".agent/*.log"]}
    made = make("harness", PluginSpec("shell", {"command": "agent", **options}), Shell)
    assert (made.offers_tools, made.spent_status, list(made.log_globs)) == tuple(options.values())
    for wrong, error in (
        ({"spent_status": 200}, "spent_status is 200, must be an integer >= 400"),
        ({"log_globs": ["/var/log/*"]}, "log_globs has '/var/log/[*]', must be a path relative"),
        ({"log_globs": ["../a"]}, "log_globs has '../a', must be a path relative"),
        ({"offers_tools": "yes"}, "offers_tools is 'yes', must be true or false"),
    ):
        with pytest.raises(ConfigError, match=error):
            make("harness", PluginSpec("shell", {"command": "agent", **wrong}), Shell)


def test_a_setup_of_a_preset_is_its_own_program() -> None:
    """The setup, such as ``codex login``, is arguments of the program, with its variables."""

    @dataclass(kw_only=True, eq=False)
    class LoggedIn(Codex):
        def configure(self, context: LaunchContext) -> Launch:
            return msgspec.structs.replace(super().configure(context), setup=("login", "status"))

    harness = LoggedIn()
    harness.package._command = ("/node", "/program")
    made = harness.launch(CONTEXT)
    assert made.setup == ("/node", "/program", "login", "status")
    assert made.env["HOME"] == CONTEXT.home
    assert launch("codex").setup == ()


def test_the_example_from_npm_gets_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Address, key and model are in the program's file; the instruction is its last argument."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples" / "npm_agent")
    made = launch("continue_cli:ContinueCli", context_window=9000)
    config = yaml.safe_load(made.files["config.yaml"])
    (model,) = config["models"]
    assert (model["apiBase"], model["apiKey"], model["model"]) == (
        *(f"{CONTEXT.base_url}/v1", "secret"),
        "m",
    )
    assert model["defaultCompletionOptions"]["contextLength"] == 9000
    assert made.argv[-2:] == ("-p", CONTEXT.instruction)


def test_wrong_options_are_named() -> None:
    """The error of an empty command names what the command must have, a program."""
    for empty in ("", [], " "):
        with pytest.raises(ConfigError, match="must name a program"):
            Shell(command=empty)
