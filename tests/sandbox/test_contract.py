"""The contract of every sandbox driver."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import time
import weakref
from functools import partial
from pathlib import Path, PurePosixPath

import msgspec
import pytest
import uvloop

from support.polling import until
from support.sandbox import (
    DRIVERS,
    WITH_PYTHON,
    Driver,
    kill_node,
    mount_table,
    open_files,
    page,
    read_log,
    run_shell,
    running,
    unique_sleep,
    wait_until_gone,
    wait_until_running,
)
from support.sockets import serve
from tugline.aio import PausableTimeout, run_beside
from tugline.errors import SandboxError, UsageError
from tugline.patch import FileChange
from tugline.sandbox.base import OUTPUT_BYTES, Exit, Mount, ProgramTimeout, Sandbox
from tugline.sandbox.limits import RECORD, Cgroup, find_cgroup_parent
from tugline.types import Cause

ISOLATED = pytest.mark.parametrize("driver", DRIVERS[1:], indirect=True)
BOUNDED = pytest.mark.parametrize("driver", WITH_PYTHON[1:], indirect=True)


async def test_a_program_gets_its_files_and_a_clean_environment(
    driver: Driver, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program starts in the workdir with an empty stdin and no variable of the node."""
    monkeypatch.setenv("HF_TOKEN", "s3cret")
    script = "pwd; cat; wc -c <a/b.txt; cd; pwd; env; exit 7"
    end = await run_shell(sandbox, script, GIVEN="two\nlines '\"")
    assert (end.code, end.timed_out, end.cause) == (7, False, None)
    lines = read_log(sandbox).splitlines()
    assert [lines[0], lines[1].strip(), lines[2]] == [str(sandbox.workdir), "8", str(sandbox.home)]
    assert "GIVEN=two" in lines
    assert "lines '\"" in lines
    assert "s3cret" not in read_log(sandbox)
    if driver.isolated:
        assert f"HOME={sandbox.home}" in lines


async def test_exit_codes(sandbox: Sandbox) -> None:
    """Failing, killed and missing programs have exit codes and raise nothing."""
    assert (await run_shell(sandbox, "exit 3")).code == 3
    assert (await run_shell(sandbox, "exit 255")).code == 255
    assert (await run_shell(sandbox, "kill -9 $$")).code == -signal.SIGKILL
    assert (await run_shell(sandbox, "kill -TERM $$")).code == -signal.SIGTERM
    assert (await sandbox.run(("no-such-program",), env={}, timeout_s=20)).code == 127


async def test_run_returns_the_end_of_its_own_output(sandbox: Sandbox) -> None:
    """Output of earlier programs in the same log is not returned, even after a kill."""
    first = await run_shell(sandbox, "echo out; echo err >&2; exit 3")
    assert (first.code, first.output) == (3, "out\nerr\n")
    long = await run_shell(sandbox, f"head -c {OUTPUT_BYTES} /dev/zero | tr '\\0' x; echo end")
    assert len(long.output) == OUTPUT_BYTES
    assert long.output.endswith("xend\n")
    assert (await run_shell(sandbox, "true")).output == ""
    killed = await run_shell(sandbox, "echo begun; sleep 60", timeout_s=2.0)
    assert (killed.timed_out, killed.output) == (True, "begun\n")


async def test_arguments_and_variables_are_passed_unchanged(
    driver: Driver, sandbox: Sandbox
) -> None:
    """Every byte but NUL, quotes, odd names and an argument of 128 KB reach the program."""
    all_bytes = os.fsdecode(bytes(range(1, 256)))
    quoting = "a\n'b' \"c\" $(d) `e` \\f\\ #g\r\t "
    arguments = [all_bytes, "x" * 131_000, quoting, "", "-n"]
    script = ("sh", "-c", 'printf "%s|" "$@" "$BYTES"', "0", *arguments)
    assert (await sandbox.run(script, env={"BYTES": all_bytes}, timeout_s=20)).code == 0
    written = (sandbox.logs / "agent.log").read_bytes()
    assert written == b"".join(os.fsencode(word) + b"|" for word in [*arguments, all_bytes])
    await sandbox.run(("env",), env={"odd-name": "it's"}, timeout_s=20, log_name="env")
    if driver.isolated:  # other drivers run programs through a shell
        assert "odd-name=it's" in (sandbox.logs / "env.log").read_text().splitlines()


