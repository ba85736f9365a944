"""Programs are installed once and completely, and run in any image."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tugline.errors import DiskFull, HarnessError, UsageError
from tugline.harnesses import install
from tugline.harnesses.install import install_dir, install_once, measure, read_manifest
from tugline.harnesses.mini_swe_agent import PythonPackage
from tugline.harnesses.npm import Npm
from tugline.harnesses.pi import Pi
from tugline.sandbox.cache import cache_folder


async def no_trial(_: Path) -> None:
    """Start nothing."""


PROGRAMS = Path(__file__).with_name("programs")
ASKING = (PROGRAMS / "node.sh").read_text()
INSTALLING = (PROGRAMS / "npm.sh").read_text()


Programs = Callable[..., None]


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    """Replace npm and Node by shell scripts; the cache is empty."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("TUGLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")
    found = (folder / "node", (str(folder / "npm"),))
    monkeypatch.setattr("tugline.harnesses.npm.find_node", lambda: found)

    def write(npm: str, node: str = "echo v22.19.0") -> None:
        for name, script in (("npm", npm), ("node", node)):
            (folder / name).write_text(f"#!/bin/sh\n{script}\n")
            (folder / name).chmod(0o755)

    return write


async def test_a_missing_node_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the command to run."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(UsageError, match=r"need Node and npm .*: pip install 'tugline"):
        await Pi().install()


async def test_npm_that_fails_is_quoted_and_leaves_nothing(programs: Programs) -> None:
    """The error has the end of npm's output; the next attempt starts anew."""
    programs("mkdir half; echo 'ERR! ETARGET no such version' >&2; exit 1")
    with pytest.raises(HarnessError, match=r"exit 1\): ERR! ETARGET"):
        await Pi().install()
    assert [path.name for path in install_dir().glob("pi-*")] == ["pi-1.6.0.lock"]


async def test_concurrent_installations_run_once(programs: Programs) -> None:
    """The second installation waits for the lock and uses the result of the first."""
    programs(f"echo x >> {cache_folder()}/count; sleep 0.2; {INSTALLING}", ASKING)
    await asyncio.gather(Pi().install(), Pi().install())
    assert (cache_folder() / "count").read_text() == "x\n"


async def test_a_program_that_asks_no_model_is_not_installed(programs: Programs) -> None:
    """The error has the end of the program's output, and no files are left."""
    programs(INSTALLING, "[ $1 = --version ] && echo v22.19.0 || echo 'no such thing'")
    with pytest.raises(HarnessError, match=r"pi 1\.6\.0 .* made no model call: no such thing"):
        await Pi().install()
    assert not (install_dir() / "pi-1.6.0").exists()


async def test_a_changed_file_is_detected(tmp_path: Path) -> None:
    """The manifest has path, mode and content of each file; a folder without one is rebuilt."""

    async def fill(fresh: Path) -> None:
        (fresh / "program").write_text("right")
        (fresh / "link").symlink_to("program")

    folder = tmp_path / "x-1"
    await install_once(folder, fill)
    assert read_manifest(folder) == measure(folder)
    (folder / "program").chmod(0o755)
    assert read_manifest(folder) != measure(folder)
    (folder / "program").chmod(0o644)
    (folder / "program").write_text("wrong")
    assert read_manifest(folder) != measure(folder)
    (folder / "tugline.json").unlink()
    await install_once(folder, fill)
    assert (folder / "program").read_text() == "right"
    assert read_manifest(folder) == measure(folder)


async def test_leftovers_of_a_killed_installation_are_removed(tmp_path: Path) -> None:
    """The next installation removes the incomplete folders and nothing else."""
    for name in ("x-1.ab12", "x-1.cd34", "x-10.ab12", "y-1"):
        (tmp_path / name / "new").mkdir(parents=True)

    async def fill(fresh: Path) -> None:
        assert fresh.parent.name not in {"x-1.ab12", "x-1.cd34"}

    await install_once(tmp_path / "x-1", fill)
    there = os.listdir(tmp_path)  # noqa: PTH208 - quick, in a test
    assert set(there) == {"x-1", "x-1.lock", "x-10.ab12", "y-1"}


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/usr/bin/python"),
        shutil.Error([("/a", "/b", "[Errno 28] No space left on device: '/b'")]),
        HarnessError("npm could not install x (exit 228): npm error code ENOSPC: no space left"),
    ],
    ids=["one file", "a tree", "npm"],
)
async def test_a_full_disk_names_the_install_folder(tmp_path: Path, error: Exception) -> None:
    """The error does not name the folder of the copied file."""

    async def full(_: Path) -> None:
        raise error

    with pytest.raises(DiskFull, match=rf"cannot install x-1: no space left in {tmp_path} "):
        await install_once(tmp_path / "x-1", full)


PACKAGE = """mkdir -p node_modules/x/lib && cd node_modules/x && touch lib/cli.js
echo '{"bin": %s}' > package.json"""


@pytest.mark.parametrize("declared", ['"./lib/cli.js"', '{"x": "lib/cli.js", "y": "y.js"}'])
async def test_the_program_is_the_one_that_the_package_declares(
    programs: Programs, declared: str
) -> None:
    """The package declares its program, whose file name differs between versions of qwen-code."""
    programs(PACKAGE % declared)
    package = Npm("x", "x", "1.2.3")
    await package.install(no_trial)
    assert Path(package.command[-1]).name == "cli.js"


async def test_a_package_without_its_program_is_named(programs: Programs) -> None:
    """The installer succeeded, but the package has no program."""
    programs("exit 0")
    with pytest.raises(
        HarnessError, match=r"could not install x@1\.2\.3: the package has no program"
    ):
        await Npm("x", "x", "1.2.3").install(no_trial)


async def test_pip_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the end of pip's output, and the package."""
    monkeypatch.setenv("TUGLINE_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(HarnessError, match=r"cannot install no-such-package==9\.9\.9 \(exit 1\)"):
        await PythonPackage("x", "no-such-package", "9.9.9").install(no_trial)


async def test_libraries_are_added_to_an_existing_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries are copied into ``lib``, which also has Python's standard library."""
    library = tmp_path / "libown.so.1"
    library.write_bytes(b"ELF")
    (tmp_path / "python/lib/python3.11").mkdir(parents=True)
    program = tmp_path / "python/bin/python3.11"
    asked: list[str] = []

    async def find_needed(_program: Path) -> dict[str, Path]:
        return {"libc.so.6": Path("/lib/libc.so.6"), library.name: library}

    async def take(_purpose: str, *argv: str, **_options: Any) -> str:
        asked.extend(argv[4:] if argv[1] == "--force-rpath" else ())
        return ""

    monkeypatch.setattr(install, "_find_needed", find_needed)
    monkeypatch.setattr(install, "run_installer", take)
    await install.bundle_libraries(program, tmp_path / "python", [])
    assert asked == [str(program), str(tmp_path / "python/lib" / library.name)]
    assert (tmp_path / "python/lib" / library.name).read_bytes() == b"ELF"
