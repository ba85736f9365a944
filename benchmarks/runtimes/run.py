"""What a sandbox costs: to start, to run a command in, to leave; and what it leaves behind.

Every runtime that this machine has opens real sandboxes, through the contract that the node uses. A
session is start, one command and stop. The workspace is a repository of 20,000 files with its
history. `leaks` is what is there after the sessions and was not before them: processes, mounts,
containers, and folders or control groups outside of the sessions' own folders.
`docs/benchmarks.md` says what each figure means.

    python benchmarks/runtimes/run.py [--json] [--quick]
"""

# ruff: noqa: INP001 - a program, not a package
from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from tugline import log
from tugline.plugins import find
from tugline.sandbox.base import Runtime, Sandbox, SandboxSpec
from tugline.sandbox.overlay import OverlayWorkspace
from tugline.types import Workspace

RUNTIMES = ("local", "bubblewrap", "container", "apptainer")
BUSYBOX = "/bin/busybox"
"""A static one makes the smallest image that has a shell; Debian's is in busybox-static."""
CONCURRENCY = (1, 2, 4, 8)
FILES = 20_000
COMMAND = ("true",)
_console = Console(stderr=True, highlight=False)


# --------------------------------------------------------------------------- one session
async def timed(runtime: Runtime, folder: Path, spec: SandboxSpec, execs: int) -> dict[str, Any]:
    """Milliseconds of each part of one session."""
    began = time.perf_counter()
    async with runtime.open(folder, spec) as sandbox:
        opened = time.perf_counter()
        spent = [await _command(sandbox) for _ in range(execs)]
        leaving = time.perf_counter()
    ended = time.perf_counter()
    await asyncio.to_thread(shutil.rmtree, folder)
    return {
        "start": 1e3 * (opened - began),
        "execs": spent,
        "stop": 1e3 * (ended - leaving),
        "all": 1e3 * (ended - began),
    }


async def _command(sandbox: Sandbox) -> float:
    began = time.perf_counter()
    end = await sandbox.run(COMMAND, env={}, timeout_s=60.0)
    if end.code != 0:
        output = (sandbox.logs / "agent.log").read_text(errors="replace")[-300:]
        msg = f"a command that cannot fail ended with {end.code}: {output}"
        raise SystemExit(msg)
    return 1e3 * (time.perf_counter() - began)


async def measured(
    name: str, runtime: Runtime, spec: SandboxSpec, root: Path, sizes: Sizes
) -> dict[str, Any]:
    """The figures of one runtime."""
    await timed(runtime, root / f"{name}-warm", spec, 1)  # probes the machine, loads the image
    seen = [
        await timed(runtime, root / f"{name}-{number}", spec, sizes.execs)
        for number in range(sizes.sessions(name))
    ]
    rates = {}
    for at_once in CONCURRENCY:
        sessions = sizes.sessions(name)
        rates[str(at_once)] = round(await rate(runtime, spec, root / name, at_once, sessions))
    starts = [one["start"] for one in seen]
    return {
        "start_ms_p50": round(statistics.median(starts), 2),
        "start_ms_p95": round(statistics.quantiles(starts, n=20)[-1], 2),
        "exec_ms_p50": round(statistics.median(x for one in seen for x in one["execs"]), 2),
        "stop_ms_p50": round(statistics.median(one["stop"] for one in seen), 2),
        "session_ms_p50": round(statistics.median(one["all"] for one in seen), 2),
        "starts_per_min": rates,
    }


async def rate(
    runtime: Runtime, spec: SandboxSpec, root: Path, at_once: int, sessions: int
) -> float:
    """Sessions a minute, so many at once."""
    numbers = iter(range(sessions))

    async def work() -> None:
        for number in numbers:
            await timed(runtime, root / f"{at_once}-{number}", spec, 1)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(work())
    return 60 * sessions / (time.perf_counter() - began)


