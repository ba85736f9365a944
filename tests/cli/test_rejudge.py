"""``tugline rejudge``: history, resumption, refusals and the report."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cli.conftest import Shell, end
from support.commands import run_command
from support.polling import until
from support.recorded import REPAIRED, WORKS, function, record
from support.server import TOKENS, commit, flip_bit, lease_sessions
from support.tasks import make_task
from tugline.patch import Patch
from tugline.protocol import RunKind
from tugline.recording.file import read
from tugline.recording.folder import patch_name
from tugline.recording.trajectories import read_results, rebuild
from tugline.recording.verdicts import VERDICTS, VerdictEntry
from tugline.types import PluginSpec, Reward

HISTORY = Path("run/verdicts") / VERDICTS


def write_run(folder: Path, **sessions: Patch | None) -> None:
    """Record one session of each task."""
    (folder / "run").mkdir()
    for task, patch in sessions.items():
        record(folder / "run", f"{task}-0", patch)


def rejudge(
    folder: Path, spec: PluginSpec | None, *options: str
) -> subprocess.CompletedProcess[str]:
    """Judge the run again, one session after the other."""
    given = []
    if spec is not None:
        (folder / "new.json").write_bytes(msgspec.json.encode(spec))
        given = ["--evaluator", "new.json"]
    command = ("rejudge", "run", *given, "--slots", "1", "--json", *options)
    return run_command(*command, cwd=folder)


def read_report(done: subprocess.CompletedProcess[str], code: int = 0) -> Any:
    """The report of a command."""
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def read_history(folder: Path) -> list[VerdictEntry]:
    """All lines of the history."""
    lines = (folder / HISTORY).read_bytes().splitlines()
    return [msgspec.json.decode(line, type=VerdictEntry) for line in lines]


def test_a_repaired_test_changes_the_right_verdict_only(tmp_path: Path) -> None:
    """The history has each old and new reward; recordings keep theirs; the report compares them."""
    write_run(tmp_path, **WORKS)
    report = read_report(rejudge(tmp_path, PluginSpec("tests", {"files": REPAIRED})))
    assert (report["sessions"], report["evaluated"]) == (5, 5)
    assert report["changed"] == [{"session": "right-0", "before": 0.0, "now": 1.0}]
    agreement = report["agreement"]
    assert (agreement["solved"], agreement["changed"]) == ([0, 1], 1)
    assert agreement["same"]["value"] == pytest.approx(0.8)
    difference = agreement["difference"]
    assert difference["value"] == pytest.approx(0.2)
    assert difference["low"] < 0.2 < difference["high"]
    rewards = {
        entry.session: (entry.before, entry.reward and entry.reward.value)
        for entry in read_history(tmp_path)
    }
    assert rewards == {f"{work}-0": (0.0, float(work == "right")) for work in WORKS}
    assert all(entry.by and entry.at and entry.digest for entry in read_history(tmp_path))
    result = read(tmp_path / "run" / "right-0.1.rec").result
    assert result is not None
    assert result.reward is not None
    assert result.reward.value == 0.0


def test_a_killed_command_resumes(tmp_path: Path) -> None:
    """After a kill and a torn line, each session has one verdict, and none was judged twice."""
    write_run(tmp_path, a=Patch(), b=Patch(), c=Patch())
    killer = function("kill_once", victim="b", mark="killed")
    assert rejudge(tmp_path, killer).returncode == -9
    before = (tmp_path / HISTORY).read_bytes()
    assert [entry.session for entry in read_history(tmp_path)] == ["a-0"]
    (tmp_path / HISTORY).write_bytes(before + before[:-9])
    report = read_report(rejudge(tmp_path, killer))
    assert (report["evaluated"], len(report["changed"])) == (3, 3)
    assert (tmp_path / HISTORY).read_bytes().startswith(before)
    assert [entry.session for entry in read_history(tmp_path)] == ["a-0", "b-0", "c-0"]
    assert read_report(rejudge(tmp_path, killer)) == report
    assert len(read_history(tmp_path)) == 3
    assert not list((tmp_path / "run/verdicts/work").iterdir())


def test_another_evaluator_adds_to_the_history(tmp_path: Path) -> None:
    """Verdicts of both are kept, with the digests of their evaluators."""
    write_run(tmp_path, a=Patch())
    for code in ("x", "y", "x"):
        spec = function("alternate", flaky="none", mark=code)
        assert read_report(rejudge(tmp_path, spec))["evaluated"] == 1
    first, second = read_history(tmp_path)
    assert first.digest != second.digest


def test_a_damaged_patch_is_an_error_of_its_session(tmp_path: Path) -> None:
    """The others are judged; the exit code is 1; with the patch back, only it is judged again."""
    write_run(tmp_path, **WORKS)
    digests = {}
    for work in ("right", "wrong"):
        result = read(tmp_path / "run" / f"{work}-0.1.rec").result
        assert result is not None
        digests[work] = tmp_path / "run" / patch_name(result.patch)
    flip_bit(digests["right"])
    wrong = digests["wrong"].read_bytes()
    digests["wrong"].unlink()
    (tmp_path / "run" / "cut-0.1.rec").write_bytes(b"no recording")
    report = read_report(rejudge(tmp_path, function("count_changes")), code=1)
    assert (report["evaluated"], sorted(report["errors"])) == (3, ["cut-0", "right-0", "wrong-0"])
    assert "is damaged" in report["errors"]["right-0"]
    assert "cannot read patch" in report["errors"]["wrong-0"]
    digests["wrong"].write_bytes(wrong)
    report = read_report(rejudge(tmp_path, function("count_changes")), code=1)
    assert (report["evaluated"], sorted(report["errors"])) == (4, ["cut-0", "right-0"])


def test_sessions_of_older_versions_are_refused_by_name(tmp_path: Path) -> None:
    """A session without a patch is in the report with the reason; it is no error."""
    write_run(tmp_path, old=None, new=Patch())
    report = read_report(rejudge(tmp_path, function("count_changes")))
    assert report["evaluated"] == 1
    assert report["refused"] == {"old-0": "it was recorded by a version that stored no patches"}


def test_an_evaluator_in_the_agent_s_sandbox_is_refused(tmp_path: Path) -> None:
    """As the given evaluator, for all; as that of a task, for its sessions."""
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test.sh").write_text("exit 0\n")
    spec = PluginSpec("harbor", {"tests": str(tests), "in_place": True})
    write_run(tmp_path, a=Patch())
    refused = rejudge(tmp_path, spec)
    assert (refused.returncode, "in_place" in refused.stderr) == (2, True), refused.stderr
    assert not (tmp_path / HISTORY).exists()
    record(tmp_path / "run", "b-0", Patch(), evaluator=spec)
    record(tmp_path / "run", "c-0", Patch(), evaluator=function("count_changes"))
    report = read_report(rejudge(tmp_path, None, "--select", "[bc]"))
    assert (report["evaluated"], list(report["refused"])) == (1, ["b-0"])
    assert "in_place" in report["refused"]["b-0"]


def test_verdicts_that_flip_by_themselves_are_listed(tmp_path: Path) -> None:
    """Judged twice, the task with a random verdict is found, and no other."""
    write_run(tmp_path, a=Patch(), b=Patch())
    spec = function("alternate", flaky="b", mark="mark")
    assert read_report(rejudge(tmp_path, spec))["flipped"] == []
    report = read_report(rejudge(tmp_path, spec, "--twice"))
    assert report["flipped"] == [{"session": "b-0", "before": 1.0, "now": 0.0}]
    assert [entry.round for entry in read_history(tmp_path)] == [1, 1, 2, 2]


def test_select_limits_the_sessions(tmp_path: Path) -> None:
    """A pattern matches ids of sessions or of tasks; one that matches none is an error."""
    write_run(tmp_path, fix=Patch(), other=Patch())
    report = read_report(rejudge(tmp_path, function("count_changes"), "--select", "fi*"))
    assert (report["sessions"], read_history(tmp_path)[0].session) == (1, "fix-0")
    none = rejudge(tmp_path, function("count_changes"), "--select", "no")
    assert (none.returncode, "matches no session" in none.stderr) == (2, True)


def test_the_report_is_a_table(tmp_path: Path) -> None:
    """People read what changed, in the table and by session."""
    write_run(tmp_path, right=WORKS["right"], old=None)
    (tmp_path / "new.yaml").write_text("evaluator: session_completed\n")
    command = ("rejudge", "run", "--evaluator", "new.yaml", "--out", "other")
    done = run_command(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "1 of 2 judged, 1 refused" in done.stdout
    assert "changed: right-0 0 -> 1" in done.stdout
    assert "refused: old-0: it was recorded" in done.stdout
    assert "change of pass@1" in done.stdout
    assert (tmp_path / "other" / VERDICTS).exists()


def test_verdicts_in_force_are_chosen(tmp_path: Path) -> None:
    """Judging alone changes no reward; `--use` does, for readers of recordings, and back again."""
    write_run(tmp_path, **WORKS)
    spec = PluginSpec("tests", {"files": REPAIRED})
    path = tmp_path / "run" / "right-0.1.rec"
    recorded = path.read_bytes()
    assert read_report(rejudge(tmp_path, spec))["put_in_force"] == 0
    assert path.read_bytes() == recorded
    assert read_report(rejudge(tmp_path, spec, "--use", "new"))["put_in_force"] == 5
    assert read_report(rejudge(tmp_path, spec, "--use", "new"))["put_in_force"] == 0
    assert path.read_bytes().startswith(recorded)
    recording = read(path)
    assert recording.result is not None
    assert recording.result.verdict is not None
    [entry] = [each for each in read_history(tmp_path) if each.session == "right-0"]
    assert (recording.result.verdict.digest, recording.result.verdict.at) == (
        entry.digest,
        entry.at,
    )
    rewards = [each.reward and each.reward.value for each in recording.results]
    assert rewards == [0.0, 1.0]
    trajectory = rebuild(recording)
    assert trajectory.reward == Reward(1.0, entry.reward.parts if entry.reward else {})
    back = run_command("rejudge", "run", "--use", "recorded", "--json", cwd=tmp_path)
    assert read_report(back) == {"put_in_force": 5}
    assert rebuild(read(path)).reward == Reward(0.0)
    assert len(read(path).results) == 3
    refused = rejudge(tmp_path, spec, "--use", "recorded")
    assert (refused.returncode, "judges nothing" in refused.stderr) == (2, True)


def test_several_evaluators_are_compared(tmp_path: Path) -> None:
    """Each pair has the share of equal verdicts and paired differences with intervals."""
    write_run(tmp_path, **WORKS)
    (tmp_path / "repaired.json").write_bytes(
        msgspec.json.encode(PluginSpec("tests", {"files": REPAIRED}))
    )
    (tmp_path / "changes.json").write_bytes(msgspec.json.encode(function("count_changes")))
    for name in ("repaired", "changes"):
        command = ("rejudge", "run", "--evaluator", f"{name}.json", "--json")
        report = read_report(run_command(*command, cwd=tmp_path))
    solved = {each["name"]: (each["evaluated"], each["solved"]) for each in report["verifiers"]}
    assert solved == {"recorded": (5, 0), "repaired": (5, 1), "changes": (5, 4)}
    pairs = {(each["first"], each["second"]): each["agreement"] for each in report["pairs"]}
    assert set(pairs) == {
        ("recorded", "repaired"), ("recorded", "changes"), ("repaired", "changes"),
    }  # fmt: skip
    assert pairs["repaired", "changes"]["same"]["value"] == pytest.approx(0.4)
    difference = pairs["repaired", "changes"]["difference"]
    assert difference["value"] == pytest.approx(0.6)
    assert difference["low"] < 0.6 < difference["high"]
    text = run_command("rejudge", "run", "--evaluator", "repaired.json", cwd=tmp_path).stdout
    assert "repaired -> changes" in text


def test_a_grader_may_be_beside_its_file(tmp_path: Path) -> None:
    """A module in the folder of the evaluator's file is found, wherever the command runs."""
    write_run(tmp_path, a=Patch())
    (tmp_path / "graders").mkdir()
    (tmp_path / "graders" / "own_grading.py").write_text("def grade(outcome):\n    return 0.5\n")
    spec = PluginSpec("function", {"target": "own_grading:grade"})
    (tmp_path / "graders" / "own.json").write_bytes(msgspec.json.encode(spec))
    command = ("rejudge", "run", "--evaluator", "graders/own.json", "--json")
    report = read_report(run_command(*command, cwd=tmp_path))
    assert report["changed"] == [{"session": "a-0", "before": 0.0, "now": 0.5}]


