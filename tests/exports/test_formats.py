"""Export formats: their rows, and the tools that read them."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from renderers import create_renderer

from exports.made import call, export, read_rows, record, two_turns
from support.calls import read_calls
from support.commands import run_program
from support.engine import RENDERING, reply_in_turn
from support.gateway import ASK, open_session
from support.training import TRL_ON_CPU, load_tokenizer
from trainers.sessions import tiny
from tugline.chat.templates.base import CONFIGS
from tugline.errors import ConfigError
from tugline.exports.base import SkipReason, TraceFilter
from tugline.schema import read_jsonl
from tugline.traces.base import PrefixMerging
from tugline.types import Branch, Message, Role, ToolCall

IDS, MASK = [10, 11, 12, 13, 14, 15], [0, 0, 1, 1, 0, 1]
ROWS = json.loads(Path(__file__).with_name("rows.json").read_text())
"""Rows of a session of two turns; `messages` replaces those of its first call."""
SESSIONS = [row for _, row in read_jsonl(Path(__file__).with_name("sessions.jsonl"))]
"""Calls of sessions, fields of their rows, and the number of those without a row, by reason."""
ADVANTAGE = 0.5 / (0.5**0.5 + 1e-4)
"""Of reward 1 in a group of two sessions whose other reward is 0."""


def rows(form: str, where: Path, **more: Any) -> list[dict[str, Any]]:
    """Export a folder, and read the rows."""
    out = where / "out"
    export(form, where, out, force=True, **more)
    return read_rows(out)


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
def test_rows_have_every_field_of_their_format(tmp_path: Path, case: dict[str, Any]) -> None:
    """Every field of every format is as in rows.json."""
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
        ("sft", {"args": "object"}, r"unknown option 'args' \(its options: reasoning, arguments"),
        ("verl", {"prompt_length": 2}, "set both prompt_length and response_length"),
    ],
)
def test_wrong_options_are_reported(
    tmp_path: Path, form: str, options: dict[str, Any], message: str
) -> None:
    """The error has the allowed values or the known names."""
    record(tmp_path, "a")
    with pytest.raises(ConfigError, match=message):
        export(form, tmp_path, tmp_path / "out", options=options)


def test_sessions_without_a_reward(tmp_path: Path) -> None:
    """A missing reward is null, and formats that need one leave the session out."""
    record(tmp_path, "a", status=None)
    record(tmp_path, "b", sample=1)
    assert [row["reward"] for row in rows("parquet", tmp_path)] == [None, 1.0]
    summary = export("trl", tmp_path, tmp_path / "out-trl")
    assert (summary.exported, summary.left_out) == (1, {SkipReason.NO_REWARD: 1})


def test_a_session_counts_once_in_its_group(tmp_path: Path) -> None:
    """The baseline is the mean over sessions, however many traces each has."""
    fork = call(2, [10, 11, 99], [20], parent=1, branch=Branch.HISTORY_EDITED)
    record(tmp_path, "a", calls=[*two_turns(), fork], reward=1.0)
    record(tmp_path, "b", sample=1, reward=0.0)
    record(tmp_path, "c", task="u", reward=1.0)
    table = rows("trl", tmp_path)
    groups = [(row["session"], row["group_id"]) for row in table]
    assert groups == [("a", 0), ("a", 0), ("b", 0), ("c", 1)]
    assert [row["advantage"] for row in table] == pytest.approx(
        [ADVANTAGE, ADVANTAGE, -ADVANTAGE, 0]
    )


def holds(actual: Any, expected: Any) -> bool:
    """Whether `actual` has these values; lists must have the same length."""
    if isinstance(expected, dict):
        return all(holds(actual.get(name), value) for name, value in expected.items())
    if isinstance(expected, list):
        return len(actual) == len(expected) and all(map(holds, actual, expected))
    return bool(actual == expected)


@pytest.mark.parametrize("case", SESSIONS, ids=lambda case: case["shows"])
def test_rows_of_other_sessions(tmp_path: Path, case: dict[str, Any]) -> None:
    """Sessions and traces without a row are counted by reason."""
    for sample, calls in enumerate(case["sessions"]):
        record(tmp_path, "abc"[sample], sample=sample, calls=read_calls(calls, call))
    chosen = msgspec.convert(case.get("filter", {}), TraceFilter)
    plan = {"options": case.get("options"), "filter": chosen}
    actual = rows(case["form"], tmp_path, **plan)
    assert holds(actual, case["rows"]), actual
    summary = export(case["form"], tmp_path, tmp_path / "out", force=True, **plan)
    assert summary.left_out | summary.rows_left_out == case["left_out"]


async def test_a_template_renders_a_line_to_the_recorded_text(tmp_path: Path) -> None:
    """A line of a session whose history was never rewritten renders to the recorded text."""
    look = '<tool_call>\n{"name": "read", "arguments": {"path": "a.py", "n": 1}}\n</tool_call>'
    async with open_session(
        tmp_path, reply_in_turn(f"Let me look.\n{look}", "It is mended.")
    ) as session:
        answer = (await session.ask())["content"]
        result = {"type": "tool_result", "tool_use_id": answer[1]["id"], "content": "def f"}
        echo = {"role": "assistant", "content": answer}
        await session.ask([*ASK, echo, {"role": "user", "content": [result]}])
    renderer = create_renderer(RENDERING.tokenizer, CONFIGS["qwen3"](thinking_retention="all"))
    (line,) = rows("sft", tmp_path, options={"arguments": "object"})
    ids = renderer.render_ids(line["messages"], tools=line["tools"])
    (trace,) = PrefixMerging().build(session.calls).traces
    assert len(trace.spans) == line["metadata"]["turns"] == 2
    expected, seen = (RENDERING.tokenizer.decode(list(each)) for each in (ids, trace.ids))
    unthought = expected.replace("<think>\n\n</think>\n\n", "")  # Qwen3 adds it to recent turns
    assert unthought.startswith(seen)


# --------------------------------------------------------------------------- readers
def test_datasets_reads_a_table(tmp_path: Path, load: Callable[[str, Path], Any]) -> None:
    """The library `datasets` reads a table without a conversion or a schema."""
    record(tmp_path, "a", tags={"k": "v"})
    record(tmp_path, "b", status=None)
    out = tmp_path / "x.parquet"
    export("parquet", tmp_path, out)
    loaded = load("parquet", out)
    assert set(loaded["session"]) == {"a", "b"}
    assert loaded[0]["ids"] == IDS
    assert loaded[0]["tags"] == [{"key": "k", "value": "v"}]


@pytest.mark.parametrize("arguments", ["text", "object"])
def test_datasets_reads_chats_with_different_tools(
    tmp_path: Path, arguments: str, load: Callable[[str, Path], Any]
) -> None:
    """Arguments of one tool are not nulls in those of another."""
    use = ToolCall("c0", "list", '{"depth":2}')
    other = call(0, [10, 11], [12, 13], tools=(), answer=Message(Role.ASSISTANT, "", (use,)))
    record(tmp_path, "a")
    record(tmp_path, "b", sample=1, calls=[other], status=None)
    out = tmp_path / "x.jsonl"
    export("sft", tmp_path, out, options={"arguments": arguments})
    loaded = load("json", out)
    given = [row["messages"][1]["tool_calls"][0]["function"]["arguments"] for row in loaded]
    text = ['{"path":"0.py"}', '{"depth":2}']
    assert given == (text if arguments == "text" else list(map(json.loads, text)))


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:.*deprecated and will be removed:FutureWarning")  # TRL's calls
def test_trl_trains_on_its_table(
    tmp_path: Path, load: Callable[[str, Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL's SFT trains the masked tokens; a row is a sample of its asynchronous GRPO."""
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
        **TRL_ON_CPU,
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


@pytest.mark.slow
def test_harbor_reads_its_trajectories(tmp_path: Path) -> None:
    """Harbor's models, which forbid unknown fields, accept every row."""
    wheels = tmp_path / "wheels"
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps")
    run_program(*pip, "--ignore-requires-python", "--dest", wheels, "harbor==0.26.0", check=True)
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
    done = run_program(sys.executable, "-c", code, out, env=environment)
    assert (done.returncode, done.stdout.split()) == (0, ["3", "3"]), done.stderr