@ISOLATED
async def test_invalid_variables_are_refused(sandbox: Sandbox, tmp_path: Path) -> None:
    """A NUL byte and a lone surrogate are the caller's mistake.

    A program's environment, which includes its key, is not on the disk after its end.
    """
    for value in ("a\0b", "\ud800"):
        with pytest.raises(UsageError):
            await run_shell(sandbox, "exit 0", GIVEN=value)
    assert (await run_shell(sandbox, "exit 0", SECRET="x")).code == 0
    assert os.listdir(tmp_path / "s" / "control") == ["runner"]  # noqa: PTH208


async def test_output_is_streamed_and_limited(driver: Driver, tmp_path: Path) -> None:
    """A megabyte is kept; thirty more do not block the program, and the log has a note."""
    log = tmp_path / "s" / "logs" / "agent.log"
    async with driver.bounded(output_mb=1).open(tmp_path / "s", driver.spec()) as sandbox:
        going = asyncio.create_task(run_shell(sandbox, "echo first; sleep 0.5; echo last"))
        await until(lambda: log.exists() and log.read_text(), 5)
        assert not going.done()
        await going
        assert log.read_text() == "first\nlast\n"
        assert (await run_shell(sandbox, "head -c 30000000 /dev/zero; exit 4", 30)).code == 4
        assert log.read_bytes().endswith(b"is left out]\n")
        assert log.stat().st_size < (1 << 20) + 200


async def test_a_directory_is_not_used_twice(driver: Driver, tmp_path: Path) -> None:
    """Files of an earlier attempt are not visible to the next."""
    spec = driver.spec(files={"x": "1"})
    async with driver.runtime.open(tmp_path / "s", spec):
        pass
    with pytest.raises(SandboxError, match="is not empty; each session needs a folder of its own"):
        async with driver.runtime.open(tmp_path / "s", spec):
            pass


async def test_a_timeout_ends_everything_but_the_sandbox(sandbox: Sandbox) -> None:
    """Processes that ignore SIGTERM or have left the session end, too; files are kept."""
    sleep = unique_sleep()
    script = f"echo kept >k; (setsid {sleep} &); trap '' TERM; {sleep}"
    end = await run_shell(sandbox, script, timeout_s=0.5)
    assert (end.code, end.timed_out) == (-signal.SIGKILL, True)
    assert not running(sleep)
    assert (await run_shell(sandbox, "cat k")).code == 0
    assert read_log(sandbox).endswith("kept\n")


@ISOLATED
async def test_a_killed_sandbox_is_an_error(sandbox: Sandbox) -> None:
    """A run does not wait for a shell that is gone; the next run starts a new one."""
    going = asyncio.create_task(run_shell(sandbox, sleep := unique_sleep()))
    await wait_until_running(sleep)
    os.kill(sandbox._pid, signal.SIGKILL)  # type: ignore[attr-defined]
    with pytest.raises(SandboxError):
        await asyncio.wait_for(going, 5)
    assert (await run_shell(sandbox, "exit 6")).code == 6


async def test_cancelling_a_run_ends_its_program_first(sandbox: Sandbox) -> None:
    """A cancelled run returns when its program is dead, even if it is cancelled twice."""
    sleep = unique_sleep()
    task = asyncio.create_task(run_shell(sandbox, sleep))
    await wait_until_running(sleep)
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not running(sleep)
    assert (await run_shell(sandbox, "exit 6")).code == 6


async def test_daemons_end_with_their_program(sandbox: Sandbox) -> None:
    """No process of a program is alive after its end."""
    sleep = unique_sleep()
    end = await run_shell(sandbox, f"(setsid {sleep} >/dev/null 2>&1 &); exit 0")
    assert (end.code, end.timed_out) == (0, False)
    assert not running(sleep)


async def test_diff_has_all_changes_of_the_workdir(sandbox: Sandbox) -> None:
    """New, changed, removed and executable files and links are found, also those of `put`."""
    await sandbox.put(sandbox.workdir, {"late": "x"})
    await sandbox.put(sandbox.home, {"not-in-it": "x"})
    script = "echo 2 >edit; rm drop; printf '\\377' >new; chmod +x new; ln -s edit link"
    await run_shell(sandbox, script)
    assert (await sandbox.diff()).files == {
        "edit": FileChange(b"2\n"),
        "drop": None,
        "new": FileChange(b"\xff", executable=True),
        "late": FileChange(b"x"),
        "link": FileChange(b"edit", link=True),
    }


