from __future__ import annotations

import asyncio
import contextlib
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from sandboxes import dig
from tugline.errors import SandboxError
from tugline.sandbox.base import Exit
from tugline.sandbox.hardening import bpf_filter
from tugline.sandbox.limits import (
    RECORD,
    TRIAL,
    Cgroup,
    OomKills,
    ProgramLimits,
    SandboxCgroup,
    find_cgroup_parent,
    is_starved,
    list_unenforced,
    reap_cgroups,
    set_rlimits,
)
from tugline.sandbox.resource_monitor import ResourceMonitor, disk_usage
from tugline.types import Cause

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


@contextlib.contextmanager
def program(*argv: str) -> Iterator[subprocess.Popen[str]]:
    """A program that waits for a line before it does what it is to do."""
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


def test_a_program_of_a_nice_node_stays_nice() -> None:
    """Only root may lower the value, and an ordinary user's sandboxes start all the same."""
    with program("true") as process:
        os.setpriority(os.PRIO_PROCESS, process.pid, 19)
        set_rlimits(process.pid, ProgramLimits(), Cgroup())
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == 19


@pytest.fixture
def parent() -> Cgroup:
    """Where groups can be created."""
    found = find_cgroup_parent()
    if found.memory is None or found.processes is None:
        pytest.skip("no control groups can be made here")
    return found


@pytest.mark.parametrize(
    ("used_s", "waited_s", "starved"),
    [
        pytest.param(9.9, 0.1, False, id="ran alone"),
        pytest.param(0.1, 0.3, False, id="slept"),
        pytest.param(20.0, 9.9, False, id="many of its own on two processors"),
        pytest.param(5.1, 4.9, False, id="half of one"),
        pytest.param(1.0, 9.0, True, id="a tenth of one"),
        pytest.param(0.0, 10.0, True, id="nothing"),
        pytest.param(math.inf, 10.0, False, id="not counted here"),
    ],
)
def test_who_waited_for_others_had_too_little(
    used_s: float, waited_s: float, *, starved: bool
) -> None:
    """Of ten seconds; not who slept, nor who stood in its own way."""
    assert is_starved(used_s, waited_s, 10.0) is starved


def test_processor_time_is_read_in_both_versions(tmp_path: Path) -> None:
    """What has run, by all, and the longest wait of a thread; infinite where it is not counted."""
    new, old = tmp_path / "new", tmp_path / "old"
    for folder, threads in ((new, "cgroup.threads"), (old, "tasks")):
        folder.mkdir()
        (folder / threads).write_text(f"{os.getpid()}\n99999999\n")
    (new / "cpu.stat").write_text("usage_usec 2500000\nuser_usec 1\nsystem_usec 2\n")
    (old / "cpu.stat").write_text("nr_periods 0\nnr_throttled 0\n")
    (old / "cpuacct.usage").write_text("1500000000\n")
    for folder, used_s in ((new, 2.5), (old, 1.5)):
        counted, waited_s = Cgroup(cpu_time=folder).read_cpu_time()
        assert counted == used_s
        assert 0 < waited_s < time.monotonic()
    assert Cgroup().read_cpu_time() == (math.inf, 0.0)


def test_a_group_counts_what_has_ended(parent: Cgroup, tmp_path: Path) -> None:
    """Its processes' time is not lost with them."""
    if parent.cpu_time is None:
        pytest.skip("processor time is not counted by control groups here")
    group = SandboxCgroup(parent, tmp_path)
    group.create(ProgramLimits())
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    with program(sys.executable, "-c", burn) as burner:
        group.add(burner.pid)
        burner.communicate("go\n", timeout=60)
    assert 0.25 < group.group.read_cpu_time()[0] < 2.0
    group.remove()


def test_groups_of_a_killed_trial_are_removed(parent: Cgroup) -> None:
    """An empty group has no record; one of a trial that may still be going on is left alone."""
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


def test_a_killed_process_s_group_is_reaped_with_what_runs_in_it(
    parent: Cgroup, tmp_path: Path
) -> None:
    """By its record; a record of anything else is left alone."""
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


