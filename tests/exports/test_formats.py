"""Each format holds the tokens that were sampled, and opens in the tools it is made for."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace
from renderers import create_renderer

from exports.made import call, export, record, two_turns
from rig import ASK, RENDERING, in_turn, rig
from trainers.sessions import tiny
from training_run import load_tokenizer
from tugline.chat.templates.base import CONFIGS
from tugline.errors import ConfigError
from tugline.exports.base import SkipReason, TraceFilter
from tugline.traces.base import PrefixMerging
from tugline.types import (
    Branch,
    Call,
    CallOutcome,
    Finish,
    Image,
    Message,
    Mode,
    Role,
    ToolCall,
    TraceKind,
)

IDS, MASK = [10, 11, 12, 13, 14, 15], [0, 0, 1, 1, 0, 1]
ROWS = json.loads(Path(__file__).with_name("rows.json").read_text())
"""What a session of two turns becomes in each format; `messages` are others of its first call."""
WORTH = 0.5 / (0.5 + 1e-4)
"""Advantage of rewards 1 and 0 that are equally frequent."""


def rows(form: str, where: Path, **more: Any) -> list[dict[str, Any]]:
    """What an export holds: a table, or a file of lines."""
    out = where / "out"
    export(form, where, out, force=True, **more)
    if out.read_bytes().startswith(b"PAR1"):
        found: list[dict[str, Any]] = pq.read_table(out).to_pylist()
        return found
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, Path], Any]:
    """`datasets.load_dataset`, without a network."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = importlib.import_module("datasets")  # reads the environment

    def loaded(kind: str, path: Path) -> Any:
        cache = str(tmp_path / "cache")
        return datasets.load_dataset(kind, data_files=str(path), split="train", cache_dir=cache)

    return loaded


@pytest.mark.parametrize("case", ROWS, ids=lambda case: case["shows"])
def test_a_row_has_what_its_readers_expect(tmp_path: Path, case: dict[str, Any]) -> None:
    """Every field of every format; arrays, rewards and messages are those of the recording."""
    first, second = two_turns()
    if "messages" in case:
        messages = msgspec.convert(case["messages"], tuple[Message, ...])
        first = replace(first, messages=messages)
    record(tmp_path, "a", tags={"b": "2", "a": "1"}, reward=0.5, calls=[first, second])
    assert rows(case["form"], tmp_path, options=case["options"]) == [case["row"]]


@pytest.mark.parametrize(
    ("form", "options", "message"),
    [
        ("sft", {"arguments": "json"}, "arguments is 'json'"),
        ("sft", {"args": "object"}, r"no option 'args' \(its options: reasoning, arguments"),
        ("verl", {"prompt_length": 2}, "give prompt_length and response_length both"),
    ],
)
def test_wrong_options_are_named(
    tmp_path: Path, form: str, options: dict[str, Any], message: str
) -> None:
    """A value with what would be right, a name with those that are known."""
    record(tmp_path, "a")
    with pytest.raises(ConfigError, match=message):
        export(form, tmp_path, tmp_path / "out", options=options)


def test_a_session_without_a_verdict_has_a_null_and_no_row_where_one_is_needed(
    tmp_path: Path,
) -> None:
    """What was never judged is neither 0 nor lost."""
    record(tmp_path, "a", status=None)
    record(tmp_path, "b", sample=1)
    assert [row["reward"] for row in rows("parquet", tmp_path)] == [None, 1.0]
    summary = export("trl", tmp_path, tmp_path / "out.trl")
    assert (summary.exported, summary.left_out) == (1, {SkipReason.NO_REWARD: 1})


def test_a_session_counts_once_in_its_group(tmp_path: Path) -> None:
    """However many traces it has, the mean that it is measured against is that of sessions."""
    fork = call(2, [10, 11, 99], [20], parent=1, branch=Branch.HISTORY_EDITED)
    record(tmp_path, "a", calls=[*two_turns(), fork], reward=1.0)
    record(tmp_path, "b", sample=1, reward=0.0)
    record(tmp_path, "c", task="u", reward=1.0)
    found = [(row["session"], row["group_id"], row["advantage"]) for row in rows("trl", tmp_path)]
    assert [(name, group) for name, group, _ in found] == [("a", 0), ("a", 0), ("b", 0), ("c", 1)]
    assert [worth for _, _, worth in found] == pytest.approx([WORTH, WORTH, -WORTH, 0])


def test_verl_cuts_no_trace_to_its_lengths(tmp_path: Path) -> None:
    """A trace that does not fit is left out and counted."""
    record(tmp_path, "a")
    longer = [*two_turns(), call(2, [10, 11, 12, 13, 14, 15, 16], [17])]
    record(tmp_path, "b", sample=1, calls=longer)
    options = {"prompt_length": 2, "response_length": 4}
    summary = export("verl", tmp_path, tmp_path / "out", options=options)
    assert (summary.exported, summary.rows_left_out) == (1, {SkipReason.TOO_LONG: 1})


def test_slime_gets_siblings_of_one_rollout(tmp_path: Path) -> None:
    """The traces of a session share its rollout; one that was cut says so."""
    forked = call(2, [10, 11, 99], [20, 21], parent=1, branch=Branch.HISTORY_EDITED)
    cut = replace(forked, finish=Finish.LENGTH)
    record(tmp_path, "a", calls=[*two_turns(), cut])
    first, second = rows("slime", tmp_path)
    assert [first["status"], second["status"]] == ["completed", "truncated"]
    same = ("index", "rollout_id", "group_index", "reward", "session_id")
    assert [first[name] for name in same] == [second[name] for name in same]


def test_what_trains_nothing_is_left_to_parquet(tmp_path: Path) -> None:
    """A side call has a row in the full table, and none for a trainer."""
    side = call(2, [50, 51], [52], parent=None, kind=TraceKind.SIDE)
    record(tmp_path, "a", calls=[*two_turns(), side])
    assert [row["kind"] for row in rows("parquet", tmp_path)] == ["main", "side"]
    summary = export("slime", tmp_path, tmp_path / "out.slime")
    assert summary.rows_left_out == {SkipReason.UNTRAINED: 1}
    only_side = TraceFilter(frozenset({TraceKind.SIDE}))
    assert [row["ids"] for row in rows("parquet", tmp_path, filter=only_side)] == [[50, 51, 52]]


# --------------------------------------------------------------------------- chat
def test_the_longest_conversation_of_each_thread_is_taken(tmp_path: Path) -> None:
    """A retry that led nowhere is counted; a sub-agent has a line of its own, a title none."""
    prompt = (Message(Role.DEVELOPER, "Be brief."), Message(Role.SYSTEM, "Now."))
    agent = {"kind": TraceKind.SUBAGENT, "thread": "sub", "branch": Branch.NEW_THREAD}
    calls = [
        *two_turns(),
        call(2, [10, 11], [30], parent=None),
        call(3, [60], [61], parent=1, messages=(*prompt, Message(Role.USER, "Go.")), **agent),
        call(4, [70], [71], parent=None, kind=TraceKind.SIDE),
    ]
    record(tmp_path, "a", calls=calls)
    main, sub = rows("sft", tmp_path)
    assert (main["metadata"]["turns"], sub["metadata"]["kind"]) == (2, "subagent")
    assert [message["role"] for message in sub["messages"][:3]] == ["system", "system", "user"]
    _, sub = rows("sft", tmp_path, options={"system": "front"})
    assert sub["messages"][0] == {"role": "system", "content": "Be brief.\n\nNow."}
    summary = export("sft", tmp_path, tmp_path / "out", force=True)
    assert summary.rows_left_out == {SkipReason.KIND: 1, SkipReason.SHORTER: 1}


