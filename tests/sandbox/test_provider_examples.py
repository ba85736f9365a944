"""The examples of custom sandbox providers, with this machine as the remote one.

`support.harbor` stands in for Harbor.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import io
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support import harbor
from support.sandbox import (
    kill_node,
    run_session,
    run_shell,
    running,
    unique_sleep,
    wait_until_gone,
    wait_until_running,
)
from tugline import plugins
from tugline.errors import SandboxError, UsageError
from tugline.patch import FileChange
from tugline.sandbox.base import Mount, Runtime, SandboxSpec
from tugline.sandbox.patch import PatchLimits
from tugline.types import PluginSpec, Workspace

EXAMPLES = Path(__file__).parents[2] / "examples"
REACH = {"reach": "http://10.0.0.5:{port}"}
FILES = {"a.py": "x = 1\n", "pkg/b.py": "y = 2\n"}


class Provider:
    """An example under test; its files on the remote machine are in `there`."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.there = name, folder / "there"
        self.there.mkdir()

    def make(self, **options: Any) -> Any:
        """Its runtime, found by name as for a task."""
        name, own = ("remote_runtime:Remote", {"folder": str(self.there)})
        if self.name == "harbor":
            name, own = "harbor_runtime:HarborRuntime", {"home": str(self.there / "home")}
        return plugins.make("runtime", PluginSpec(name, {**own, **options}), Runtime)

    def spec(self, **values: Any) -> SandboxSpec:
        """A spec with a workdir on the remote machine."""
        if self.name == "remote":
            return SandboxSpec(**values)
        workspace = Workspace(image="here", path=str(self.there / "work"))
        return SandboxSpec(**{"workspace": workspace, **values})


