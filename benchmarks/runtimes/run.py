"""Cost of a sandbox: start, command, stop, and what it leaves behind.

Every runtime available on this machine opens real sandboxes through the interface that the node
uses. A session is start, one command and stop. The workspace is a repository of 20,000 files with
its history. `leaks` counts what exists after the sessions but did not before: processes, mounts,
containers, and folders or control groups outside of the sessions' own folders.
`docs/benchmarks.md` explains each figure.

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
"""A static busybox makes the smallest image with a shell (Debian's package busybox-static)."""
CONCURRENCY = (1, 2, 4, 8)
FILES = 20_000
COMMAND = ("true",)
_console = Console(stderr=True, highlight=False)


# --------------------------------------------------------------------------- one session
async def timed(runtime: Runtime, folder: Path, spec: SandboxSpec, execs: int) -> dict[str, Any]:
    """Run one session; return the milliseconds of each part."""
    began = time.perf_counter()
    async with runtime.open(folder, spec) as sandbox:
        opened = time.perf_counter()
        spent = [await _command(sandbox) for _ in range(execs)]
        stopping = time.perf_counter()
    ended = time.perf_counter()
    await asyncio.to_thread(shutil.rmtree, folder)
    return {
        "start": 1e3 * (opened - began),
        "execs": spent,
        "stop": 1e3 * (ended - stopping),
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


async def measure_runtime(
    name: str, runtime: Runtime, spec: SandboxSpec, root: Path, sizes: Sizes
) -> dict[str, Any]:
    """Measure one runtime."""
    await timed(runtime, root / f"{name}-warm", spec, 1)  # probes the machine, loads the image
    timings = [
        await timed(runtime, root / f"{name}-{number}", spec, sizes.execs)
        for number in range(sizes.sessions(name))
    ]
    rates = {}
    for at_once in CONCURRENCY:
        sessions = sizes.sessions(name)
        rates[str(at_once)] = round(await rate(runtime, spec, root / name, at_once, sessions))
    starts = [one["start"] for one in timings]
    return {
        "start_ms_p50": round(statistics.median(starts), 2),
        "start_ms_p95": round(statistics.quantiles(starts, n=20)[-1], 2),
        "exec_ms_p50": round(statistics.median(x for one in timings for x in one["execs"]), 2),
        "stop_ms_p50": round(statistics.median(one["stop"] for one in timings), 2),
        "session_ms_p50": round(statistics.median(one["all"] for one in timings), 2),
        "starts_per_min": rates,
    }


async def rate(
    runtime: Runtime, spec: SandboxSpec, root: Path, at_once: int, sessions: int
) -> float:
    """Run `sessions` sessions, `at_once` of them concurrently; return sessions per minute."""
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
    """Make the build context of an image of 2 MB with a shell; it needs no registry."""
    folder.mkdir()
    shutil.copy(BUSYBOX, folder / "busybox")
    (folder / "Dockerfile").write_text(
        "FROM scratch\nCOPY busybox /bin/busybox\n"
        'RUN ["/bin/busybox", "--install", "-s", "/bin"]\nWORKDIR /workspace\n'
    )
    return Workspace(build=str(folder))


# --------------------------------------------------------------------------- a large workspace
def repository(folder: Path) -> Path:
    """Make a git repository of `FILES` files in a thousand folders."""
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
        # After a commit of so many files, git would start its maintenance and hold a lock.
        quiet = ("-c", "gc.auto=0", "-c", "maintenance.auto=false")
        subprocess.run(("git", "-C", str(folder), *quiet, *command), check=True)
    return folder


def workspaces(base: Path, root: Path, count: int) -> dict[str, float]:
    """Measure a copy-on-write view, mounted on the host: ms to make and to remove it."""
    make_ms, remove_ms = [], []
    for number in range(count):
        layer = OverlayWorkspace(root / f"layer-{number}", base, {})
        began = time.perf_counter()
        layer.make()
        layer.mount()
        make_ms.append(1e3 * (time.perf_counter() - began))
        if not (layer.work / "package1").is_dir():
            msg = "the files of the repository are missing in the workspace"
            raise SystemExit(msg)
        began = time.perf_counter()
        layer.unmount()
        shutil.rmtree(root / f"layer-{number}")
        remove_ms.append(1e3 * (time.perf_counter() - began))
    began = time.perf_counter()
    subprocess.run(("cp", "-a", str(base), str(root / "copy")), check=True)
    copied = 1e3 * (time.perf_counter() - began)
    shutil.rmtree(root / "copy")
    return {
        "workspace_ms_p50": round(statistics.median(make_ms), 2),
        "workspace_remove_ms_p50": round(statistics.median(remove_ms), 2),
        "workspace_copy_ms": round(copied, 1),
    }


# --------------------------------------------------------------------------- leaks
def list_processes(root: Path) -> set[str]:
    """All descendants of this process, and other processes of sandboxes under `root`."""
    parents, pids = {}, set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            stat = (entry / "stat").read_text(errors="replace")
            details = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
        except OSError:
            continue
        pid = int(entry.name)
        parents[pid] = int(stat.rpartition(")")[2].split()[1])
        if str(root).encode() in details and pid != os.getpid():
            pids.add(pid)
    for pid in parents:
        ancestor = pid
        while ancestor in parents and ancestor != os.getpid():
            ancestor = parents[ancestor]
        if ancestor == os.getpid() != pid:
            pids.add(pid)
    return {str(pid) for pid in pids}


def list_resources(root: Path, engine: Sequence[str] | None) -> dict[str, set[str]]:
    """List everything that sessions could leave behind, by kind."""
    mounts = set(Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines())
    cgroups = (folder for folder, _, _ in os.walk("/sys/fs/cgroup"))
    # only ours: those of other programs change meanwhile
    groups = {folder for folder in cgroups if Path(folder).name.startswith("tugline-")}
    temporary = set(map(str, Path(tempfile.gettempdir()).glob("tugline*")))
    containers: set[str] = set()
    if engine is not None:
        listed = subprocess.run((*engine, "ps", "-aq"), capture_output=True, text=True, check=True)
        containers = set(listed.stdout.split())
    return {
        "processes": list_processes(root),
        "mounts": mounts,
        "containers": containers,
        "directories": groups | temporary,
    }


async def leaks(
    usable: dict[str, tuple[Runtime, SandboxSpec]], base: Path, root: Path, sessions: int
) -> dict[str, Any]:
    """Count what is left of `sessions` sessions, half of them with a large workspace."""
    engine = ("podman",) if "container" in usable and shutil.which("podman") else None
    before = await asyncio.to_thread(list_resources, root, engine)
    folder = root / "many"
    for name, (runtime, spec) in usable.items():
        large = SandboxSpec(workspace=msgspec.structs.replace(spec.workspace, folder=str(base)))
        await rate(runtime, spec, folder / name, 4, sessions - sessions // 2)
        await rate(runtime, large, folder / f"{name}-large", 4, sessions // 2)
    await asyncio.sleep(2.0)  # for processes that are still exiting
    after = await asyncio.to_thread(list_resources, root, engine)
    left = {kind: sorted(after[kind] - before[kind]) for kind in before}
    left["directories"] += [str(path) for path in folder.glob("*/*")]
    names = [name for listed in left.values() for name in listed][:20]
    counts = {kind: len(listed) for kind, listed in left.items()}
    return {"sessions": sessions * len(usable), **counts, "names": names}


# --------------------------------------------------------------------------- program
class Sizes:
    """Numbers of repetitions and sessions."""

    def __init__(self, *, quick: bool) -> None:
        self.execs = 5 if quick else 20
        self.leaks = 40 if quick else 1000
        self.layers = 5 if quick else 30
        self._quick = quick

    def sessions(self, name: str) -> int:
        """Sessions for each figure; fewer for containers, which take a hundred times longer."""
        slow = name in {"container", "apptainer"}
        return (6 if slow else 30) if self._quick else (40 if slow else 300)


def explain_unavailable(name: str, runtime: Runtime) -> str | None:
    """Why this runtime cannot be measured here; None if it can."""
    if name == "container" and not Path(BUSYBOX).exists():
        return f"its image is made from {BUSYBOX}, which is missing"
    return runtime.check_available()


async def measure(root: Path, *, quick: bool) -> dict[str, Any]:
    """Measure all runtimes, workspaces and leaks."""
    sizes = Sizes(quick=quick)
    load = os.getloadavg()[0]
    report: dict[str, Any] = {}
    usable: dict[str, tuple[Runtime, SandboxSpec]] = {}
    for name in RUNTIMES:
        runtime: Runtime = find("runtime", name)()
        reason = await asyncio.to_thread(explain_unavailable, name, runtime)
        if reason is not None:
            report[name] = {"unavailable": reason}
            continue
        _console.print(f"{name} ...")
        spec = SandboxSpec(workspace=image(root / "image") if name == "container" else Workspace())
        report[name] = await measure_runtime(name, runtime, spec, root, sizes)
        if name != "local":
            usable[name] = (runtime, spec)
    _console.print(f"a workspace of {FILES} files ...")
    base = await asyncio.to_thread(repository, root / "repository")
    report |= await asyncio.to_thread(workspaces, base, root, sizes.layers)
    _console.print(f"{sizes.leaks} sessions each ...")
    report["leaks"] = await leaks(usable, base, root, sizes.leaks)
    report["machine"] = {"cpus": os.cpu_count(), "load_before": load, "load": os.getloadavg()[0]}
    return report


def show(report: dict[str, Any]) -> None:
    """Print the report as a table."""
    table = Table("runtime", "start ms", "exec ms", "stop ms", "starts/min at 1, 2, 4, 8")
    for name in RUNTIMES:
        figures = report[name]
        if "unavailable" in figures:
            table.add_row(name, "-", "-", "-", figures["unavailable"])
            continue
        rates = ", ".join(str(figures["starts_per_min"][str(n)]) for n in CONCURRENCY)
        keys = ("start_ms_p50", "exec_ms_p50", "stop_ms_p50")
        table.add_row(name, *(str(figures[key]) for key in keys), rates)
    console = Console()
    console.print(table)
    console.print(
        f"workspace of {FILES} files: {report['workspace_ms_p50']} ms to make, "
        f"{report['workspace_remove_ms_p50']} ms to remove; a copy takes "
        f"{report['workspace_copy_ms']} ms"
    )
    console.print(f"leaks: {report['leaks']}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Cost of a sandbox.")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--quick", action="store_true", help="fewer sessions")
    options = parser.parse_args()
    log.configure(level="error")
    with tempfile.TemporaryDirectory(prefix="bench-runtimes-", ignore_cleanup_errors=True) as root:
        report = asyncio.run(measure(Path(root), quick=options.quick))
    if options.json:
        print(json.dumps(report))  # noqa: T201 - a program
    else:
        show(report)


if __name__ == "__main__":
    main()
