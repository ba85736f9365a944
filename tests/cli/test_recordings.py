"""Commands that read recordings, given ids of sessions of a running server."""

from __future__ import annotations

import json

from cli.conftest import Shell
from recording.view.synthetic import add_patch, small
from support.server import commit
from support.tasks import make_task
from tugline.patch import FileChange, Patch

UNKNOWN = "tugline: 'nobody' is neither a recording nor the id of a session in runs/; "
CHANGES = Patch({"a.py": FileChange(b"fail\n"), "raw": FileChange(b"\xff")})


async def run_session(shell: Shell) -> None:
    """Finish session `s-1`, recorded in the server's folder, and `s-0`, recorded elsewhere."""
    folder = shell.live.folder / "nodes" / "n" / "recordings"
    folder.mkdir(parents=True)
    async with shell.lease(make_task("s", samples=2), slots=2) as (node, held):
        for work in held:
            patch = ""
            if work.session.id == "s-1":
                recording = small(folder, work.session.id)
                patch = add_patch(recording, CHANGES)
                recording.rename(recording.with_name(f"{work.session.id}.{work.session.epoch}.rec"))
            await commit(node, work, patch=patch)


async def test_a_session_of_the_server_is_read_by_its_id(shell: Shell) -> None:
    """Each command downloads the recording and its tokenizer."""
    await run_session(shell)
    output = await shell.run("view", "s-1")
    assert output.returncode == 0, output.stderr
    assert "I read it." in output.stdout
    verified = json.loads((await shell.run("verify", "s-1", "--json")).stdout)
    assert verified["sessions"][0]["session"] == "s-1"
    assert verified["sessions"][0]["checks"]["text"]["verdict"] != "unchecked"
    patch = await shell.run("view", "s-1", "--patch")
    assert "-pass\n+fail\n" in patch.stdout
    built = await shell.run("rebuild", "s-1", "--out", "built")
    assert built.returncode == 0, built.stderr
    written = await shell.run("export", "sft", "s-1", "--out", "chat.jsonl", "--json")
    assert json.loads(written.stdout)["exported"] == 1, written.stderr
    played = await shell.run("replay", "s-1")
    assert "is neither a recording nor" not in played.stderr


async def test_the_error_of_an_unknown_session_names_both_places(shell: Shell) -> None:
    """The error names the folder and the server, or a remote node that has the recording."""
    await run_session(shell)
    asked = await shell.run("verify", "nobody")
    assert (asked.returncode, asked.stdout) == (2, "")
    assert asked.stderr.startswith(UNKNOWN)
    assert "nobody" in asked.stderr.removeprefix(UNKNOWN)
    elsewhere = await shell.run("view", "s-0")
    assert f"{shell.live.url} has no recording of s-0; it is on the node" in elsewhere.stderr
    alone = await shell.run("verify", "nobody", "--dir", "nowhere")
    assert alone.stderr.startswith(
        f"{UNKNOWN}no server is given, and nowhere/server.json does not exist"
    )


async def test_saved_results_with_recordings_can_be_exported(shell: Shell) -> None:
    """Saved results need no server; one whose recording is elsewhere is saved with a warning."""
    await run_session(shell)
    saved = await shell.run("results", "--out", "kept", "--recordings", "--task", "s")
    assert saved.returncode == 0, saved.stderr
    assert "has no recording of s-0" in saved.stderr
    assert "2 new, 2 in total" in saved.stderr
    assert "--patch` prints" in saved.stderr
    assert [line.split()[1] for line in saved.stdout.splitlines() if ", patch" in line] == ["s-1"]
    patch = await shell.run("view", "kept/recordings", "--patch", "--json")
    assert json.loads(patch.stdout)["files"]["raw"]["data"] == "/w=="
    copies = (shell.folder / "kept/recordings").glob("s-*")
    assert [path.name.split(".")[0] for path in copies] == ["s-1"]
    await shell.live.stop()
    written = await shell.run("export", "sft", "kept", "--out", "chat.jsonl", "--json")
    assert json.loads(written.stdout)["exported"] == 1, written.stderr
