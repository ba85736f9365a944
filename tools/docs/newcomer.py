"""Run all steps of a new user, time them, and draw the animated picture of the README.

    python3 -m venv /tmp/tools && /tmp/tools/bin/pip install aiohttp hatchling pillow pyte
    /tmp/tools/bin/python tools/docs/newcomer.py /tmp/newcomer     # working folder

The steps: a wheel of this checkout, built with hatchling, is installed into a new environment; the
demo runs; the tutorial (`docs/start/train-your-agent.md`) is followed with its own files and
commands; the console is opened while its sessions run, after their end, and during the training.

Commands are typed into a real bash on a pseudo-terminal, with a new home folder, without caches and
without this machine's settings of pip. Their output is recorded with the time of each piece. It is
drawn unchanged, except that the token in the console's address is replaced by three dots. The
prompt is coloured, each step begins with an empty screen, long waits are shortened, and the caption
has their true duration. All commands are timed; those with the same content as the console are not
drawn.

The times are written to `docs/newcomer.json`, the picture to `docs/newcomer.webp`. A step that the
working folder has already is not repeated: to repeat it, remove its file, or the folder. Needs a
Chromium (`make test-browser` installs one) and bash, besides the packages above.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from newcomer_console import visit, visit_training
from newcomer_picture import draw
from newcomer_terminal import Command, Step, Terminal

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "start" / "train-your-agent.md"
BLOCK = re.compile(r'^```(\w+)(?: title="([\w.]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
OWN = re.compile(r"TUGLINE_|XDG_|PIP_C(?!ERT)|PIP_EXTRA|VIRTUAL_ENV|PYTHON|PS1|PROMPT")
"""Environment variables of the current user that a new user does not have."""
DEMO, MINE = "tugline-demo", "my-agent"
"""Folders of the new user."""


class Walk:
    """The steps of a new user with its own home folder; `work` has a record of each."""

    def __init__(self, work: Path) -> None:
        self.work, self.home = work, work / "home"
        self.demo, self.mine = self.home / DEMO, self.home / MINE
        for folder in (self.demo, self.mine):
            folder.mkdir(parents=True, exist_ok=True)

    def terminal(self, folder: Path, *, activated: bool = True) -> Terminal:
        """Open a terminal, by default with the virtual environment activated."""
        path = os.pathsep.join(
            each for each in os.environ["PATH"].split(os.pathsep) if "venv" not in each
        )
        inherited = {key: value for key, value in os.environ.items() if not OWN.match(key)}
        own = {
            "HOME": str(self.home), "PATH": path, "PIP_CONFIG_FILE": os.devnull,
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }  # fmt: skip
        shell = Terminal(inherited | own, folder)
        if activated:
            shell.run(f". ~/{DEMO}/.venv/bin/activate")
        return shell

    def step(self, name: str, title: str, run: Callable[[], list[Command]]) -> Step:
        """Return the record of a step; run the step if there is none."""
        file = self.work / f"{name}.json"
        if not file.exists():
            print(f"{name} ...", flush=True)
            commands = run()
            Step(name, title, round(os.getloadavg()[0], 1), commands).write(file)
        step = Step.read(file)
        print(f"{name}: {step.seconds:.1f} s", flush=True)
        return step

    def install(self) -> list[Command]:
        """Build the wheel, and install it with the extra of the demo."""
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", self.demo]
        subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
        [wheel] = self.demo.glob("*.whl")
        shutil.copy(ROOT / "constraints.txt", self.demo)
        with self.terminal(self.demo, activated=False) as shell:
            return [
                shell.run("ls"),
                shell.run("python3 -m venv .venv"),
                shell.run(". .venv/bin/activate"),
                shell.run(f'pip install -q -c constraints.txt "./{wheel.name}[demo]"'),
                shell.run("tugline --version"),
            ]

    def try_demo(self) -> list[Command]:
        """Run the demo."""
        with self.terminal(self.demo) as shell:
            return [shell.run("tugline demo --steps 4 --heldout 32 --minutes 15", 1500)]

    def list_commands(self) -> list[str]:
        """Write the tutorial's files; return its commands."""
        commands = []
        for kind, name, body in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
            if name:
                (self.mine / name).write_text(body, encoding="utf-8")
            if kind == "console":
                commands += re.findall(r"^\$ (.*)$", body, re.MULTILINE)
        return commands

    def follow(self, lines: list[str]) -> list[Command]:
        """Run commands of the tutorial."""
        with self.terminal(self.mine) as shell:
            return [shell.run(line) for line in lines]

    def serve(self, lines: list[str]) -> list[Command]:
        """Start a server, submit from another terminal, and take pictures of the console."""
        with self.terminal(self.mine) as first, self.terminal(self.mine) as second:
            server = first.start("tugline up")
            try:
                link = first.follow(server, r"http://\S+#token=[\w.-]+", 120)[0]
                first.follow(server, r"is up: \d+ slots[^\n]*\n", 120)
                submit = second.start(lines[0])
                asyncio.run(visit(link, self.work, lambda: second.finish(submit, 600)))
                if submit.code:
                    raise RuntimeError(submit.describe())
                rest = [second.run(line) for line in lines[1:]]
            finally:
                first.interrupt(server)
        return [server, submit, *rest]

    def learn(self, lines: list[str]) -> list[Command]:
        """Train, and take pictures of the training's page meanwhile."""
        with self.terminal(self.mine) as shell:
            train = shell.start(lines[0])
            link = shell.follow(train, r"http://\S+#token=[\w.-]+", 120)[0]
            asyncio.run(visit_training(link, self.work, lambda: shell.finish(train, 900)))
            if train.code:
                raise RuntimeError(train.describe())
            return [train, *(shell.run(line) for line in lines[1:])]


