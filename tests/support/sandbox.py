"""Every sandbox driver for tests, each with a workspace in which programs can run.

Where Apptainer is not installed, a stand-in replaces it: bubblewrap behind the command line that we
use, so that our own side is tested everywhere. What Apptainer makes of those options is tested
only where it is installed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.containers import DEBIAN, host_programs, list_leftovers
from support.polling import until
from tugline.patch import FileChange, Patch
from tugline.plugins import find
from tugline.sandbox.base import Exit, Mount, Runtime, Sandbox, SandboxSpec
from tugline.sandbox.limits import RECORD
from tugline.types import Workspace

DRIVERS = [
    "local",
    "bubblewrap",
    pytest.param("container", marks=pytest.mark.podman),
    "stand-in",
    "apptainer",
]

WITH_PYTHON = DRIVERS[:3]
"""Those whose programs have a Python with pytest, to parametrize `driver` with (indirect)."""

STAND_IN = f"""#!{sys.executable}
import json, os, shutil, sys
argv = sys.argv[1:]
if argv == ["--version"]:
    print("apptainer version 1.4.5-stand-in"); sys.exit(0)
assert argv.pop(0) == "--silent"
if argv[0] == "build":
    assert argv[1:3] == ["--force", "--sandbox"]
    if not os.path.exists(argv[4]):
        sys.exit("FATAL: no such image: " + argv[4])
    shutil.unpack_archive(argv[4], argv[3], "tar"); sys.exit(0)
assert argv.pop(0) == "exec"
out = ["bwrap", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
out += ["--clearenv", "--as-pid-1", "--cap-drop", "ALL", "--tmpfs", "/"]
known = ("--containall", "--no-init", "--no-privs", "--writable-tmpfs", "--net")
binds, chdir = [], []
while argv[0].startswith("--"):
    option = argv.pop(0)
    if option == "--bind":
        source, target, *ro = argv.pop(0).split(":")
        binds += ["--ro-bind" if ro else "--bind", source, target]
    elif option == "--home":
        source, target = argv.pop(0).split(":")
        binds += ["--bind", source, target, "--setenv", "HOME", target]
    elif option == "--pwd":
        chdir = ["--chdir", argv.pop(0)]
    elif option == "--env":
        binds += ["--setenv", *argv.pop(0).split("=")]
    elif option == "--network":
        assert argv.pop(0) == "none"; out.append("--unshare-net")
    elif option == "--no-mount":
        argv.pop(0)
    elif option == "--security":
        if os.environ.get("NO_SECCOMP"):
            sys.exit("FATAL: seccomp is not built in")
        json.load(open(argv.pop(0).removeprefix("seccomp:")))
    else:
        assert option in known, option
image = argv.pop(0)
for name in os.listdir(image):
    path = os.path.join(image, name)
    if os.path.islink(path):
        out += ["--symlink", os.readlink(path), "/" + name]
    elif name not in ("proc", "dev"):
        out += ["--bind", path, "/" + name]
out += ["--setenv", "PATH", "/bin", "--proc", "/proc", "--dev", "/dev"]
os.execvp("bwrap", [*out, *binds, *chdir, *argv])
"""


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A sandbox directory with a shell and a folder of work."""
    busybox = shutil.which("busybox")
    if busybox is None:
        pytest.skip("there is no busybox to make an image of")
    root = tmp_path / "image"
    for folder in ("bin", "dev", "etc", "home", "proc", "run", "sys", "tmp", "usr", "var", "task"):
        (root / folder).mkdir(parents=True)
    shutil.copy(busybox, root / "bin" / "busybox")
    for name in {*subprocess.check_output([busybox, "--list"], text=True).split()} - {"busybox"}:
        (root / "bin" / name).symlink_to("busybox")
    (root / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (root / "etc" / "group").write_text("root:x:0:\n")
    (root / "task" / "a.txt").write_text("from the image\n")
    return root


@dataclass
class Driver:
    """A runtime under test."""

    name: str
    workspace: Workspace = field(default_factory=Workspace)
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.plugin = "apptainer" if self.name == "stand-in" else self.name
        self.runtime = self.bounded()

    def bounded(self, **limits: int) -> Runtime:
        """A runtime with these limits."""
        made: Runtime = find("runtime", self.plugin)(**{**self.options, **limits})
        return made

    @property
    def isolated(self) -> bool:
        """Whether its programs have namespaces of their own."""
        return self.name != "local"

    @property
    def host_programs(self) -> tuple[Mount, ...]:
        """What has to be mounted for programs of this machine, such as compilers."""
        return host_programs() if self.name == "container" else ()

    def spec(self, folder: Path | None = None, **fields: Any) -> SandboxSpec:
        """A spec with this driver's image, over `folder`."""
        workspace = Workspace(image=self.workspace.image, folder=str(folder) if folder else None)
        return SandboxSpec(workspace=workspace, **fields)

    def fetch(self, url: str) -> Sequence[str]:
        """A command that prints what is at a URL, or fails."""
        if self.name in {"stand-in", "apptainer"}:
            return ("wget", "-q", "-O-", url)
        code = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=5).read())"
        return ("python3", "-c", code, url)

    def list_leftovers(self, folder: Path) -> list[str]:
        """Processes, mounts, containers and records of sandboxes below `folder`."""
        leftovers = [f"process {pid}" for pid in users(folder)]
        leftovers += (
            list_leftovers(self.options["engine"], folder) if self.name == "container" else []
        )
        records = {RECORD, ".started", "container.json"}
        files = [path for path in folder.rglob("*") if path.name.endswith(tuple(records))]
        return leftovers + [str(path) for path in files]


