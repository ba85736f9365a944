"""Behaviour of Apptainer alone, with itself and with a stand-in; see `support.sandbox`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from support.sandbox import Driver, read_log, run_shell
from tugline.errors import ImageError
from tugline.patch import FileChange, Patch
from tugline.sandbox.apptainer import Apptainer
from tugline.sandbox.base import SandboxSpec
from tugline.sandbox.overlay import unmount_all
from tugline.types import Workspace

EACH = pytest.mark.parametrize("driver", ["stand-in", "apptainer"], indirect=True)
STAND_IN = pytest.mark.parametrize("driver", ["stand-in"], indirect=True)
"""For what cannot be tested with Apptainer itself: other builds of it, and registries."""


@EACH
async def test_a_folder_of_the_image_is_the_workspace(
    driver: Driver, image: Path, tmp_path: Path
) -> None:
    """The folder is mounted copy-on-write, so that the image does not change."""
    spec = SandboxSpec(workspace=Workspace(image=str(image), path="/task"))
    async with driver.runtime.open(tmp_path / "sandbox", spec) as sandbox:
        assert (await run_shell(sandbox, "cat a.txt; echo new > a.txt")).code == 0
        assert await sandbox.diff() == Patch({"a.txt": FileChange(b"new\n")})
    assert (image / "task" / "a.txt").read_text() == "from the image\n"
    assert unmount_all(tmp_path / "sandbox") == 0


@EACH
async def test_programs_cannot_reach_the_runner(driver: Driver, tmp_path: Path) -> None:
    """The runner's memory is masked; with Apptainer itself seccomp is active."""
    look = "ls /proc/1/task; test -c /proc/1/mem; echo $?; grep Seccomp: /proc/1/status"
    async with driver.runtime.open(tmp_path / "sandbox", driver.spec()) as sandbox:
        await run_shell(sandbox, look)
        output = read_log(sandbox).split()
    assert output == ["0", "Seccomp:", "0" if driver.name == "stand-in" else "2"]
    assert not any("shell" in line for line in driver.runtime.list_weaknesses())


@STAND_IN
async def test_missing_seccomp_is_a_weakness(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sandboxes open without a filter, and the weakness is listed."""
    monkeypatch.setenv("NO_SECCOMP", "1")
    async with driver.runtime.open(tmp_path / "sandbox", driver.spec()) as sandbox:
        assert (await run_shell(sandbox, "exit 3")).code == 3
    expected = "the shell that runs it, and so forge its exit code: FATAL: seccomp is not built in"
    assert any(expected in line for line in driver.runtime.list_weaknesses())


@STAND_IN
async def test_an_archive_is_unpacked_once(driver: Driver, image: Path, tmp_path: Path) -> None:
    """The archive is cached with the workspaces; the error for a missing image has the reason."""
    archive = shutil.make_archive(str(tmp_path / "image"), "tar", image)
    spec = SandboxSpec(workspace=Workspace(image=archive))
    for name in ("one", "two"):
        async with driver.runtime.open(tmp_path / name, spec) as sandbox:
            assert (await run_shell(sandbox, "exit 3")).code == 3
    cached = [path for path in (tmp_path / "cache" / "workspaces").iterdir() if path.is_dir()]
    assert len(cached) == 1
    missing = SandboxSpec(workspace=Workspace(image="docker://none"))
    with pytest.raises(ImageError, match=r"'docker://none' cannot be built: .*no such image"):
        async with driver.runtime.open(tmp_path / "x", missing):
            pass


def test_an_open_network_is_a_weakness() -> None:
    """The open network is in the list of weaknesses."""
    assert any("network is open" in line for line in Apptainer(network="host").list_weaknesses())
