from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from sandboxes import Driver, read_log, run_shell, users
from tugline.errors import SandboxError
from tugline.sandbox.base import Sandbox
from tugline.sandbox.bubblewrap import Bubblewrap, python_folders

SYSTEM_PYTHON = Path("/usr/bin/python3")


@pytest.fixture
def driver() -> Driver:
    """Only this one, where it can be had."""
    made = Driver("bubblewrap")
    if reason := made.runtime.check_available():
        pytest.skip(reason)
    return made


# --------------------------------------------------------------------------- what a program sees
async def test_a_program_sees_only_what_it_is_given(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files as given, an environment of its own, no process, user or folder of the machine's."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    await run_shell(
        sandbox, "pwd; id -un; hostname; wc -c <a/b.txt; cat; set -- /proc/[0-9]*; echo $#"
    )
    assert read_log(sandbox).split() == ["/workspace", "agent", "sandbox", "8", "2"]
    await run_shell(sandbox, "env | cut -d= -f1 | sort | tr '\\n' ' '", GIVEN="x")
    seen = set(read_log(sandbox).splitlines()[-1].split()) - {"PWD", "SHLVL", "_"}
    assert seen == {"PATH", "LANG", "HOME", "TMPDIR", "GIVEN"}
    hidden = "/home/* /var/* /run/* /tmp/* /mnt /media /srv /boot /sys /etc/shadow"
    await run_shell(sandbox, f"echo ===; ls -d {hidden} 2>/dev/null")
    ours = {
        str(up) for one in python_folders() for up in (Path(one), *Path(one).parents)
    }  # anywhere
    there = [one for one in read_log(sandbox).rpartition("===")[2].split() if one not in ours]
    assert there == ["/home/agent", "/run/tugline", "/var/tmp"]  # noqa: S108
    done = await run_shell(
        sandbox, "touch /x /usr/x /etc/x /dev/x /run/tugline/x 2>&1 | grep -c Read-only"
    )
    assert (done.code, read_log(sandbox).splitlines()[-1]) == (0, "5")


async def test_python_and_the_systems_programs_are_there(sandbox: Sandbox) -> None:
    """`python3` is one with pytest; git works; TLS has its certificates."""
    script = "python3 -m pytest --version && git init -q . && ls /etc/ssl/certs/ca-certificates.crt"
    assert (await run_shell(sandbox, script)).code == 0, read_log(sandbox)


async def test_the_kernels_side_doors_are_shut(sandbox: Sandbox) -> None:
    """No new user namespace, no keyring, no hand on the keeper, no look at it."""
    script = """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        def refused(result): assert result == -1, result; print(ctypes.get_errno())
        refused(libc.ptrace(16, 1, 0, 0))
        refused(libc.unshare(0x10000000))
        refused(libc.mount(b"x", b"/tmp", b"tmpfs", 0, None))
        refused(libc.syscall(250, 0, 0, 0) if os.uname().machine == "x86_64" else -1)
        print(os.listdir("/proc/1"))
        """
    done = await sandbox.run(("python3", "-c", textwrap.dedent(script)), env={}, timeout_s=10)
    assert done.code == 0, read_log(sandbox)
    assert read_log(sandbox).splitlines()[-1] == "[]"