def describe_machine() -> dict[str, object]:
    """Describe the machine of the measurement."""
    cpu = platform.processor() or platform.machine()
    if (info := Path("/proc/cpuinfo")).exists():
        cpu = re.findall(r"model name\s*: (.*)", info.read_text(encoding="utf-8"))[0]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cpu": cpu, "cores": cores, "system": platform.system(), "gpu": "not used"}


def main(work: Path) -> None:
    """Run all steps, then write times and picture."""
    walk = Walk(work.resolve())
    steps = [
        walk.step("install", "Install the wheel", walk.install),
        walk.step("demo", "The demo: train an agent", walk.try_demo),
    ]
    began = (walk.work / "install.json").stat().st_mtime
    lines = walk.list_commands()
    up, submit, train, evaluate = (
        next(at for at, line in enumerate(lines) if line.startswith(f"tugline {name}"))
        for name in ("up", "submit", "train", "eval")
    )
    steps += [
        walk.step("tasks", "Your own agent and tasks", lambda: walk.follow(["ls", *lines[:up]])),
        walk.step("serve", "Try the agent, and watch", lambda: walk.serve(lines[submit:train])),
        walk.step("train", "Train it, and watch", lambda: walk.learn(lines[train:evaluate])),
        walk.step("eval", "Use what was learned", lambda: walk.follow(lines[evaluate:])),
    ]
    times = {
        "date": datetime.fromtimestamp(began, UTC).date().isoformat(),
        "machine": describe_machine(),
        "steps": [
            {
                "step": step.name, "seconds": round(step.seconds, 1), "load": step.load,
                "commands": {each.line: round(each.seconds, 1) for each in step.commands},
            }
            for step in steps
        ],
    }  # fmt: skip
    text = json.dumps(times, indent=2, ensure_ascii=False) + "\n"
    (ROOT / "docs" / "newcomer.json").write_text(text, encoding="utf-8")
    loads = [step.load for step in steps]
    where = (
        f"{times['date']}, {os.cpu_count()} CPU cores that other programs used as well "
        f"(load {min(loads):.0f} to {max(loads):.0f}), no GPU"
    )
    picture = asyncio.run(draw(steps, walk.work, where))
    (ROOT / "docs" / "newcomer.webp").write_bytes(picture)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
