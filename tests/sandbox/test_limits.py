from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from support.sandbox import dig
from tugline.errors import SandboxError
from tugline.sandbox.base import Exit
from tugline.sandbox.hardening import bpf_filter
from tugline.sandbox.limits import (
    RECORD,
    TRIAL,
    Cgroup,
    OomKills,
    ProcessorWaits,
    ProgramLimits,
    SandboxCgroup,
    find_cgroup_parent,
    list_unenforced,
    lower_priority,
    reap_cgroups,
    rlimit_command,
    set_rlimits,
)
from tugline.sandbox.resource_monitor import ResourceMonitor, disk_usage
from tugline.types import Cause

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


@contextlib.contextmanager
def program(*argv: str) -> Iterator[subprocess.Popen[str]]:
    """A program that starts when a line is written to its stdin."""
    with subprocess.Popen(
        ["sh", "-c", 'read go; exec "$@"', "sh", *argv],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_lower_priority_is_kept() -> None:
    """A higher nice value stays, since only root may lower it."""
    with program("true") as process:
        os.setpriority(os.PRIO_PROCESS, process.pid, 19)
        lower_priority(process.pid)
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == 19


@pytest.fixture
def parent() -> Cgroup:
    """A control group below which groups can be created."""
    group = find_cgroup_parent()
    if group.memory is None or group.processes is None:
        pytest.skip("no control groups can be created here")
    return group


class Counted(Cgroup, frozen=True):
    """A control group with the counts of a test."""

    reads: Iterator[tuple[float | None, dict[str, float]]] = iter(())

    def read_used_s(self) -> float | None:
        """The next used time; its waits are read after it."""
        used_s, waits = next(self.reads)
        _WAITS.update(waits)
        return used_s

    def read_waits(self) -> dict[str, float]:
        """The waits of the same time."""
        return dict(_WAITS)


_WAITS: dict[str, float] = {}


@pytest.mark.parametrize(
    ("used_s", "waits", "lost_s"),
    [
        pytest.param(9.9, {"1": 0.1}, 0.1, id="ran alone"),
        pytest.param(0.1, {"1": 0.3}, 0.3, id="slept"),
        pytest.param(20.0, {"1": 9.9, "2": 9.9}, 0.0, id="many of its own on two processors"),
        pytest.param(5.0, {"1": 5.0}, 5.0, id="half of one"),
        pytest.param(1.0, {"1": 9.0, "2": 8.0}, 9.0, id="a tenth of one"),
        pytest.param(0.0, {"1": 10.5}, 10.0, id="nothing"),
        pytest.param(None, {"1": 10.0}, 0.0, id="not counted here"),
    ],
)
def test_waits_for_a_processor_are_measured(
    used_s: float | None, waits: dict[str, float], lost_s: float
) -> None:
    """Lost time of ten seconds is measured; threads that compete with each other lose nothing."""
    _WAITS.clear()
    times = iter((100.0, 110.0))
    before = None if used_s is None else 3.0
    reads = iter(((before, {"1": 0.0}), ((used_s and used_s + 3.0) or before, waits)))
    measured = ProcessorWaits(Counted(reads=reads), lambda: next(times)).measure()
    assert measured == pytest.approx(lost_s)


def test_processor_times_are_read_in_both_cgroup_versions(tmp_path: Path) -> None:
    """The time of all processes and the waits of each thread are read where they are counted."""
    new, old = tmp_path / "new", tmp_path / "old"
    for folder, threads in ((new, "cgroup.threads"), (old, "tasks")):
        folder.mkdir()
        (folder / threads).write_text(f"{os.getpid()}\n99999999\n")
    (new / "cpu.stat").write_text("usage_usec 2500000\nuser_usec 1\nsystem_usec 2\n")
    (old / "cpu.stat").write_text("nr_periods 0\nnr_throttled 0\n")
    (old / "cpuacct.usage").write_text("1500000000\n")
    for folder, used_s in ((new, 2.5), (old, 1.5)):
        group = Cgroup(cpu_time=folder)
        assert group.read_used_s() == used_s
        waits = group.read_waits()
        assert 0 < waits[str(os.getpid())] < time.monotonic()
        assert waits["99999999"] == 0.0
    assert (Cgroup().read_used_s(), Cgroup().read_waits()) == (None, {})


def test_cpu_time_of_ended_processes_counts(parent: Cgroup, tmp_path: Path) -> None:
    """A group's CPU time includes processes that have ended."""
    if parent.cpu_time is None:
        pytest.skip("processor time is not counted by control groups here")
    group = SandboxCgroup(parent, tmp_path)
    group.create(ProgramLimits())
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    with program(sys.executable, "-c", burn) as burner:
        group.add(burner.pid)
        burner.communicate("go\n", timeout=60)
    assert 0.25 < (group.group.read_used_s() or 0.0) < 2.0
    group.remove()


def test_abandoned_trial_groups_are_removed(parent: Cgroup) -> None:
    """Trial groups have no record; only old ones are removed."""
    old, new = (parent.memory / f"{TRIAL}{age}{os.getpid()}" for age in ("old", "new"))
    for folder in (old, new):
        folder.mkdir()
    try:
        os.utime(old, (1, 1))
        find_cgroup_parent()
        assert (old.exists(), new.exists()) == (False, True)
    finally:
        for folder in (old, new):
            with contextlib.suppress(FileNotFoundError):
                folder.rmdir()


def test_groups_of_killed_processes_are_reaped(parent: Cgroup, tmp_path: Path) -> None:
    """Groups with a record are removed with their processes; other records are ignored."""
    group = SandboxCgroup(parent, tmp_path)
    group.create(ProgramLimits())
    (record,) = tmp_path.glob(f"*{RECORD}")
    with program("sleep", "60") as left:
        group.add(left.pid)
        assert reap_cgroups(tmp_path) == len({*msgspec.structs.astuple(parent)} - {None})
        assert left.wait(timeout=5) == -9
    assert not record.exists()
    foreign = tmp_path / f"x{RECORD}"
    own = tmp_path / "tugline-x"
    own.mkdir()
    foreign.write_bytes(msgspec.json.encode([str(own), "/sys/fs/cgroup/unified"]))
    assert reap_cgroups(tmp_path) == 0
    assert own.exists()
    foreign.write_bytes(b"no record")
    assert reap_cgroups(tmp_path) == 0


def test_limits_without_control_groups() -> None:
    """Each process is limited, by data and not address space; the missing limits are listed."""
    limits = ProgramLimits(memory_mb=50, open_files=64, cpu_s=7, file_mb=3)
    expected = {"DATA": 50 << 20, "FSIZE": 3 << 20, "NOFILE": 64, "CPU": 7, "CORE": 0}
    with program("sleep", "60") as process:
        for given in (limits, ProgramLimits()):  # the second does not raise them again
            set_rlimits(process.pid, given, Cgroup())
            for name, limit in expected.items():
                kind = getattr(resource, f"RLIMIT_{name}")
                assert resource.prlimit(process.pid, kind) == (limit, limit), name
        assert resource.prlimit(process.pid, resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
        lower_priority(process.pid)
        assert os.getpriority(os.PRIO_PROCESS, process.pid) > 0
        command = rlimit_command(limits, Cgroup())
        lines = subprocess.check_output([*command, "cat", "/proc/self/limits"], text=True)
        assert re.search(r"Max data size +52428800 +52428800 ", lines)
        assert re.search(r"Max open files +64 +64 ", lines)
    lines = list_unenforced(Cgroup())
    assert len(lines) == 3
    assert "memory is limited for each process" in lines[0]
    assert list_unenforced(Cgroup(*[Path("/x")] * 3)) == []


def test_limits_in_cgroup_version_2(tmp_path: Path) -> None:
    """A group limits memory and processes, without swap, and counts its own OOM kills."""
    root = tmp_path / "groups"
    root.mkdir()
    assert not Cgroup(root, root).unified
    (root / "cgroup.controllers").write_text("cpu memory pids")
    group = SandboxCgroup(Cgroup(root, root), tmp_path)
    group.create(ProgramLimits(memory_mb=2, processes=7))
    (created,) = root.glob("tugline-*")
    texts = {path.name: path.read_text() for path in created.iterdir()}
    assert texts == {"memory.max": "2097152", "memory.swap.max": "0", "pids.max": "7"}
    (created / "memory.events").write_text("oom 4\noom_kill 3\noom_group_kill 0\n")
    assert group.group.count_oom_kills() == OomKills(own=3)
    (created / "memory.events").write_text("oom 0\noom_kill 2\noom_group_kill 0\n")
    assert group.group.count_oom_kills() == OomKills(others=2)


async def test_a_node_out_of_memory_is_not_blamed_on_the_agent(
    parent: Cgroup, tmp_path: Path
) -> None:
    """A program that is killed by the node's own limit raises `SandboxError`."""
    if parent.unified:
        pytest.skip("in version 2 the controllers would have to be enabled first")
    node = parent.memory / f"tugline-node-{tmp_path.name}"
    node.mkdir()
    try:
        (node / "memory.limit_in_bytes").write_text(str(40 << 20))
        group = SandboxCgroup(Cgroup(node, None), tmp_path)
        group.create(ProgramLimits(memory_mb=4096))
        with program(sys.executable, "-c", "x = b'x' * (200 << 20)") as eater:
            group.add(eater.pid)
            monitor = ResourceMonitor(100, list, group.group.count_oom_kills, _skip_kill)

            async def run() -> Exit:
                await asyncio.to_thread(eater.communicate, "go\n", timeout=20)
                return Exit(eater.returncode, timed_out=False, seconds=1.0)

            with pytest.raises(SandboxError, match="the node is out of memory"):
                await monitor.run(run, eater.pid)
        assert group.group.count_oom_kills() == OomKills(others=1)
        group.remove()
    finally:
        node.rmdir()


async def _skip_kill() -> None:
    """Do not kill anything."""


async def test_disk_usage_counts_blocks(tmp_path: Path) -> None:
    """Blocks count, not lengths; hard links once; empty files a little; a too deep tree is over."""
    (tmp_path / "a").write_bytes(b"x" * 100_000)
    os.link(tmp_path / "a", tmp_path / "b")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    many = tmp_path / "many"
    many.mkdir()
    for number in range(500):
        (many / str(number)).touch()
    (tmp_path / "out").symlink_to("/usr")
    total = disk_usage([tmp_path], None, 1 << 40)
    assert 600_000 < total < 700_000
    assert disk_usage([tmp_path], None, 1000) > 1000
    list(dig(tmp_path, ["d" * 200] * 30))  # deeper than any path is long
    assert disk_usage([tmp_path], None, 1 << 40) > 1 << 40
    await asyncio.to_thread(subprocess.run, ["rm", "-rf", str(tmp_path / ("d" * 200))], check=True)


async def run_monitored(monitor: ResourceMonitor, seconds: float) -> Exit:
    """The exit of a sleeping program under a monitor."""

    async def sleep() -> Exit:
        await asyncio.sleep(seconds)
        return Exit(0, timed_out=False, seconds=seconds)

    return await monitor.run(sleep, 1 << 30)


async def test_initial_files_do_not_count(tmp_path: Path) -> None:
    """The copy of a large workspace does not count; files of the agent do."""
    (tmp_path / "copied").write_bytes(b"x" * (3 << 20))
    monitor = ResourceMonitor(2, lambda: [tmp_path], OomKills, _skip_kill)
    assert (await run_monitored(monitor, 0)).cause is None
    (tmp_path / "new").write_bytes(b"x" * (3 << 20))
    async with asyncio.timeout(20):  # a slow measurement delays the next
        while (await run_monitored(monitor, 0)).cause is not Cause.AGENT_DISK:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def test_a_failed_kill_is_repeated(tmp_path: Path) -> None:
    """A kill that failed once, as by a silent engine, is repeated at the next measurement."""
    attempts = []

    async def kill() -> None:
        attempts.append(time.monotonic())
        if len(attempts) == 1:
            msg = "not ended within 60 s"
            raise SandboxError(msg)

    monitor = ResourceMonitor(1, lambda: [tmp_path / "w"], OomKills, kill, interval_s=0.1)
    assert (await run_monitored(monitor, 0)).cause is None
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "x").write_bytes(b"x" * (3 << 20))
    assert (await run_monitored(monitor, 1)).cause is Cause.AGENT_DISK
    assert len(attempts) == 2


async def test_slow_measurements_are_less_frequent() -> None:
    """A slow measurement is followed by a pause, which has a limit."""
    times = []

    def slow(*_: object) -> int:
        times.append(time.monotonic())
        time.sleep(0.3)
        return 0

    monitor = ResourceMonitor(
        1, list, OomKills, _skip_kill, interval_s=0.1, max_pause_s=1.0, measure=slow
    )
    for _ in range(5):
        await run_monitored(monitor, 0)
    assert len(times) == 2  # at first, and after the first program
    await run_monitored(monitor, 3)
    assert len(times) in {5, 6}
    assert max(after - before for before, after in pairwise(times)) < 1.8


def test_the_seccomp_filter_is_complete() -> None:
    """The filter has whole instructions of eight bytes on known processors, nothing on others."""
    for machine in ("x86_64", "aarch64"):
        assert len(bpf_filter(machine)) % 8 == 0
        assert len(bpf_filter(machine)) > 300
    assert bpf_filter("riscv64") == b""