# --------------------------------------------------------------------------- programs
async def test_a_sandbox_that_cannot_be_ended_leaves_no_files(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the sandbox had of the disk is given back all the same, and the fault is told."""
    ended = sandbox.aclose  # type: ignore[attr-defined]

    async def hangs() -> None:
        msg = "hangs in the kernel"
        raise SandboxError(msg)

    (sandbox.logs.parent / "tmp" / "x").write_text("x")
    with monkeypatch.context() as patched:
        patched.setattr(sandbox, "_stop", hangs)
        with pytest.raises(SandboxError, match="hangs"):
            await ended()
    assert not (sandbox.logs.parent / "tmp").exists()


async def test_the_time_that_killing_takes_is_not_the_programs(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy node it is long, and would hide that the program waited for most of its own."""
    kill = sandbox._kill_processes  # type: ignore[attr-defined]

    async def kill_slowly() -> None:
        await asyncio.sleep(1.0)
        await kill()

    with monkeypatch.context() as patched:
        patched.setattr(sandbox, "_kill_processes", kill_slowly)
        end = await run_shell(sandbox, "sleep 99", 0.2)
    assert end.timed_out
    assert end.seconds < 1.0


# --------------------------------------------------------------------------- nothing is left
def test_parents_killed_at_the_start_leave_nothing(driver: Driver, tmp_path: Path) -> None:
    """A sandbox that was being made when its parent died finds nobody at home, and ends."""
    parent = textwrap.dedent(f"""
        import asyncio, pathlib
        from tugline.sandbox.bubblewrap import Bubblewrap
        async def session(runtime, number):
            async with runtime.open(pathlib.Path({str(tmp_path)!r}) / str(number)) as sandbox:
                await sandbox.run(("sleep", "99"), env={{}}, timeout_s=99)
        async def main():
            runtime = Bubblewrap()
            runtime.list_weaknesses()
            print("go", flush=True)
            await asyncio.gather(*(session(runtime, number) for number in range(20)))
        asyncio.run(main())
    """)
    for wait_s in (0.02, 0.06, 0.12):
        with subprocess.Popen(
            [sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout.readline() == "go\n"
            time.sleep(wait_s)
            process.kill()
        time.sleep(0.2)
        driver.runtime.reap(tmp_path)  # bwrap's child may miss that its parent has died
        deadline = time.monotonic() + 10
        while users(tmp_path):
            assert time.monotonic() < deadline, users(tmp_path)
            time.sleep(0.05)
        assert driver.runtime.reap(tmp_path) == 0
        shutil.rmtree(tmp_path)


ALL_OF_IT = (
    "files_go_in_and_come_out",
    "exposed_url",
    "base_folder",
    "timeout_ends_everything",
    "number_of_processes",
    "disk_is_watched",
)


@pytest.mark.usefixtures("driver")
def test_a_user_without_rights_can_do_it_all() -> None:
    """A base, a door, a limit, a timeout: the tests of all drivers, as a user who is not root."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can become another user")
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    asked = [SYSTEM_PYTHON, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    if not SYSTEM_PYTHON.exists() or subprocess.check_output(asked, text=True).strip() != here:
        pytest.skip(f"no Python {here} that every user can read")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as place:  # others can read it
        shutil.chown(place, 65534, 65534)
        packages = os.pathsep.join(path for path in sys.path if path)
        done = subprocess.run(
            (
                *("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs"),
                *(str(SYSTEM_PYTHON), "-m", "pytest", "-q", "-p", "no:cacheprovider"),
                *("--basetemp", f"{place}/t", Path(__file__).with_name("test_contract.py")),
                *("-k", f"(bubblewrap or hidden) and ({' or '.join(ALL_OF_IT)})"),
            ),
            env={"PYTHONPATH": packages, "PATH": os.environ["PATH"], "TUGLINE_CACHE": f"{place}/c"},
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 passed" in done.stdout
    assert "skipped" not in done.stdout


# --------------------------------------------------------------------------- what is refused
@pytest.mark.usefixtures("driver")
async def test_what_is_shown_may_lie_below_folders_for_passing_files(tmp_path: Path) -> None:
    """A checkout in /var/tmp, say; otherwise that is the sandbox's own /tmp by another name."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        await asyncio.to_thread(Path(folder, "x").write_text, "shown\n")
        async with Bubblewrap(readable=[folder]).open(tmp_path / "a") as sandbox:
            done = await run_shell(
                sandbox, f"cat {folder}/x; ls /var/tmp; echo > /var/tmp/own && exit 4"
            )
            assert (done.code, read_log(sandbox)) == (4, f"shown\n{Path(folder).name}\n")
    async with Bubblewrap().open(tmp_path / "b") as sandbox:
        done = await run_shell(sandbox, "echo > /var/tmp/own && test -e /tmp/own && exit 4")
        assert done.code == 4
