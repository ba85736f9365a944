from __future__ import annotations

from pathlib import Path

import pytest

from tugline.replay import mounted
from tugline.replay.mounted import MountedRuntime, find_prefix
from tugline.sandbox.base import SandboxSpec
from tugline.sandbox.local import LocalRuntime


@pytest.mark.parametrize("start", [mounted._AS_ROOT, mounted._AS_USER], ids=["root", "user"])
async def test_programs_find_their_folder_at_another_place(
    start: mounted.Prefix, tmp_path: Path
) -> None:
    """They see the old path, with the new files; the old ones are neither seen nor touched."""
    old = tmp_path / "old"
    (old / "work").mkdir(parents=True)
    (old / "work" / "mine.txt").write_text("recorded")
    if not mounted._works(start, old):
        pytest.skip("this machine or user may not make such a name space")
    async with MountedRuntime(LocalRuntime(), old, start).open(
        tmp_path / "new", SandboxSpec(files={"a.txt": "a"})
    ) as sandbox:
        await sandbox.put(sandbox.home, {"settings": f"at {sandbox.workdir}"})
        script = 'pwd; echo "$HOME $TMPDIR $WHERE"; ls; cat "$HOME/settings"; echo b > b.txt'
        env = {"WHERE": str(sandbox.workdir / "a.txt")}
        done = await sandbox.run(("sh", "-c", script), env=env, timeout_s=20)
        output = (sandbox.logs / "agent.log").read_text().splitlines()
    assert done.code == 0, output
    assert output == [
        f"{old}/work",
        f"{old / 'home'} {old / 'tmp'} {old / 'work' / 'a.txt'}",
        "a.txt",
        f"at {old}/work",
    ]
    assert (tmp_path / "new" / "work" / "b.txt").read_text() == "b\n"
    assert [one.name for one in (old / "work").iterdir()] == ["mine.txt"]


def test_what_was_made_to_mount_on_is_removed(tmp_path: Path) -> None:
    """Folders that were there stay; those that were lent go."""
    with find_prefix(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b").is_dir()
    assert not (tmp_path / "a").exists()
    with find_prefix(tmp_path):
        pass
    assert tmp_path.exists()
