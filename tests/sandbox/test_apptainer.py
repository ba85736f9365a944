"""What only Apptainer does, with itself and with a stand-in; see `sandboxes`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sandboxes import image, make_apptainer
from tugline.errors import ImageError, SandboxError
from tugline.sandbox.apptainer import Apptainer
from tugline.sandbox.base import SandboxSpec
from tugline.sandbox.overlay import unmount_all
from tugline.sandbox.patch import FileChange, Patch
from tugline.types import Workspace

__all__ = ["image"]


@pytest.fixture(params=["stand-in", "apptainer"])
def runtime(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Apptainer:
    """With a cache of its own."""
    return make_apptainer(request.param, tmp_path, monkeypatch)


async def test_the_images_own_folder_is_the_workspace(
    runtime: Apptainer, image: Path, tmp_path: Path
) -> None:
    """Seen copy-on-write, so the image stays as it was."""
    place = SandboxSpec(workspace=Workspace(image=str(image), path="/task"))
    async with runtime.open(tmp_path / "sandbox", place) as sandbox:
        end = await sandbox.run(["sh", "-c", "cat a.txt; echo new > a.txt"], env={}, timeout_s=20)
        assert end.code == 0
        assert await sandbox.diff() == Patch({"a.txt": FileChange(b"new\n")})
    assert (image / "task" / "a.txt").read_text() == "from the image\n"
    assert unmount_all(tmp_path / "sandbox") == 0


async def test_the_shell_that_runs_programs_is_out_of_their_reach(
    runtime: Apptainer, image: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Its memory is covered; with Apptainer itself a filter of system calls is in force."""
    place = SandboxSpec(workspace=Workspace(image=str(image)))
    async with runtime.open(tmp_path / "sandbox", place) as sandbox:
        script = "ls /proc/1/task; test -c /proc/1/mem; echo $?; "
        script += (
            'while read -r name n; do [ $name != Seccomp: ] || echo "$n"; done </proc/1/status'
        )
        await sandbox.run(["sh", "-c", script], env={}, timeout_s=20)
        words = (sandbox.logs / "agent.log").read_text().split()
    assert words == ["0", "0" if "stand-in" in request.node.name else "2"]
    assert not any("shell" in line for line in runtime.list_weaknesses())


async def test_an_apptainer_without_seccomp_is_told(
    runtime: Apptainer,
    image: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its sandboxes open all the same, and it is a weakness that they have no filter."""
    if "stand-in" not in request.node.name:
        pytest.skip("Apptainer has seccomp here")
    monkeypatch.setenv("NO_SECCOMP", "1")
    place = SandboxSpec(workspace=Workspace(image=str(image)))
    async with runtime.open(tmp_path / "sandbox", place) as sandbox:
        assert (await sandbox.run(["sh", "-c", "exit 3"], env={}, timeout_s=20)).code == 3
    told = "the shell that runs it, so forge its exit code: FATAL: seccomp is not built in"
    assert any(told in line for line in runtime.list_weaknesses())


async def test_an_archive_is_made_a_sandbox_directory_once(
    request: pytest.FixtureRequest, runtime: Apptainer, image: Path, tmp_path: Path
) -> None:
    """Kept with the other bases; what cannot be had says why."""
    if "stand-in" not in request.node.name:
        pytest.skip("Apptainer builds from registries, none of which can be reached in tests")
    archive = shutil.make_archive(str(tmp_path / "image"), "tar", image)
    place = SandboxSpec(workspace=Workspace(image=archive))
    for name in ("one", "two"):
        async with runtime.open(tmp_path / name, place) as sandbox:
            assert (await sandbox.run(["sh", "-c", "exit 3"], env={}, timeout_s=20)).code == 3
    made = [path for path in (tmp_path / "cache" / "workspaces").iterdir() if path.is_dir()]
    assert len(made) == 1
    with pytest.raises(ImageError, match=r"'docker://none' cannot be made: .*no such image"):
        async with runtime.open(
            tmp_path / "x", SandboxSpec(workspace=Workspace(image="docker://none"))
        ):
            pass


async def test_without_the_program_it_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In `unavailable`, and for a task that insists."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "there is no apptainer on PATH: see https://" in (Apptainer().check_available() or "")
    with pytest.raises(SandboxError, match="no apptainer on PATH"):
        async with Apptainer().open(tmp_path / "sandbox"):
            pass


def test_an_open_network_is_a_weakness() -> None:
    """The node says so, because nothing else would."""
    assert any("network is open" in line for line in Apptainer(network="host").list_weaknesses())