def test_a_resumed_answer_is_told_once(tmp_path: Path) -> None:
    """A retry that goes on in the middle of an answer takes the place of what there was of it."""
    first, second = two_turns()
    begun = replace(first, finish=Finish.ABORT, outcome=CallOutcome.CLIENT_GONE)
    resumed = call(1, [10, 11, 12, 13], [14], messages=(), answer=first.answer)
    third = replace(second, number=2, parent=1)
    record(tmp_path, "a", calls=[begun, resumed, third])
    (line,) = rows("sft", tmp_path)
    roles = [message["role"] for message in line["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant"]


def test_an_answer_that_was_cut_off_is_not_taught(tmp_path: Path) -> None:
    """The conversation ends with its last whole answer, and without one there is none."""
    first, second = two_turns()
    cut = replace(second, finish=Finish.LENGTH)
    record(tmp_path, "a", calls=[first, cut])
    (line,) = rows("sft", tmp_path)
    assert line["metadata"]["turns"] == 1
    record(tmp_path, "b", sample=1, calls=[replace(first, finish=Finish.LENGTH)])
    summary = export("sft", tmp_path, tmp_path / "out", force=True)
    assert (summary.exported, summary.left_out) == (1, {SkipReason.EMPTY: 1})
    assert summary.rows_left_out == {SkipReason.UNANSWERED: 1}


def test_text_mode_and_pictures(tmp_path: Path) -> None:
    """Chat needs no ids, unless only exact ones are wanted; pictures have no place in it."""
    empty: dict[str, Any] = {"mode": Mode.TEXT, "versions": (), "unreported_tokens": 2}
    record(tmp_path, "a", calls=[call(0, [], [], **empty)])
    seen = (Message(Role.USER, "Look", images=(Image("data:image/png;base64,AA=="),)),)
    record(tmp_path, "b", sample=1, calls=[call(0, [1], [2], messages=seen)])
    assert [line["metadata"]["session"] for line in rows("sft", tmp_path)] == ["a"]
    record(tmp_path, "c", sample=2)
    exact = TraceFilter(exact_only=True)
    summary = export("sft", tmp_path, tmp_path / "out", filter=exact, force=True)
    assert summary.rows_left_out == {SkipReason.INEXACT: 1, SkipReason.IMAGES: 1}


async def test_a_template_renders_a_line_to_what_the_model_saw(tmp_path: Path) -> None:
    """The text of a recorded session comes back, where its history was never rewritten."""
    look = '<tool_call>\n{"name": "read", "arguments": {"path": "a.py", "n": 1}}\n</tool_call>'
    async with rig(tmp_path, in_turn(f"Let me look.\n{look}", "It is mended.")) as it:
        answer = (await it.ask())["content"]
        found = {"type": "tool_result", "tool_use_id": answer[1]["id"], "content": "def f"}
        echo = {"role": "assistant", "content": answer}
        await it.ask([*ASK, echo, {"role": "user", "content": [found]}])
    renderer = create_renderer(RENDERING.tokenizer, CONFIGS["qwen3"](thinking_retention="all"))
    (line,) = rows("sft", tmp_path, options={"arguments": "object"})
    ids = renderer.render_ids(line["messages"], tools=line["tools"])
    traces = PrefixMerging().build(it.calls).traces
    (trace,) = traces
    assert len(trace.spans) == line["metadata"]["turns"] == 2
    expected, seen = (RENDERING.tokenizer.decode(list(one)) for one in (ids, trace.ids))
    unthought = expected.replace("<think>\n\n</think>\n\n", "")  # Qwen3 adds it to recent turns
    assert unthought.startswith(seen)


# --------------------------------------------------------------------------- what opens them
def test_datasets_opens_a_table_as_it_is(tmp_path: Path, load: Callable[[str, Path], Any]) -> None:
    """No conversion, no schema by hand."""
    record(tmp_path, "a", tags={"k": "v"})
    record(tmp_path, "b", status=None)
    out = tmp_path / "x.parquet"
    export("parquet", tmp_path, out)
    loaded = load("parquet", out)
    assert set(loaded["session"]) == {"a", "b"}
    assert loaded[0]["ids"] == IDS
    assert loaded[0]["tags"] == [{"key": "k", "value": "v"}]


@pytest.mark.parametrize("arguments", ["text", "object"])
def test_datasets_opens_chat_with_different_tools(
    tmp_path: Path, arguments: str, load: Callable[[str, Path], Any]
) -> None:
    """Arguments of one tool do not leak into those of another as nulls."""
    other = replace(two_turns()[0], tools=())
    record(tmp_path, "a")
    record(tmp_path, "b", sample=1, calls=[_renamed(other)], status=None)
    out = tmp_path / "x.jsonl"
    export("sft", tmp_path, out, options={"arguments": arguments})
    loaded = load("json", out)
    given = [row["messages"][1]["tool_calls"][0]["function"]["arguments"] for row in loaded]
    text = ['{"path":"0.py"}', '{"depth":2}']
    assert given == (text if arguments == "text" else [json.loads(one) for one in text])


def _renamed(one: Call) -> Call:
    assert one.answer is not None
    use = replace(one.answer.tool_calls[0], name="list", arguments='{"depth":2}')
    return replace(one, answer=replace(one.answer, tool_calls=(use,)))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:.*deprecated and will be removed:FutureWarning")  # TRL's calls
def test_trl_trains_on_its_table(
    tmp_path: Path, load: Callable[[str, Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of its SFT trainer counts the masked tokens; a row makes a sample of its other one."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    trl = importlib.import_module("trl")
    rollouts = importlib.import_module("trl.experimental.async_grpo.async_rollout_worker")
    record(tmp_path, "a", reward=1.0)
    record(tmp_path, "b", sample=1, reward=0.0)
    out = tmp_path / "t.parquet"
    export("trl", tmp_path, out)
    loaded = load("parquet", out)
    names = {each.name for each in dataclasses.fields(rollouts.RolloutSample)}
    columns = {name: value for name, value in loaded[0].items() if name in names}
    made = rollouts.RolloutSample(prompt=[], completion=[], metrics={}, **columns)
    assert (made.input_ids, made.completion_mask, made.model_version) == (IDS, MASK, 3)
    settings = trl.SFTConfig(
        output_dir=str(tmp_path / "sft"),
        max_steps=1,
        completion_only_loss=True,
        max_length=None,
        per_device_train_batch_size=2,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        activation_checkpointing=False,
    )
    trainer = trl.SFTTrainer(
        model=tiny(),
        args=settings,
        train_dataset=loaded.select_columns(["input_ids", "completion_mask"]),
        processing_class=load_tokenizer(),
    )
    (batch,) = trainer.get_train_dataloader()
    assert batch["labels"].tolist() == [[-100, -100, 12, 13, -100, 15]] * 2
    assert np.isfinite(trainer.train().training_loss)


# --------------------------------------------------------------------------- Harbor
@pytest.mark.parametrize("begun", [Message(Role.ASSISTANT, "Lo"), None])
def test_a_resumed_answer_is_one_step(tmp_path: Path, begun: Message | None) -> None:
    """The rest of an answer that broke off has all of it, also where nothing of it was seen."""
    first, second = two_turns()
    broken = replace(first, answer=begun, outcome=CallOutcome.CLIENT_GONE, finish=Finish.ABORT)
    rest = replace(second, messages=(), resumed=2, prompt_ids=np.asarray(IDS[:4], np.int32))
    record(tmp_path, "a", calls=[broken, rest])
    (row,) = rows("atif", tmp_path)
    assert [(step["source"], step["message"]) for step in row["steps"]] == [
        ("user", "Mend it."), ("agent", "Done.")
    ]  # fmt: skip


@pytest.mark.slow
def test_harbor_reads_its_trajectories(tmp_path: Path) -> None:
    """The models of the installed package, which forbid what they do not know, take every row."""
    wheels = tmp_path / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--ignore-requires-python", "--dest", str(wheels), "harbor==0.26.0"]
    subprocess.run(command, check=True, timeout=200)
    sessions = tmp_path / "sessions"
    sessions.mkdir()
    raw = ToolCall("r", "read", "no json")
    text = replace(two_turns()[0], answer=Message(Role.ASSISTANT, "", (raw,)))
    record(sessions, "a")
    record(sessions, "b", calls=[text, *two_turns()[1:]])
    out = tmp_path / "out.jsonl"
    export("atif", sessions, out)
    code = "import sys; from harbor.models.trajectories import Trajectory\n"
    code += "for line in open(sys.argv[1]): print(len(Trajectory.model_validate_json(line).steps))"
    environment = {**os.environ, "PYTHONPATH": str(next(wheels.glob("*.whl")))}
    done = subprocess.run(
        [sys.executable, "-c", code, str(out)], env=environment,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.split()) == (0, ["3", "3"]), done.stderr
