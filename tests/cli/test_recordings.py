"""Sessions of a running server by their ids, for the commands that read recordings."""

from __future__ import annotations

import json

from cli.conftest import Shell
from house import commit, task
from recording.view.synthetic import small

UNKNOWN = "tugline: there is no recording 'nobody', and no session of that id below runs/; "


async def run_session(shell: Shell) -> None:
    """Session `s-1`, recorded in the server's folder, and `s-0`, recorded elsewhere."""
    folder = shell.house.folder / "nodes" / "n" / "recordings"
    folder.mkdir(parents=True)
    async with shell.lease(task("s", samples=2), slots=2) as (node, held):
        for work in held:
            if work.session.id == "s-1":
                recording = small(folder, work.session.id)
                recording.rename(recording.with_name(f"{work.session.id}.{work.session.epoch}.rec"))
            await commit(node, work)


async def test_a_session_of_the_server_is_read_by_its_id(shell: Shell) -> None:
    """Its recording and its tokenizer; nothing of them stays."""
    await run_session(shell)
    output = await shell.run("view", "s-1")
    assert output.code == 0, output.err
    assert "I read it." in output.out
    verified = json.loads((await shell.run("verify", "s-1", "--json")).out)
    assert verified["sessions"][0]["session"] == "s-1"
    assert verified["sessions"][0]["checks"]["text"]["verdict"] != "unchecked"
    built = await shell.run("rebuild", "s-1", "--out", "built")
    assert built.code == 0, built.err
    written = await shell.run("export", "sft", "s-1", "--out", "chat.jsonl", "--json")
    assert json.loads(written.out)["exported"] == 1, written.err
    played = await shell.run("replay", "s-1")
    assert "there is no recording" not in played.err


async def test_a_session_that_nobody_has_names_both_places(shell: Shell) -> None:
    """The folder, and the server or why none was asked; a node's own recording is on that node."""
    await run_session(shell)
    asked = await shell.run("verify", "nobody")
    assert (asked.code, asked.out) == (2, "")
    assert asked.err.startswith(UNKNOWN)
    assert "nobody" in asked.err.removeprefix(UNKNOWN)
    elsewhere = await shell.run("view", "s-0")
    assert f"{shell.house.url} has no recording of s-0: look on the node" in elsewhere.err
    alone = await shell.run("verify", "nobody", "--dir", "nowhere")
    assert alone.err.startswith(f"{UNKNOWN}no server: nowhere/server.json does not exist")


async def test_saved_results_with_recordings_can_be_exported(shell: Shell) -> None:
    """Without the server, too; a recording that is elsewhere is told, and its result is saved."""
    await run_session(shell)
    saved = await shell.run("results", "--out", "kept", "--recordings", "--task", "s")
    assert saved.code == 0, saved.err
    assert "has no recording of s-0" in saved.err
    assert "2 new, 2 in all" in saved.err
    found = (shell.folder / "kept/recordings").glob("s-*")
    assert [path.name.split(".")[0] for path in found] == ["s-1"]
    await shell.house.stop()
    written = await shell.run("export", "sft", "kept", "--out", "chat.jsonl", "--json")
    assert json.loads(written.out)["exported"] == 1, written.err