async def test_a_base_folder_is_never_changed(driver: Driver, tmp_path: Path) -> None:
    """Changes survive a kill, the base does not change, and nothing stays mounted."""
    base = tmp_path / "ba,s:e" if driver.name in {"local", "bubblewrap"} else tmp_path / "base"
    base.mkdir()
    for name in ("stays", "goes", "grows"):
        (base / name).write_text(name)
    spec = driver.spec(base, files={"given": "g", "stays": "s2"})
    async with driver.runtime.open(tmp_path / "s", spec) as sandbox:
        script = "cat stays given; rm goes; echo more >>grows; echo n >n; sleep 9"
        assert (await run_shell(sandbox, script, timeout_s=1.5)).timed_out
        assert read_log(sandbox) == "s2g"
        await sandbox.put(sandbox.workdir, {"put": "p"})
        assert (await run_shell(sandbox, "cat put n grows; ! test -e goes")).code == 0
        assert await sandbox.get(sandbox.workdir / "grows") == b"growsmore\n"
        assert (await sandbox.diff()).files == {
            "goes": None,
            "grows": FileChange(b"growsmore\n"),
            "n": FileChange(b"n\n"),
            "put": FileChange(b"p"),
        }
        assert (await run_shell(sandbox, "cat n put")).code == 0  # after a restart
        if driver.name == "bubblewrap":
            assert str(tmp_path) not in mount_table()
    assert str(tmp_path / "s") not in mount_table()
    assert {path.name: path.read_text() for path in base.iterdir()} == {
        name: name for name in ("goes", "grows", "stays")
    }


async def test_files_are_put_and_read_in_own_folders_only(sandbox: Sandbox) -> None:
    """Only the workdir and the home can be reached, and not through links."""
    program = FileChange(b"#!/bin/sh\ncat d/x\n", executable=True)
    await sandbox.put(sandbox.workdir, {"d/run": program, "d/x": "xx"})
    await sandbox.put(sandbox.home, {".settings": b"\xff"})
    assert (await run_shell(sandbox, "d/run; ln -s / l")).code == 0
    assert read_log(sandbox) == "xx"
    assert await sandbox.get(sandbox.home / ".settings") == b"\xff"
    assert await sandbox.get(sandbox.workdir / "d/x") == b"xx"
    assert await sandbox.get(sandbox.workdir / "d/x", max_bytes=1) is None
    assert await sandbox.get(sandbox.workdir / "missing") is None
    assert await sandbox.get(sandbox.workdir / "l/etc/passwd") is None
    for path in ("/etc/passwd", f"{sandbox.workdir}/../etc/passwd"):
        with pytest.raises(UsageError):
            await sandbox.get(PurePosixPath(path))
    with pytest.raises(UsageError, match="not below /etc"):
        await sandbox.put(PurePosixPath("/etc"), {"x": "1"})


async def test_mounts_are_read_only_or_empty(driver: Driver, tmp_path: Path) -> None:
    """Folders of the node are read-only; those without a source are empty and writable."""
    if not driver.isolated:
        pytest.skip("plain processes have no mounts")
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "tool").write_text("tool")
    optional = Mount("/bin/sh", str(shared / "tool"), optional=True)
    missing = Mount("/opt/tool", str(shared / "tool"), optional=True)
    mounts = (Mount("/shared", str(shared)), Mount("/logs/verifier"), optional, missing)
    async with driver.runtime.open(tmp_path / "s", driver.spec(mounts=mounts)) as sandbox:
        script = "cat /shared/tool /opt/tool; echo 1 >/logs/verifier/reward; touch /shared/x"
        assert (await run_shell(sandbox, script)).code != 0
        assert read_log(sandbox).startswith("tooltool")
        assert await sandbox.get(PurePosixPath("/logs/verifier/reward")) == b"1\n"
    assert os.listdir(shared) == ["tool"]  # noqa: PTH208


async def test_only_an_exposed_url_is_reachable(driver: Driver, sandbox: Sandbox) -> None:
    """A restarted sandbox reaches the URL, too; nothing is reachable after `diff`."""
    async with serve(page) as port, serve(page) as other:
        inside = await sandbox.expose(f"http://127.0.0.1:{port}/a?b")
        for _ in range(2):
            end = await sandbox.run(driver.fetch(inside), env={}, timeout_s=30)
            assert end.code == 0, read_log(sandbox)
            assert (await run_shell(sandbox, "sleep 9", timeout_s=0.2)).timed_out
        assert read_log(sandbox).count("GET /a?b HTTP") == 2
        if driver.isolated:
            await sandbox.diff()
            for unreachable in (f"http://127.0.0.1:{other}/a?b", inside):
                end = await sandbox.run(driver.fetch(unreachable), env={}, timeout_s=30)
                assert end.code != 0
            assert read_log(sandbox).count("GET /a?b HTTP") == 2


@ISOLATED
def test_an_exit_takes_precedence_over_a_late_timer(driver: Driver, tmp_path: Path) -> None:
    """If exit and timer are both due after a stall, the program had ended before.

    After it has read something, uvloop runs its timers first.
    """

    async def run_and_stall() -> Exit:
        timeout = PausableTimeout(0.6)
        timeout.pause()
        script = "touch began; until [ -e go ]; do sleep 0.01; done; sleep 0.3"
        async with driver.runtime.open(tmp_path / "s", driver.spec()) as sandbox:
            argv = ("sh", "-c", script)
            run = asyncio.create_task(sandbox.run(argv, env={}, timeout_s=timeout))
            while await sandbox.get(sandbox.workdir / "began") is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await sandbox.put(sandbox.workdir, {"go": ""})
            timeout.resume()
            own, other = socket.socketpair()
            with own, other:
                loop = asyncio.get_running_loop()
                loop.add_reader(own, lambda: (loop.remove_reader(own), time.sleep(1.5)))
                other.send(b"!")
                return await run

    end = uvloop.run(run_and_stall())
    assert (end.code, end.timed_out) == (0, False)


BURN = "import time\nwhile time.process_time() < 0.4: pass"


@BOUNDED
async def test_waits_for_a_processor_are_not_charged(
    driver: Driver, sandbox: Sandbox, tmp_path: Path
) -> None:
    """On overloaded processors, a program has up to four times as long, unless it sleeps."""
    own: Cgroup = sandbox._cgroup  # type: ignore[attr-defined]
    if own.cpu is None or own.cpu_time is None:
        pytest.skip(f"no control groups of the processor can be made for {driver.name} here")

    async def keep_busy(number: int) -> None:
        async with driver.runtime.open(tmp_path / f"{number}", driver.spec()) as neighbour:
            await run_shell(neighbour, f": {mark}; while :; do :; done", 120)

    async def run_limited(script: str, limit_s: float) -> tuple[Exit, ProgramTimeout]:
        timeout = ProgramTimeout(limit_s)
        end = await sandbox.run(("sh", "-c", script), env={}, timeout_s=timeout)
        return end, timeout

    mark, count = unique_sleep(), 5 * (os.cpu_count() or 1)
    async with run_beside(*(keep_busy(number) for number in range(count))):
        await until(lambda: len(running(mark)) >= count, 90)
        idle, timeout = await run_limited("sleep 60", 3.0)
        assert idle.timed_out
        assert timeout.waited_s < 1.0
        assert idle.seconds < 4.5
        busy, timeout = await run_limited("while :; do :; done", 2.0)
        assert busy.timed_out
        assert timeout.waited_s > 3.0
        assert 5.0 < busy.seconds < 9.5
        slow, timeout = await run_limited(f"exec python3 -I -c '{BURN}'", 4.0)
        assert (slow.code, slow.timed_out) == (0, False)
        assert timeout.waited_s > 0.5


# --------------------------------------------------------------------------- memory
async def use_and_close(driver: Driver, folder: Path, use: str) -> weakref.ref[Sandbox]:
    """Use a sandbox, close it, and return a weak reference to it."""
    async with driver.runtime.open(folder, driver.spec()) as sandbox:
        if use == "nothing":
            return weakref.ref(sandbox)
        if use == "a server":
            server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
            async with server:
                await sandbox.expose(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        if use == "a timeout":
            assert (await run_shell(sandbox, "sleep 60", 0.3)).timed_out
        if use == "a limit":
            timeout = ProgramTimeout(0.5)
            await sandbox.run(("sleep", "60"), env={}, timeout_s=timeout)
        if use == "a cancellation":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.3):
                    await run_shell(sandbox, "sleep 60")
        if use == "an error":
            with pytest.raises(UsageError):
                await sandbox.get(PurePosixPath("/nowhere"))
        await run_shell(sandbox, "echo hello")
        await sandbox.put(sandbox.workdir, {"a": "b"})
        await sandbox.get(sandbox.workdir / "a")
        await sandbox.diff()
        return weakref.ref(sandbox)


