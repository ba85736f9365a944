"""Build the documentation site in a folder (default `site`), for `make docs`.

The site consists of README.md, docs/, examples/ and deploy/, in the order of mkdocs.yml, and of
three generated reference pages: the command line (from the help of each command), the configuration
(from the docstring of each field) and Python (from docstrings).

MkDocs has its own environment below ``$TUGLINE_CACHE``, pinned by requirements.txt, because users
of Tugline do not need it. The build is strict: pages missing in the navigation and broken links or
anchors are errors.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from config_table import describe
from cyclopts.docs import generate_markdown_docs

import tugline
from tugline.cli.app import make_app
from tugline.config import Config
from tugline.demo.run import DemoSettings
from tugline.launch.settings import Settings
from tugline.trainers.config import TrainConfig
from tugline.trainers.sft import SftRunConfig

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PINS = HERE / "requirements.txt"
CACHE = Path(os.environ.get("TUGLINE_CACHE") or Path.home() / ".cache" / "tugline").expanduser()
PARTS = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "docs", "examples", "deploy")
FILES: dict[str, type[Config]] = {
    "`tugline up`, `node` and `run`": Settings,
    "`tugline train`": TrainConfig,
    "`tugline sft`": SftRunConfig,
    "`tugline demo --config`": DemoSettings,
}
PYTHON = {
    "Clients, tasks and results": [f"tugline.{name}" for name in tugline.__all__],
    "Groups for any trainer": ["tugline.stream.GroupStream", "tugline.stream.GradedGroup"],
    "Recordings and results on disk": [
        "tugline.recording.trajectories.read_folder",
        "tugline.recording.trajectories.rebuild",
    ],
    "Contracts of plug-ins": [
        "tugline.harnesses.base.Harness",
        "tugline.evaluators.base.Evaluator",
        "tugline.datasets.base.TaskSet",
        "tugline.sandbox.base.Runtime",
        "tugline.sandbox.base.Sandbox",
        "tugline.traces.base.Builder",
        "tugline.exports.base.RowWriter",
        "tugline.trainers.sinks.Sink",
    ],
}


def prepare() -> Path:
    """Install the pinned packages unless they are installed; return the environment's Python."""
    digest = hashlib.blake2b(PINS.read_bytes(), digest_size=8).hexdigest()
    home = CACHE.absolute() / "docs"
    home.mkdir(parents=True, exist_ok=True)
    stamp, python = home / "ready", home / "bin" / "python"
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists() or stamp.read_text(encoding="utf-8") != digest:
            print("docs: installing MkDocs (170 MB on disk)", file=sys.stderr, flush=True)
            stamp.unlink(missing_ok=True)
            venv.EnvBuilder(with_pip=True, clear=False).create(home)
            command = [python, "-m", "pip", "--disable-pip-version-check", "--no-input", "install"]
            done = subprocess.run(
                [*command, "--no-deps", "--requirement", PINS],
                stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
            )  # fmt: skip
            if done.returncode:
                sys.exit(f"docs: pip failed:\n{done.stderr}")
            stamp.write_text(digest, encoding="utf-8")
    return python


def stage(pages: Path) -> None:
    """Copy and generate all pages of the site in `pages`."""
    ignored = shutil.ignore_patterns("tasks", "__pycache__", ".*")
    for name in PARTS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, pages / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, pages / name)
    reference = pages / "docs" / "reference"
    reference.mkdir()
    (reference / "cli.md").write_text(describe_commands(), encoding="utf-8")
    (reference / "keys.md").write_text(describe_files(), encoding="utf-8")
    (reference / "python.md").write_text(describe_python(), encoding="utf-8")


def describe_commands() -> str:
    """Return a page with the help of every command."""
    text = generate_markdown_docs(make_app(), generate_toc=False)
    # anchors of the site keep every hyphen of a heading, unlike the links that cyclopts makes
    text = text.replace("(#tugline-completion)", "(#tugline---completion)")
    return text.replace("# tugline\n", "# The command line\n", 1)


def describe_files() -> str:
    """Return a page with a table of all keys for each kind of configuration file."""
    parts = [
        "# Every key\n",
        "[Configuration](../configuration.md) explains how to use each file.\n",
    ]
    for title, kind in FILES.items():
        rows = [re.sub(r"\]\((?!\w+:)", "](../", row) for row in describe(kind)]
        head = ["| key | type | default | meaning |", "|---|---|---|---|"]
        parts.append("\n".join([f"## {title}", "", *head, *rows, ""]))
    return "\n".join(parts)


def describe_python() -> str:
    """Return a page of directives, which mkdocstrings replaces by signatures and docstrings."""
    parts = ["# Python\n"]
    for title, names in PYTHON.items():
        parts += [f"## {title}\n", *(f"::: {name}\n" for name in names)]
    return "\n".join(parts)


def build(site: Path) -> int:
    """Build the site in `site`; return the exit code of MkDocs."""
    python = prepare()
    with tempfile.TemporaryDirectory() as folder:
        pages = Path(folder) / "pages"
        pages.mkdir()
        stage(pages)
        env = {**os.environ, "TUGLINE_PAGES": str(pages), "NO_MKDOCS_2_WARNING": "1"}
        command = [python, "-m", "mkdocs", "build", "--strict", "--site-dir", site]
        return subprocess.run(command, cwd=ROOT, env=env, check=False).returncode


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "site").absolute()
    code = build(target)
    if code == 0:
        print(f"docs: {target}; to view it: python3 -m http.server --directory {target}")
    sys.exit(code)
