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

import psutil
import pytest

from chaos.fleet import until as wait_until
from support.commands import run_program
from support.sandbox import Driver, read_log, run_shell, users
from tugline.errors import SandboxError
from tugline.sandbox.base import Mount, Sandbox, SandboxSpec
from tugline.sandbox.bubblewrap import Bubblewrap
from tugline.sandbox.view import python_folders

pytestmark = pytest.mark.parametrize("driver", ["bubblewrap"], indirect=True)
SYSTEM_PYTHON = Path("/usr/bin/python3")


# --------------------------------------------------------------------------- what programs see
async def test_a_program_sees_only_what_it_is_given(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program has its files and environment, but no process, user or folder of the host."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    await run_shell(
        sandbox, "pwd; id -un; hostname; wc -c <a/b.txt; cat; set -- /proc/[0-9]*; echo $#"
    )
    assert read_log(sandbox).split() == ["/workspace", "agent", "sandbox", "8", "2"]
    await run_shell(sandbox, "env | cut -d= -f1 | sort | tr '\\n' ' '", GIVEN="x")
    variables = set(read_log(sandbox).splitlines()[-1].split()) - {"PWD", "SHLVL", "_"}
    assert variables == {"PATH", "LANG", "HOME", "TMPDIR", "GIVEN"}
    hidden = "/home/* /var/* /run/* /tmp/* /mnt /media /srv /boot /sys /etc/shadow"
    await run_shell(sandbox, f"echo ===; ls -d {hidden} 2>/dev/null")
    python = {str(up) for path in python_folders() for up in (Path(path), *Path(path).parents)}
    visible = [
        path for path in read_log(sandbox).rpartition("===")[2].split() if path not in python
    ]
    assert visible == ["/home/agent", "/run/tugline", "/var/tmp"]  # noqa: S108
    done = await run_shell(
        sandbox, "touch /x /usr/x /etc/x /dev/x /run/tugline/x 2>&1 | grep -c Read-only"
    )
    assert (done.code, read_log(sandbox).splitlines()[-1]) == (0, "5")


async def test_python_and_system_programs_are_available(sandbox: Sandbox) -> None:
    """`python3` has pytest, git works, and TLS certificates are installed."""
    script = "python3 -m pytest --version && git init -q . && ls /etc/ssl/certs/ca-certificates.crt"
    assert (await run_shell(sandbox, script)).code == 0, read_log(sandbox)


async def test_dangerous_system_calls_fail(sandbox: Sandbox) -> None:
    """Calls for user namespaces, mounts, keyrings and on process 1 fail."""
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
async def test_a_failing_stop_still_removes_the_files(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The temporary files are removed, and the error is raised."""
    close = sandbox.aclose  # type: ignore[attr-defined]

    async def hangs() -> None:
        msg = "hangs in the kernel"
        raise SandboxError(msg)

    (sandbox.logs.parent / "tmp" / "x").write_text("x")
    with monkeypatch.context() as patched:
        patched.setattr(sandbox, "_stop", hangs)
        with pytest.raises(SandboxError, match="hangs"):
            await close()
    assert not (sandbox.logs.parent / "tmp").exists()


async def test_the_time_to_kill_does_not_count(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seconds of a run exclude a slow kill, which would hide that the program was starved."""
    kill = sandbox._kill_processes  # type: ignore[attr-defined]

    async def kill_slowly() -> None:
        await asyncio.sleep(1.0)
        await kill()

    with monkeypatch.context() as patched:
        patched.setattr(sandbox, "_kill_processes", kill_slowly)
        end = await run_shell(sandbox, "sleep 99", 0.2)
    assert end.timed_out
    assert end.seconds < 1.0


# --------------------------------------------------------------------------- cleanup
def test_a_parent_killed_during_the_start_leaves_nothing(driver: Driver, tmp_path: Path) -> None:
    """A sandbox whose parent dies while it is created ends by itself."""
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
        driver.runtime.reap(tmp_path)  # bwrap's child may miss the death of its parent
        wait_until(lambda: not users(tmp_path), "the sandboxes to end", 10)
        assert driver.runtime.reap(tmp_path) == 0
        shutil.rmtree(tmp_path, ignore_errors=True)  # the sandbox may not have begun


UNPRIVILEGED = (
    "files_are_put_and_read",
    "exposed_url",
    "base_folder",
    "timeout_ends_everything",
    "number_of_processes",
    "disk_usage_is_limited",
)


@pytest.mark.usefixtures("driver")
def test_an_unprivileged_user_can_run_sandboxes() -> None:
    """Bases, ports, limits and timeouts work for a user who is not root."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can become another user")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    argv = [SYSTEM_PYTHON, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    if not SYSTEM_PYTHON.exists() or subprocess.check_output(argv, text=True).strip() != version:
        pytest.skip(f"no Python {version} that every user can read")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:  # others can read it
        shutil.chown(folder, 65534, 65534)
        env = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        env |= {"PATH": os.environ["PATH"], "TUGLINE_CACHE": f"{folder}/c"}
        done = run_program(
            *("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs"),
            *(SYSTEM_PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("--basetemp", f"{folder}/t", Path(__file__).with_name("test_contract.py")),
            *("-k", f"(bubblewrap or hidden) and ({' or '.join(UNPRIVILEGED)})"),
            env=env,
            timeout=90,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 passed" in done.stdout
    assert "skipped" not in done.stdout


# --------------------------------------------------------------------------- readable folders
@pytest.mark.usefixtures("driver")
async def test_readable_folders_may_be_below_var_tmp(tmp_path: Path) -> None:
    """A readable folder below /var/tmp is visible; without one, /var/tmp is the own /tmp."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        await asyncio.to_thread(Path(folder, "x").write_text, "readable\n")
        async with Bubblewrap(readable=[folder]).open(tmp_path / "a") as sandbox:
            done = await run_shell(
                sandbox, f"cat {folder}/x; ls /var/tmp; echo > /var/tmp/own && exit 4"
            )
            assert (done.code, read_log(sandbox)) == (4, f"readable\n{Path(folder).name}\n")
    async with Bubblewrap().open(tmp_path / "b") as sandbox:
        done = await run_shell(sandbox, "echo > /var/tmp/own && test -e /tmp/own && exit 4")
        assert done.code == 4


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may map owners")
async def test_folders_whose_owners_cannot_be_mapped_are_mounted_as_they_are(
    tmp_path: Path, driver: Driver
) -> None:
    """The sandbox shares the kernel user of the node; the next one has its own again."""
    mount = Mount(target="/opt/kernel", source="/sys/class")
    users = []
    for number, mounts in enumerate([(mount,), ()]):
        spec = SandboxSpec(mounts=mounts)
        async with driver.runtime.open(tmp_path / str(number), spec) as sandbox:
            await run_shell(sandbox, "test -e /opt/kernel/net; echo $?; touch new; stat -c %u new")
            assert read_log(sandbox).split() == [str(number), "1000"]
            users.append(psutil.Process(sandbox._pid).uids().real)  # type: ignore[attr-defined]
    assert users[0] == 0
    assert users[1] != 0