def image(folder: Path) -> Workspace:
    """An image to be built without a registry: a shell and its commands, 2 MB."""
    folder.mkdir()
    shutil.copy(BUSYBOX, folder / "busybox")
    (folder / "Dockerfile").write_text(
        "FROM scratch\nCOPY busybox /bin/busybox\n"
        'RUN ["/bin/busybox", "--install", "-s", "/bin"]\nWORKDIR /workspace\n'
    )
    return Workspace(build=str(folder))


# --------------------------------------------------------------------------- a large workspace
def repository(folder: Path) -> Path:
    """A git repository of many files, as large ones are: a thousand folders."""
    for number in range(FILES):
        path = folder / f"package{number % 100}" / f"part{number % 10}" / f"module{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"VALUE = {number}\n" * 40)
    for command in (
        ("init", "-q"),
        ("add", "-A"),
        ("-c", "user.name=x", "-c", "user.email=x@localhost", "commit", "-qm", "all"),
        ("gc", "-q"),
    ):
        # A commit of so many files begins to tidy up beside us, and holds the lock for it.
        quiet = ("-c", "gc.auto=0", "-c", "maintenance.auto=false")
        subprocess.run(("git", "-C", str(folder), *quiet, *command), check=True)
    return folder


def workspaces(base: Path, root: Path, count: int) -> dict[str, float]:
    """Milliseconds to make a copy-on-write view, as a host mount, and to take it away again."""
    made, left = [], []
    for number in range(count):
        layer = OverlayWorkspace(root / f"layer-{number}", base, {})
        began = time.perf_counter()
        layer.make()
        layer.mount()
        made.append(1e3 * (time.perf_counter() - began))
        if not (layer.work / "package1").is_dir():
            msg = "the workspace does not show its repository"
            raise SystemExit(msg)
        began = time.perf_counter()
        layer.unmount()
        shutil.rmtree(root / f"layer-{number}")
        left.append(1e3 * (time.perf_counter() - began))
    began = time.perf_counter()
    subprocess.run(("cp", "-a", str(base), str(root / "copy")), check=True)
    copied = 1e3 * (time.perf_counter() - began)
    shutil.rmtree(root / "copy")
    return {
        "workspace_ms_p50": round(statistics.median(made), 2),
        "workspace_remove_ms_p50": round(statistics.median(left), 2),
        "workspace_copy_ms": round(copied, 1),
    }


# --------------------------------------------------------------------------- what is left
def processes(root: Path) -> set[str]:
    """Children of this process, near and far, and whatever else runs for a sandbox under `root`."""
    parents, found = {}, set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            stat = (entry / "stat").read_text(errors="replace")
            told = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
        except OSError:
            continue
        pid = int(entry.name)
        parents[pid] = int(stat.rpartition(")")[2].split()[1])
        if str(root).encode() in told and pid != os.getpid():
            found.add(pid)
    for pid in parents:
        up = pid
        while up in parents and up != os.getpid():
            up = parents[up]
        if up == os.getpid() != pid:
            found.add(pid)
    return {str(pid) for pid in found}


def there(root: Path, engine: Sequence[str] | None) -> dict[str, set[str]]:
    """What sessions could leave behind, by name."""
    mounts = set(Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines())
    below = (folder for folder, _, _ in os.walk("/sys/fs/cgroup"))  # others come and go meanwhile
    groups = {folder for folder in below if Path(folder).name.startswith("tugline-")}
    temporary = set(map(str, Path(tempfile.gettempdir()).glob("tugline*")))
    containers: set[str] = set()
    if engine is not None:
        listed = subprocess.run((*engine, "ps", "-aq"), capture_output=True, text=True, check=True)
        containers = set(listed.stdout.split())
    return {
        "processes": processes(root),
        "mounts": mounts,
        "containers": containers,
        "directories": groups | temporary,
    }


