"""The runtime in `examples/harbor_environments`, with stand-ins for Harbor's types."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

import harbor_stub
from sandboxes import run_session, run_shell
from tugline import plugins
from tugline.errors import SandboxError, UsageError
from tugline.sandbox.base import Mount, Runtime, SandboxSpec
from tugline.types import PluginSpec, Workspace

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def open_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make the runtime as a task does; its agent's home is a folder of the test."""
    harbor_stub.install(monkeypatch)
    monkeypatch.setattr(harbor_stub.BaseEnvironment, "started", [])
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.syspath_prepend(EXAMPLES / "harbor_environments")

    def make(**options: Any) -> Any:
        options = {"home": str(tmp_path / "home"), **options}
        return plugins.make("runtime", PluginSpec("harbor_runtime:HarborRuntime", options), Runtime)

    return make


def make_spec(tmp_path: Path, **values: Any) -> SandboxSpec:
    """A workdir that is a folder of the test."""
    return SandboxSpec(workspace=Workspace(image="here", path=str(tmp_path / "work")), **values)


async def test_a_session_goes_its_way(open_runtime: Any, tmp_path: Path) -> None:
    """Files in, a program with its output and exit code, changes out, nothing left."""
    runtime = open_runtime(reach="http://10.0.0.5:{port}")
    spec = make_spec(tmp_path, files={"a.py": "x = 1\n", "pkg/b.py": "y = 2\n"})
    async with runtime.open(tmp_path / "sandbox", spec) as sandbox:
        await run_session(sandbox)
        assert (await run_shell(sandbox, "kill -9 $$")).code == -9
        assert await sandbox.get(sandbox.workdir / "pkg/b.py") == b"new"
        for missing in ("out", "none"):
            assert await sandbox.get(sandbox.workdir / missing) is None
        assert await sandbox.get(sandbox.workdir / "pkg/b.py", max_bytes=1) is None
        assert await sandbox.expose("http://127.0.0.1:81/s/x") == "http://10.0.0.5:81/s/x"
        assert harbor_stub.BaseEnvironment.started == [sandbox.environment.session_id]
    assert harbor_stub.BaseEnvironment.started == []
    assert not (tmp_path / "sandbox" / "harbor.json").exists()


async def test_what_outlives_its_time_is_ended(open_runtime: Any, tmp_path: Path) -> None:
    """With programs in sessions of their own, also when the rollout is cancelled."""
    async with open_runtime().open(tmp_path / "sandbox", make_spec(tmp_path)) as sandbox:
        script = ["sh", "-c", "setsid sleep 6543 & echo $$ >started; sleep 6543"]
        end = await sandbox.run(script, env={}, timeout_s=0.5)
        assert (end.timed_out, end.code) == (True, -9)
        assert sandbox.environment.find_marked(sandbox.mark) == []
        (tmp_path / "work" / "started").unlink()
        running = asyncio.create_task(sandbox.run(script, env={}, timeout_s=60))
        async with asyncio.timeout(20):
            while not (tmp_path / "work" / "started").exists():  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.05)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert sandbox.environment.find_marked(sandbox.mark) == []


async def test_mounted_folders_are_copied(open_runtime: Any, tmp_path: Path) -> None:
    """With their links; what an image may have already is not copied again."""
    tools, own = tmp_path / "tools", tmp_path / "own"
    tools.mkdir()
    (tools / "one").write_text("1")
    (tools / "link").symlink_to("one")
    own.mkdir()
    (own / "old").touch()
    mounts = (
        Mount(str(tmp_path / "there" / "tests"), str(tools)),
        Mount(str(tools), str(tools)),
        Mount(str(own)),
        Mount(str(tools / "one"), str(own), optional=True),
    )
    async with open_runtime().open(tmp_path / "box", make_spec(tmp_path, mounts=mounts)):
        copied = tmp_path / "there" / "tests"
        assert (copied / "link").readlink() == Path("one")
        assert (tools / "one").read_text() == (copied / "one").read_text() == "1"
        assert list(own.iterdir()) == []


async def test_what_a_killed_node_left_is_stopped(open_runtime: Any, tmp_path: Path) -> None:
    """Made again from its note, once."""
    runtime, box = open_runtime(), tmp_path / "box"
    async with runtime.open(box, make_spec(tmp_path)):
        note = (box / "harbor.json").read_bytes()
    (box / "harbor.json").write_bytes(note)
    session = msgspec.json.decode(note)["session"]
    harbor_stub.BaseEnvironment.started.append(session)
    other = open_runtime(environment="daytona")  # a node reaps with no task's options
    assert [await asyncio.to_thread(other.reap, tmp_path) for _ in range(2)] == [1, 0]
    assert harbor_stub.BaseEnvironment.started == []


async def test_what_it_cannot_give_is_said(open_runtime: Any, tmp_path: Path) -> None:
    """A repository, an option or a name that Harbor does not know, an image that is not there."""
    for runtime, workspace, error, text in (
        (open_runtime(), Workspace(repo="x", commit="y"), UsageError, "takes workspace.image"),
        (open_runtime(kwargs={"wrong": 1}), Workspace(), UsageError, "Unknown option"),
        (open_runtime(environment="moon"), Workspace(), UsageError, "'moon' of Harbor"),
        (open_runtime(), Workspace(image="missing"), SandboxError, "does not start: no such image"),
    ):
        with pytest.raises(error, match=text):
            async with runtime.open(tmp_path / "box", SandboxSpec(workspace=workspace)):
                pass
    assert open_runtime().check_available() is None
    assert "no account" in open_runtime(kwargs={"wrong": 1}).check_available()
    assert "'moon' of Harbor" in open_runtime(environment="moon").check_available()


async def test_the_network_can_be_the_gateway_alone(open_runtime: Any, tmp_path: Path) -> None:
    """Harbor is asked for a list with the one host, which it enforces or refuses."""
    runtime = open_runtime(only_gateway=True, reach="https://gate.example.com")
    async with runtime.open(tmp_path / "box", make_spec(tmp_path)) as sandbox:
        policy = sandbox.environment.options["network_policy"]
        assert (policy.network_mode, policy.allowed_hosts) == ("allowlist", ["gate.example.com"])
    assert not any("network" in weakness for weakness in runtime.list_weaknesses())