@pytest.mark.parametrize(
    "use", ["nothing", "programs", "a server", "a timeout", "a limit", "a cancellation", "an error"]
)
async def test_closed_sandboxes_are_freed_without_a_collection(
    driver: Driver, tmp_path: Path, use: str
) -> None:
    """A closed sandbox is in no reference cycle, since a node that is never idle collects none."""
    await use_and_close(driver, tmp_path / "first", "programs")
    gc.collect()
    gc.disable()
    try:
        closed = await use_and_close(driver, tmp_path / "second", use)
        await until(lambda: closed() is None, 5)  # threads hold their last function for a moment
    finally:
        gc.enable()


# --------------------------------------------------------------------------- limits
@pytest.mark.parametrize(
    "driver", [name for name in DRIVERS if isinstance(name, str)], indirect=True
)
async def test_cpu_time_and_file_size_are_limited(driver: Driver, tmp_path: Path) -> None:
    """Endless loops and endless files are stopped."""
    async with driver.bounded(cpu_s=1, file_mb=1).open(tmp_path, driver.spec()) as sandbox:
        await run_shell(sandbox, "head -c 3000000 /dev/zero >big; wc -c <big")
        assert int(read_log(sandbox).split()[-1]) <= 1 << 20
        end = await run_shell(sandbox, "while :; do :; done")
        assert end.code in (-signal.SIGXCPU, -signal.SIGKILL)
        assert not end.timed_out


@BOUNDED
async def test_memory_is_limited(driver: Driver, tmp_path: Path) -> None:
    """Programs over the limit are killed with a cause; the sandbox and its memory stay usable."""
    runtime = driver.bounded(memory_mb=70)
    if any("memory" in line for line in await asyncio.to_thread(runtime.list_weaknesses)):
        pytest.skip("no memory control group can be made here")
    async with runtime.open(tmp_path, driver.spec()) as sandbox:
        for script in (
            "python3 -c 'bytearray(300 << 20)'",
            "head -c 64000000 /dev/zero >/dev/shm/x; python3 -c 'bytearray(30 << 20)'",
        ):
            assert (await run_shell(sandbox, script)).cause is Cause.AGENT_MEMORY
            small = "test ! -e /dev/shm/x && python3 -c 'bytearray(8 << 20)' && exit 4"
            end = await run_shell(sandbox, small)
            assert (end.code, end.cause) == (4, None)


@BOUNDED
async def test_the_number_of_processes_is_limited(driver: Driver, tmp_path: Path) -> None:
    """Further forks fail; once the processes are gone, new ones can start."""
    async with driver.bounded(processes=60).open(tmp_path, driver.spec()) as sandbox:
        bomb = "i=0; while [ $i -lt 200 ]; do i=$((i+1)); sleep 3 & done; echo all"
        assert (await run_shell(sandbox, bomb)).code != 0
        assert "all" not in read_log(sandbox).splitlines()
        assert (await run_shell(sandbox, "sleep 0; exit 4")).code == 4


@pytest.mark.parametrize(
    ("driver", "script"),
    [
        pytest.param("bubblewrap", "exec 3>x; rm x; cat /dev/zero >&3", id="deleted"),
        pytest.param("bubblewrap", "mkdir m; cd m; while :; do : >$i; i=$((i+1)); done", id="many"),
        pytest.param(
            "bubblewrap",
            "mkdir -p d/e; head -c 20000000 /dev/zero >d/e/x; chmod 0 d/e d",
            id="hidden",
        ),
        pytest.param(
            "container",
            "mkdir -p /var/x; dd if=/dev/zero of=/var/x/full bs=1M count=60",
            id="in the image's own folders",
            marks=pytest.mark.podman,
        ),
    ],
    indirect=["driver"],
)
async def test_disk_usage_is_limited(driver: Driver, script: str, tmp_path: Path) -> None:
    """A program over the limit is killed, wherever its files are."""
    async with driver.bounded(disk_mb=8).open(tmp_path, driver.spec()) as sandbox:
        end = await run_shell(sandbox, f"i=0; {script}; sleep 20", 30)
        assert (end.cause, end.timed_out) == (Cause.AGENT_DISK, False)
        assert end.seconds < 15