def test_without_groups_each_process_is_bounded() -> None:
    """Data, not address space; cores are off; what is not enforced is said."""
    limits = ProgramLimits(memory_mb=50, open_files=64, cpu_s=7, file_mb=3)
    with program("sleep", "60") as one:
        set_rlimits(one.pid, limits, Cgroup())
        assert resource.prlimit(one.pid, resource.RLIMIT_DATA) == (50 << 20, 50 << 20)
        assert resource.prlimit(one.pid, resource.RLIMIT_FSIZE) == (3 << 20, 3 << 20)
        assert resource.prlimit(one.pid, resource.RLIMIT_NOFILE) == (64, 64)
        assert resource.prlimit(one.pid, resource.RLIMIT_CPU) == (7, 7)
        assert resource.prlimit(one.pid, resource.RLIMIT_CORE) == (0, 0)
        assert resource.prlimit(one.pid, resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
        assert os.getpriority(os.PRIO_PROCESS, one.pid) > 0
        set_rlimits(one.pid, ProgramLimits(), Cgroup())  # nothing is raised again
        assert resource.prlimit(one.pid, resource.RLIMIT_NOFILE) == (64, 64)
    lines = list_unenforced(Cgroup())
    assert len(lines) == 3
    assert "memory is limited for each process" in lines[0]
    assert list_unenforced(Cgroup(*[Path("/x")] * 3)) == []


def test_a_unified_group_is_set_by_its_own_files(tmp_path: Path) -> None:
    """Version 2: one group for both, no swap, kills counted where it has them."""
    root = tmp_path / "groups"
    root.mkdir()
    assert not Cgroup(root, root).unified
    (root / "cgroup.controllers").write_text("cpu memory pids")
    group = SandboxCgroup(Cgroup(root, root), tmp_path)
    group.create(ProgramLimits(memory_mb=2, processes=7))
    (made,) = root.glob("tugline-*")
    texts = {path.name: path.read_text() for path in made.iterdir()}
    assert texts == {"memory.max": "2097152", "memory.swap.max": "0", "pids.max": "7"}
    (made / "memory.events").write_text("oom 4\noom_kill 3\noom_group_kill 0\n")
    assert group.group.count_oom_kills() == OomKills(own=3)
    (made / "memory.events").write_text("oom 0\noom_kill 2\noom_group_kill 0\n")
    assert group.group.count_oom_kills() == OomKills(others=2)


async def test_a_node_out_of_memory_is_not_the_sandboxs_doing(
    parent: Cgroup, tmp_path: Path
) -> None:
    """Killed by what the node runs in, within its own limit: no cause of the agent's."""
    if parent.unified:
        pytest.skip("a group below another one needs its controllers there")
    node = parent.memory / f"tugline-node-{tmp_path.name}"
    node.mkdir()
    try:
        (node / "memory.limit_in_bytes").write_text(str(40 << 20))
        group = SandboxCgroup(Cgroup(node, None), tmp_path)
        group.create(ProgramLimits(memory_mb=4096))
        with program(sys.executable, "-c", "x = b'x' * (200 << 20)") as eater:
            group.add(eater.pid)
            share = ResourceMonitor(100, list, group.group.count_oom_kills, _nothing)

            async def run() -> Exit:
                await asyncio.to_thread(eater.communicate, "go\n", timeout=20)
                return Exit(eater.returncode, timed_out=False, seconds=1.0)

            with pytest.raises(SandboxError, match="the node is out of memory"):
                await share.run(run, eater.pid)
        assert group.group.count_oom_kills() == OomKills(others=1)
        group.remove()
    finally:
        node.rmdir()


async def _nothing() -> None:
    """OomKills nothing."""


async def test_the_disk_is_summed_up(tmp_path: Path) -> None:
    """Blocks, not lengths; hard links once; empty files a little; what is deep is too much."""
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


async def looked_at(share: ResourceMonitor, seconds: float) -> Exit:
    """The end of a program that sleeps, in no sandbox."""

    async def sleeps() -> Exit:
        await asyncio.sleep(seconds)
        return Exit(0, timed_out=False, seconds=seconds)

    return await share.run(sleeps, 1 << 30)


async def test_what_was_there_before_the_first_program_does_not_count(tmp_path: Path) -> None:
    """A copy of a large workspace is not the agent's doing; what comes later is."""
    (tmp_path / "copied").write_bytes(b"x" * (3 << 20))
    share = ResourceMonitor(2, lambda: [tmp_path], OomKills, _nothing)
    assert (await looked_at(share, 0)).cause is None
    (tmp_path / "new").write_bytes(b"x" * (3 << 20))
    async with asyncio.timeout(20):  # after a slow look the next one waits longer
        while (await looked_at(share, 0)).cause is not Cause.AGENT_DISK:  # noqa: ASYNC110 - of looks
            await asyncio.sleep(0.1)


async def test_a_sandbox_that_could_not_be_ended_is_ended_at_the_next_look(tmp_path: Path) -> None:
    """The engine did not answer once."""
    tried = []

    async def kill() -> None:
        tried.append(time.monotonic())
        if len(tried) == 1:
            msg = "not ended within 60 s"
            raise SandboxError(msg)

    share = ResourceMonitor(1, lambda: [tmp_path / "w"], OomKills, kill, interval_s=0.1)
    assert (await looked_at(share, 0)).cause is None
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "x").write_bytes(b"x" * (3 << 20))
    assert (await looked_at(share, 1)).cause is Cause.AGENT_DISK
    assert len(tried) == 2


async def test_very_many_files_are_looked_at_seldom_but_they_are() -> None:
    """A look that takes long is not repeated after each quick program; the rest has a bound."""
    looks = []

    def slow(*_: object) -> int:
        looks.append(time.monotonic())
        time.sleep(0.3)
        return 0

    share = ResourceMonitor(
        1, list, OomKills, _nothing, interval_s=0.1, max_pause_s=1.0, measure=slow
    )
    for _ in range(5):
        await looked_at(share, 0)
    assert len(looks) == 2  # what was there at first, and after the first one
    await looked_at(share, 3)
    assert len(looks) in {5, 6}
    assert max(after - before for before, after in pairwise(looks)) < 1.8


def test_the_filter_of_system_calls_is_whole() -> None:
    """Eight bytes an instruction on each processor that is known, nothing on others."""
    for machine in ("x86_64", "aarch64"):
        assert len(bpf_filter(machine)) % 8 == 0
        assert len(bpf_filter(machine)) > 300
    assert bpf_filter("riscv64") == b""