# --------------------------------------------------------------------------- on a server
async def test_a_server_s_nodes_judge_and_consumers_get_the_changes(shell: Shell) -> None:
    """A run is judged by its name; the refused are named; saved results get the new rewards."""
    client = shell.live.client()
    async with client:
        await client.start_run("first", RunKind.RUN)
        await client.submit([make_task("a", 2), make_task("b")], run="first")
        async with lease_sessions(shell.live.url, 3) as (node, _, *work):
            for each in work:
                patch = "f" * 64 if each.task.id == "a" else ""
                await commit(node, each, 0.0, patch, seconds={"eval": 1.0})
        first = await shell.run("results", "--out", "kept")
        assert first.returncode == 0, first.stderr
        (shell.folder / "new.json").write_text('"session_completed"')
        command = ("rejudge", "first", "--dir", "tugline-data", "--evaluator", "new.json")
        running = await shell.start(*command, "--select", "a*", "--use", "new", "--json")

        async def is_queued() -> bool:
            return "queued" in (await client.status()).sessions

        await until(is_queued, 60)
        async with lease_sessions(shell.live.url, 2) as (node, _, *judging):
            judged = [each.task.judges.session for each in judging if each.task.judges]
            assert sorted(judged) == ["a-0", "a-1"]
            for session, each in zip(judged, judging, strict=True):
                await commit(node, each, float(session == "a-1"))
        out, err = await end(running)
        report = json.loads(out)
        assert (report["sessions"], report["evaluated"]) == (2, 2)
        assert report["changed"] == [{"session": "a-1", "before": 0.0, "now": 1.0}]
        assert (report["put_in_force"], "run first.rejudge-" in err) == (2, True)
        verifiers = {each["name"]: each["solved"] for each in report["verifiers"]}
        assert verifiers == {"recorded": 0, "session_completed": 1}
        refused = await shell.run(*command, "--select", "b", "--json")
        assert "stored no patches" in json.loads(refused.stdout)["refused"]["b-0"]
    again = await shell.run("results", "--out", "kept")
    assert [line.split()[1] for line in again.stdout.splitlines()] == ["a-1"]
    kept = read_results(shell.folder / "kept")
    assert {view.session: view.reward for view in kept} == {"a-0": 0.0, "a-1": 1.0, "b-0": 0.0}
    back = ("rejudge", "first", "--dir", "tugline-data", "--use", "recorded", "--json")
    assert read_report(await shell.run(*back)) == {"put_in_force": 2}
    assert read_report(await shell.run(*back)) == {"put_in_force": 0}
    await shell.run("results", "--out", "kept")
    assert {view.reward for view in read_results(shell.folder / "kept")} == {0.0}


async def test_mistakes_about_a_server_s_runs(shell: Shell) -> None:
    """They are named before any work is queued."""
    for options, message in (
        (("--server", shell.live.url, "--token", TOKENS.client), "give the name of a run"),
        (("nothing", "--dir", "tugline-data"), "unknown run 'nothing'"),
        (("--dir", "tugline-data", "--select", "x"), "has no session that matches x"),
        (("x", "--dir", "tugline-data", "--out", "y"), "--out and --slots are for a run on this"),
        ((), "'' is not a folder; give the folder of a run"),
    ):
        done = await shell.run("rejudge", *options)
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr
