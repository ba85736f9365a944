from __future__ import annotations

from pathlib import Path

import pytest

from tugline.sandbox.base import Runtime, SandboxSpec
from tugline.sandbox.bubblewrap import Bubblewrap
from tugline.sandbox.local import LocalRuntime
from tugline.sandbox.patch import FileChange, Patch
from tugline.types import Workspace


@pytest.fixture(params=[LocalRuntime, Bubblewrap])
def runtime(request: pytest.FixtureRequest) -> Runtime:
    """Each that can be had here without a container engine."""
    made: Runtime = request.param()
    if reason := made.check_available():
        pytest.skip(reason)
    return made


@pytest.mark.parametrize("based", [False, True])
async def test_a_sandbox_begins_where_another_stood(
    runtime: Runtime, tmp_path: Path, *, based: bool
) -> None:
    """Twice from the same snapshot, each with a life of its own; what was done before is told."""
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "old").write_text("old\n")
    workspace = Workspace(folder=str(tmp_path / "given")) if based else Workspace()
    place = SandboxSpec(workspace=workspace, files={"a": "1\n"})
    async with runtime.open(tmp_path / "first", place) as sandbox:
        script = "echo 2 > a; rm -f old; mkdir d; echo n > d/n"
        assert (await sandbox.run(["sh", "-c", script], env={}, timeout_s=20)).code == 0
        before = await sandbox.diff()
        await sandbox.snapshot(tmp_path / "kept")
    done = {"a": FileChange(b"2\n"), "d/n": FileChange(b"n\n"), **({"old": None} if based else {})}
    assert before == Patch(done)
    again = SandboxSpec(workspace=workspace, files={"a": "1\n"}, snapshot=tmp_path / "kept")
    for name in ("second", "third"):
        async with runtime.open(tmp_path / name, again) as sandbox:
            script = "grep -q 2 a && test ! -e old && test ! -e mine && cat d/n && touch mine"
            assert (await sandbox.run(["sh", "-c", script], env={}, timeout_s=20)).code == 0
            assert await sandbox.diff() == Patch({**done, "mine": FileChange(b"")})