@BOUNDED
async def test_disk_usage_of_short_programs_is_limited(driver: Driver, tmp_path: Path) -> None:
    """A program that ends before the first measurement is checked, too."""
    async with driver.bounded(disk_mb=20).open(tmp_path, driver.spec()) as sandbox:
        sandbox._monitor.max_pause_s = 0.0  # after a scan that a busy machine has slowed down
        assert (await run_shell(sandbox, "head -c 1 /etc/hostname")).cause is None
        end = await run_shell(sandbox, "head -c 60000000 /dev/zero >full")
        assert (end.code, end.cause) == (0, Cause.AGENT_DISK)


# --------------------------------------------------------------------------- cleanup
async def test_many_sessions_leave_nothing(driver: Driver, tmp_path: Path) -> None:
    """Sessions with daemons and timeouts, eight at a time, leave no process, cgroup or mount."""
    sleep, slots = unique_sleep(), asyncio.Semaphore(8)

    async def session(number: int) -> int:
        spec = driver.spec(files={"n": str(number)})
        async with slots, driver.runtime.open(tmp_path / str(number), spec) as sandbox:
            await run_shell(sandbox, f"(setsid {sleep} >/dev/null 2>&1 &)")
            if number % 20 == 0:
                assert (await run_shell(sandbox, "sleep 20", 0.1)).timed_out
            return (await run_shell(sandbox, "exit $(cat n)")).code

    await session(255)
    if driver.name == "bubblewrap":  # its user namespaces are kept for the next sandboxes
        async with contextlib.AsyncExitStack() as stack:
            for number in range(8):
                opening = driver.runtime.open(tmp_path / f"first-{number}", driver.spec())
                await stack.enter_async_context(opening)
    open_before = open_files()
    count = 100 if driver.name == "bubblewrap" else 8
    assert await asyncio.gather(*map(session, range(count))) == list(range(count))
    assert not running(sleep)
    assert driver.list_leftovers(tmp_path) == []
    assert open_files() <= open_before + 1
    if driver.name == "bubblewrap":
        assert set(os.listdir(tmp_path / "7")) == {"home", "logs", "work"}  # noqa: PTH208


@BOUNDED
async def test_a_cancelled_session_leaves_nothing(driver: Driver, tmp_path: Path) -> None:
    """A cancellation while a sandbox is created or a program runs leaves nothing."""
    (tmp_path / "base").mkdir()
    await asyncio.to_thread(driver.runtime.check_available)
    delays = [n / 2000 for n in range(60)]
    if driver.name == "container":
        delays = [0.005, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 1.0]
    open_before = open_files()
    for number, after_s in enumerate([delays[-1], *delays]):
        sandbox = driver.runtime.open(tmp_path / str(number), driver.spec(tmp_path / "base"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(after_s), sandbox as opened:
                await run_shell(opened, "sleep 9")
    assert driver.list_leftovers(tmp_path) == []
    assert open_files() <= open_before + 1


async def test_a_killed_node_leaves_nothing(driver: Driver, tmp_path: Path) -> None:
    """After ``kill -9`` sandboxes end by themselves; `reap` removes the rest, once."""
    sleep, folder, base = unique_sleep(), tmp_path / "s" / "agent", tmp_path / "base"
    base.mkdir()
    (base / "f").touch()
    log = folder / "logs" / "agent.log"
    # Programs of a container can open the pipes of its process 1, and keep them open.
    hold = f"for fd in /proc/1/fd/*; do {sleep} <>$fd & done" if driver.name == "container" else ":"
    script = ("sh", "-c", f"setsid {sleep} & {hold}; echo held; {sleep}")
    least = 4 if driver.name == "container" else 2

    def has_begun() -> bool:
        return log.exists() and "held" in log.read_text() and len(running(sleep)) >= least

    # A node reaps without the options of a task.
    reap = partial(asyncio.to_thread, type(driver.runtime)().reap, tmp_path / "s")
    try:
        spec = driver.spec(base)
        await kill_node(driver.plugin, driver.options, folder, spec, script, has_begun)
        records = [msgspec.json.decode(path.read_bytes()) for path in folder.glob(f"*{RECORD}")]
        groups = [Path(path) for paths in records for path in paths]
        has_own = driver.name in {"bubblewrap", "stand-in", "apptainer"}
        assert bool(groups) is (has_own and find_cgroup_parent() != Cgroup())
        if driver.isolated:
            await wait_until_gone(sleep)
        left = [*groups, *running(sleep), *driver.list_leftovers(folder)]
        ended = await reap()
        assert (ended > 0) is bool(left), (ended, left)
        assert await reap() == 0
        assert [*filter(Path.exists, groups), *running(sleep), *driver.list_leftovers(folder)] == []
    finally:
        await reap()