@pytest.fixture(params=DRIVERS)
def driver(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Driver:
    """Each driver that works on this machine."""
    name = request.param
    if name == "container":
        engine = request.getfixturevalue("podman")
        options = {"engine": engine, "image": DEBIAN, "memory_mb": 512, "processes": 200}
        return Driver(name, options=options)
    if name in {"stand-in", "apptainer"}:
        monkeypatch.setenv("TUGLINE_CACHE", str(tmp_path / "cache"))
        workspace = Workspace(image=str(request.getfixturevalue("image")))
        made = Driver(name, workspace, {"disk_mb": 64})
    else:
        made = Driver(name)
    if name == "stand-in" and shutil.which("bwrap") is not None:
        program = tmp_path / "bin" / "apptainer"
        program.parent.mkdir()
        program.write_text(STAND_IN)
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    if problem := made.runtime.check_available():
        pytest.skip(problem)
    return made


@pytest.fixture
async def sandbox(driver: Driver, tmp_path: Path) -> AsyncIterator[Sandbox]:
    """A sandbox with three files."""
    files = {"a/b.txt": "one\r\ntwo", "edit": "1", "drop": "1"}
    async with driver.runtime.open(tmp_path / "s", driver.spec(files=files)) as opened:
        yield opened


async def page(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Respond to an HTTP request with its head."""
    head = await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + head)
    await writer.drain()


_NODE = """
import asyncio, sys
from pathlib import Path
import msgspec
from tugline.plugins import find
from tugline.sandbox.base import SandboxSpec
async def main():
    types = tuple[str, dict, str, SandboxSpec, list[str]]
    name, options, folder, spec, argv = msgspec.json.decode(sys.stdin.read(), type=types)
    async with find("runtime", name)(**options).open(Path(folder), spec) as sandbox:
        await sandbox.run(argv, env={}, timeout_s=300)
asyncio.run(main())
"""


async def kill_node(
    runtime: str,
    options: dict[str, Any],
    folder: Path,
    spec: SandboxSpec,
    argv: Sequence[str],
    begun: Callable[[], object],
) -> None:
    """Run a program in a sandbox of another process, and kill that with -9 once it has `begun`."""
    node = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _NODE),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=asyncio.subprocess.PIPE,
    )
    node.stdin.write(msgspec.json.encode((runtime, options, str(folder), spec, argv)))
    node.stdin.close()
    try:
        await until(begun, 60)
    finally:
        node.kill()
        await node.wait()


async def run_shell(sandbox: Sandbox, script: str, timeout_s: float = 20.0, **env: str) -> Exit:
    """Run a script."""
    return await sandbox.run(("sh", "-c", script), env=env, timeout_s=timeout_s)


async def run_session(sandbox: Sandbox) -> None:
    """The contract of providers, for ``a.py`` and ``pkg/b.py``: files in, output, changes out."""
    await sandbox.put(sandbox.home, {"settings.json": "{}"})
    script = (
        'cat ~/settings.json; echo "$A"; rm a.py; printf new > pkg/b.py; ln -s /etc out; exit 7'
    )
    end = await run_shell(sandbox, script, A="it's\n$HOME")
    assert (end.code, end.timed_out) == (7, False)
    assert read_log(sandbox) == "{}it's\n$HOME\n"
    link = FileChange(b"/etc", link=True)
    changed = {"a.py": None, "pkg/b.py": FileChange(b"new"), "out": link}
    assert await sandbox.diff() == Patch(changed)


def read_log(sandbox: Sandbox) -> str:
    """Output of the programs so far."""
    return (sandbox.logs / "agent.log").read_text()


def running(command: str) -> list[int]:
    """Processes of this machine with `command` in their command line."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
            if command.encode() in line and b"State:\tZ" not in (entry / "status").read_bytes():
                pids.append(int(entry.name))
        except OSError:
            continue
    return pids


def users(folder: Path) -> list[int]:
    """Processes that have `folder` in their command line or mounted."""
    pids = set(running(str(folder)))
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(folder) in (entry / "mountinfo").read_text():
                pids.add(int(entry.name))
    return sorted(pids)


def dig(folder: Path, names: Iterable[str]) -> Iterator[int]:
    """Make folders below each other, deeper than any path is long; yield each, open."""
    here = os.open(folder, os.O_RDONLY)
    for name in names:
        os.mkdir(name, dir_fd=here)
        above, here = here, os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(above)
        yield here
    os.close(here)


def open_files() -> int:
    """Number of open files of this process."""
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def unique_sleep() -> str:
    """A command that no other process has."""
    return f"sleep 99.{secrets.randbelow(10**9):09d}"


async def wait_until_running(command: str) -> None:
    """Wait until a program has started."""
    await until(lambda: running(command))


async def wait_until_gone(command: str) -> None:
    """Wait until a program has ended."""
    await until(lambda: not running(command))


def mount_table() -> str:
    """The mounts of this machine."""
    return Path("/proc/self/mountinfo").read_text()