async def leaks(
    usable: dict[str, tuple[Runtime, SandboxSpec]], base: Path, root: Path, sessions: int
) -> dict[str, Any]:
    """How many things are left of so many sessions, half of them with a large workspace."""
    engine = ("podman",) if "container" in usable and shutil.which("podman") else None
    before = await asyncio.to_thread(there, root, engine)
    folder = root / "many"
    for name, (runtime, spec) in usable.items():
        large = SandboxSpec(workspace=msgspec.structs.replace(spec.workspace, folder=str(base)))
        await rate(runtime, spec, folder / name, 4, sessions - sessions // 2)
        await rate(runtime, large, folder / f"{name}-large", 4, sessions // 2)
    await asyncio.sleep(2.0)  # what ends by itself may do so
    after = await asyncio.to_thread(there, root, engine)
    left = {what: sorted(after[what] - before[what]) for what in before}
    left["directories"] += [str(path) for path in folder.glob("*/*")]
    names = [name for found in left.values() for name in found][:20]
    counts = {what: len(found) for what, found in left.items()}
    return {"sessions": sessions * len(usable), **counts, "names": names}


# --------------------------------------------------------------------------- all of it
class Sizes:
    """How much is measured."""

    def __init__(self, *, quick: bool) -> None:
        self.execs = 5 if quick else 20
        self.leaks = 40 if quick else 1000
        self.layers = 5 if quick else 30
        self._quick = quick

    def sessions(self, name: str) -> int:
        """Sessions for each figure: containers take a hundred times longer."""
        slow = name in {"container", "apptainer"}
        return (6 if slow else 30) if self._quick else (40 if slow else 300)


def unusable(name: str, runtime: Runtime) -> str | None:
    """Why there are no figures for it here."""
    if name == "container" and not Path(BUSYBOX).exists():
        return f"its image is made of {BUSYBOX}, which is not there"
    return runtime.check_available()


async def measure(root: Path, *, quick: bool) -> dict[str, Any]:
    """Every figure."""
    sizes = Sizes(quick=quick)
    load = os.getloadavg()[0]
    told: dict[str, Any] = {}
    usable: dict[str, tuple[Runtime, SandboxSpec]] = {}
    for name in RUNTIMES:
        runtime: Runtime = find("runtime", name)()
        reason = await asyncio.to_thread(unusable, name, runtime)
        if reason is not None:
            told[name] = {"unavailable": reason}
            continue
        _console.print(f"{name} ...")
        spec = SandboxSpec(workspace=image(root / "image") if name == "container" else Workspace())
        told[name] = await measured(name, runtime, spec, root, sizes)
        if name != "local":
            usable[name] = (runtime, spec)
    _console.print(f"a workspace of {FILES} files ...")
    base = await asyncio.to_thread(repository, root / "repository")
    told |= await asyncio.to_thread(workspaces, base, root, sizes.layers)
    _console.print(f"{sizes.leaks} sessions each ...")
    told["leaks"] = await leaks(usable, base, root, sizes.leaks)
    told["machine"] = {"cpus": os.cpu_count(), "load_before": load, "load": os.getloadavg()[0]}
    return told


def show(told: dict[str, Any]) -> None:
    """A table."""
    table = Table("runtime", "start ms", "exec ms", "stop ms", "starts/min at 1, 2, 4, 8")
    for name in RUNTIMES:
        one = told[name]
        if "unavailable" in one:
            table.add_row(name, "-", "-", "-", one["unavailable"])
            continue
        rates = ", ".join(str(one["starts_per_min"][str(n)]) for n in CONCURRENCY)
        keys = ("start_ms_p50", "exec_ms_p50", "stop_ms_p50")
        table.add_row(name, *(str(one[key]) for key in keys), rates)
    console = Console()
    console.print(table)
    console.print(
        f"workspace of {FILES} files: {told['workspace_ms_p50']} ms to make, "
        f"{told['workspace_remove_ms_p50']} ms to remove; a copy takes "
        f"{told['workspace_copy_ms']} ms"
    )
    console.print(f"leaks: {told['leaks']}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What a sandbox costs.")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--quick", action="store_true", help="fewer sessions")
    asked = parser.parse_args()
    log.configure(level="error")
    with tempfile.TemporaryDirectory(prefix="bench-runtimes-", ignore_cleanup_errors=True) as root:
        report = asyncio.run(measure(Path(root), quick=asked.quick))
    if asked.json:
        print(json.dumps(report))  # noqa: T201 - a program
    else:
        show(report)


if __name__ == "__main__":
    main()