@pytest.fixture
def provider(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Provider:
    """The example with this name."""
    harbor.install(monkeypatch)
    monkeypatch.setattr(harbor.BaseEnvironment, "started", [])
    for folder in (EXAMPLES, EXAMPLES / "harbor_environments"):
        monkeypatch.syspath_prepend(folder)
    return Provider(request.param, tmp_path)


BOTH = pytest.mark.parametrize("provider", ["remote", "harbor"], indirect=True)
REMOTE = pytest.mark.parametrize("provider", ["remote"], indirect=True)
HARBOR = pytest.mark.parametrize("provider", ["harbor"], indirect=True)


@BOTH
async def test_a_session_runs(provider: Provider, tmp_path: Path) -> None:
    """Files, output, exit codes and changes are transferred; no remote files are left."""
    runtime = provider.make(**(REACH if provider.name == "harbor" else {}))
    async with runtime.open(tmp_path / "sandbox", provider.spec(files=FILES)) as sandbox:
        await run_session(sandbox)
        assert (await run_shell(sandbox, "kill -9 $$")).code == -9
        inside = "127.0.0.1" if provider.name == "remote" else "10.0.0.5"
        assert await sandbox.expose("http://127.0.0.1:81/s/x") == f"http://{inside}:81/s/x"
        assert bool(harbor.BaseEnvironment.started) is (provider.name == "harbor")
    assert harbor.BaseEnvironment.started == []
    assert provider.name == "harbor" or not list(provider.there.iterdir())
    left = {path.name for path in (tmp_path / "sandbox").iterdir()}
    assert left <= {"logs", "harbor", "harbor-trial"}


@BOTH
async def test_a_patch_is_applied_to_a_new_sandbox(provider: Provider, tmp_path: Path) -> None:
    """Modes, links, removals, and files in place of folders are applied."""
    spec = provider.spec(files={"a": "1", "b": "2", "c/d": "3"})
    async with provider.make().open(tmp_path / "sandbox", spec) as sandbox:
        patch = {
            "a": None,
            "b": None,
            "b/in": "below",
            "c": b"\0",
            "run.sh": FileChange(b"#!/bin/sh\nexit 5\n", executable=True),
            "link": FileChange(b"run.sh", link=True),
        }
        await sandbox.put(sandbox.workdir, patch)
        assert (await sandbox.run(["./link"], env={}, timeout_s=20)).code == 5
        assert await sandbox.get(sandbox.workdir / "b/in") == b"below"
        assert await sandbox.get(sandbox.workdir / "c") == b"\0"
        assert await sandbox.get(sandbox.workdir / "c", max_bytes=0) is None
        for missing in ("a", "link", "c/d", "none"):
            assert await sandbox.get(sandbox.workdir / missing) is None, missing
        with pytest.raises(UsageError, match="must be relative"):
            await sandbox.put(sandbox.workdir, {"../x": "x"})


@BOTH
async def test_timeouts_end_remote_programs(provider: Provider, tmp_path: Path) -> None:
    """A time-out or cancellation ends programs and their children, for Harbor in any session."""
    sleep = unique_sleep()
    script = f"{'setsid ' if provider.name == 'harbor' else ''}{sleep} & {sleep}"
    async with provider.make().open(tmp_path / "sandbox", provider.spec()) as sandbox:
        end = await run_shell(sandbox, script, 0.5)
        assert (end.timed_out, end.code) == (True, -9)
        assert provider.name == "remote" or not running(sleep)
        await wait_until_gone(sleep)  # a signal to a group is not waited for
        task = asyncio.create_task(run_shell(sandbox, script))
        await wait_until_running(sleep)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert provider.name == "remote" or not running(sleep)
        await wait_until_gone(sleep)


@REMOTE
async def test_files_of_a_killed_node_are_removed(provider: Provider, tmp_path: Path) -> None:
    """Files are found by their record, once."""
    sleep, runtime = unique_sleep(), provider.make()
    node = ("remote_runtime:Remote", {"folder": runtime.folder}, tmp_path / "sandbox")
    await kill_node(*node, SandboxSpec(), sleep.split(), partial(running, sleep))
    assert [runtime.reap(tmp_path) for _ in range(2)] == [1, 0]
    await wait_until_gone(sleep)
    assert list(provider.there.iterdir()) == []


@HARBOR
async def test_environments_of_killed_nodes_are_stopped(provider: Provider, tmp_path: Path) -> None:
    """Environments are found by their record, once."""
    async with provider.make().open(tmp_path / "sandbox", provider.spec()):
        record = (tmp_path / "sandbox" / "harbor.json").read_bytes()
    (tmp_path / "sandbox" / "harbor.json").write_bytes(record)
    harbor.BaseEnvironment.started.append(msgspec.json.decode(record)["session"])
    other = provider.make(environment="daytona")  # a node reaps without the options of a task
    assert [await asyncio.to_thread(other.reap, tmp_path) for _ in range(2)] == [1, 0]
    assert harbor.BaseEnvironment.started == []


@pytest.mark.parametrize(
    ("provider", "options", "spec", "error", "text"),
    [
        ("remote", {}, {"workspace": Workspace(image="x")}, UsageError, "takes files only"),
        ("remote", {}, {"mounts": (Mount("/x"),)}, UsageError, "takes files only"),
        ("harbor", {}, {"workspace": Workspace(repo="x")}, UsageError, "takes workspace.image"),
        ("harbor", {"kwargs": {"wrong": 1}}, {}, UsageError, "Unknown option"),
        ("harbor", {"environment": "moon"}, {}, UsageError, "'moon' of Harbor"),
        ("harbor", {}, {"workspace": Workspace(image="missing")}, SandboxError, "no such image"),
    ],
    indirect=["provider"],
)
async def test_unsupported_specs_are_refused(
    provider: Provider, options: Any, spec: Any, error: Any, text: str, tmp_path: Path
) -> None:
    """Workspaces, mounts, options, environments and images that do not fit are errors."""
    with pytest.raises(error, match=text):
        async with provider.make(**options).open(tmp_path / "sandbox", provider.spec(**spec)):
            pass


@pytest.mark.parametrize(
    ("provider", "options", "text"),
    [
        ("remote", {"connect": ["sh", "-c", "echo no route >&2; exit 255"]}, "no route"),
        ("harbor", {"kwargs": {"wrong": 1}}, "no account"),
        ("harbor", {"environment": "moon"}, "'moon' of Harbor"),
    ],
    indirect=["provider"],
)
async def test_missing_providers_are_reported(provider: Provider, options: Any, text: str) -> None:
    """An unreachable machine, or a provider without an account, is named."""
    assert provider.make().check_available() is None
    assert text in provider.make(**options).check_available()


@REMOTE
async def test_a_failing_remote_command_is_an_error(provider: Provider, tmp_path: Path) -> None:
    """The error has its output."""
    async with provider.make().open(tmp_path / "other") as sandbox:
        with pytest.raises(SandboxError, match=r"sh: .*not found"):
            await sandbox.call("nothing-of-that-name")


@HARBOR
async def test_mounted_folders_are_copied(provider: Provider, tmp_path: Path) -> None:
    """Links are copied; optional mounts are not copied over existing paths."""
    tools, own = tmp_path / "tools", tmp_path / "own"
    tools.mkdir()
    (tools / "one").write_text("1")
    (tools / "link").symlink_to("one")
    own.mkdir()
    (own / "old").touch()
    copied = tmp_path / "copied" / "tests"
    mounts = (
        Mount(str(copied), str(tools)),
        Mount(str(tools), str(tools)),
        Mount(str(own)),
        Mount(str(tools / "one"), str(own), optional=True),
    )
    async with provider.make().open(tmp_path / "sandbox", provider.spec(mounts=mounts)):
        assert (copied / "link").readlink() == Path("one")
        assert (tools / "one").read_text() == (copied / "one").read_text() == "1"
        assert list(own.iterdir()) == []


@HARBOR
async def test_the_network_can_be_the_gateway_only(provider: Provider, tmp_path: Path) -> None:
    """Harbor gets an allow-list with its host, which it enforces or refuses."""
    runtime = provider.make(only_gateway=True, reach="https://gate.example.com")
    async with runtime.open(tmp_path / "sandbox", provider.spec()) as sandbox:
        policy = sandbox.environment.options["network_policy"]
        assert (policy.network_mode, policy.allowed_hosts) == ("allowlist", ["gate.example.com"])
    assert not any("network" in weakness for weakness in runtime.list_weaknesses())


@BOTH
async def test_changes_are_found_by_comparing_archives(provider: Provider, tmp_path: Path) -> None:
    """The changes are those of a folder; unchanged large files are not noted."""
    files = {**FILES, "pkg/c.py": "z = 3\n", "large": "0" * 5000, "grows": "0"}
    script = """
    printf 'x = 2\\n' >a.py; ln a.py same; rm pkg/b.py; chmod +x pkg/c.py; ln -s ../secret out
    head -c 6000 /dev/zero >grows; mkdir .git; touch .git/HEAD; mkfifo pipe
    """
    async with provider.make().open(tmp_path / "sandbox", provider.spec(files=files)) as sandbox:
        await run_shell(sandbox, script)
        patch = await sandbox.diff(PatchLimits(file_bytes=1000))
    assert patch.files == {
        "a.py": FileChange(b"x = 2\n"),
        "same": FileChange(b"x = 2\n"),
        "pkg/b.py": None,
        "pkg/c.py": FileChange(b"z = 3\n", executable=True),
        "out": FileChange(b"../secret", link=True),
    }
    assert sorted(note.partition(":")[0] for note in patch.notes) == ["grows", "pipe"]


def archive(*names: str) -> io.BytesIO:
    """A tar of empty files."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name in names:
            tar.addfile(tarfile.TarInfo(name))
    file.seek(0)
    return file


@pytest.mark.usefixtures("provider")
@REMOTE
def test_invalid_archives_are_refused() -> None:
    """A hostile machine cannot send paths outside of the workdir."""
    diff_archives: Callable[..., Any] = importlib.import_module("archive_diff").diff_archives
    patch = diff_archives(archive("./a.py"), archive("../../a.py"))
    assert patch.files == {"a.py": None}
    assert patch.notes == ("../../a.py: a name that leaves its folder",)
    with pytest.raises(SandboxError, match="no tar archive"):
        diff_archives(archive("./a.py"), io.BytesIO(b"x" * 2000))


def test_the_example_is_short() -> None:
    """About sixty statements without imports and docstrings."""
    statements = [
        node
        for node in ast.walk(ast.parse((EXAMPLES / "remote_runtime.py").read_text()))
        if isinstance(node, ast.stmt)
        and not isinstance(node, ast.Import | ast.ImportFrom)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    ]
    assert len(statements) <= 75
