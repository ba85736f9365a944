"""Supervised fine-tuning: loss, data sets, and resumption of runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import PreTrainedModel

from exports.made import export, record
from support.models import log_probabilities
from support.tokenizer import make_rendering
from support.training import make_model
from trainers.sessions import tiny
from tugline.chat.model_call import serialize_message
from tugline.chat.stream_parser import StreamParser
from tugline.chat.templates.rendering import Rendering
from tugline.errors import UsageError
from tugline.inference.base import GenerateRequest, join
from tugline.inference.engine import Engine
from tugline.inference.load import load
from tugline.trainers.config import MODEL, Lora
from tugline.trainers.grpo.batch import plain_sample
from tugline.trainers.progress import RunProgress
from tugline.trainers.sft import Sft, SftConfig, SftRunConfig, read_set, train
from tugline.trainers.sinks import METRICS, Sinks, make_sinks, read_lines
from tugline.types import Message, Role, Sample, ToolCall


def made_samples(count: int, vocabulary: int = 48) -> list[Sample]:
    """Random sequences of 9 to 40 ids that share their first 6; every third id is trained."""
    rng = np.random.default_rng(count)
    start = rng.integers(0, vocabulary, 6)
    samples = []
    for number in range(count):
        ids = np.concatenate((start, rng.integers(0, vocabulary, int(rng.integers(3, 35)))))
        mask = (np.arange(len(ids)) % 3 == 2) & (np.arange(len(ids)) > 5)
        samples.append(plain_sample(ids.astype(np.int32), mask, session=f"s{number}"))
    return samples


def plain_loss(model: PreTrainedModel, samples: list[Sample]) -> torch.Tensor:
    """Mean negative log likelihood of the trained ids in float64, one sequence at a time."""
    return -torch.cat(
        [log_probabilities(model, row.input_ids)[row.loss_mask[1:]] for row in samples]
    ).mean()


@pytest.mark.parametrize("options", [{}, {"tree_packing": False}, {"micro_tokens": 40}])
def test_loss_and_gradient_are_those_of_plain_torch(options: dict[str, Any]) -> None:
    """Loss and gradient agree within 1e-6, however an update is cut into forward passes."""
    samples, other = made_samples(7), tiny()
    loss = plain_loss(other, samples)
    loss.backward()
    expected = float(loss.detach())
    trainer = Sft(tiny(), SftConfig(max_grad_norm=1e9, **options))
    assert trainer.measure(samples) == pytest.approx(expected, abs=1e-6)
    done = trainer.update(samples)
    assert done.sums["loss"] == pytest.approx(expected, abs=1e-6)
    pairs = zip(trainer.model.parameters(), other.parameters(), strict=True)
    worst = max(float((a.grad - b.grad).abs().max()) for a, b in pairs if a.grad is not None)
    assert worst < 1e-6


# --------------------------------------------------------------------------- data sets
CONVERSATION = (
    Message(Role.SYSTEM, "Be brief."),
    Message(Role.USER, "List the files."),
    Message(Role.ASSISTANT, "", (ToolCall("call_0", "shell", '{"command": "ls"}'),)),
    Message(Role.TOOL, "a.txt", tool_call_id="call_0"),
    Message(Role.ASSISTANT, "There is a.txt."),
)


def write_rows(path: Path, *rows: dict[str, Any]) -> Path:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_one(path: Path, window: int = 999) -> Sample:
    """The only sample of a data set, with the byte-level tokenizer."""
    (sample,), left_out = read_set([path], make_rendering().tokenizer, make_rendering, window)
    assert not left_out
    return sample


@pytest.mark.parametrize("shape", ["text", "object", "prompt_completion"])
def test_messages_are_rendered_and_only_answers_are_trained(tmp_path: Path, shape: str) -> None:
    """Every answer is trained up to its end token, in the context that the gateway renders."""
    arguments = json.loads if shape == "object" else str
    messages = [
        serialize_message(each, reasoning_field=None, arguments=arguments) for each in CONVERSATION
    ]
    row: dict[str, Any] = {"messages": messages}
    if shape == "prompt_completion":
        row = {"prompt": messages[:2], "completion": messages[2:]}
    names = {"metadata": {"session": "s-0", "task": "s"}}
    sample = read_one(write_rows(tmp_path / "set.jsonl", row | names))
    made, ids, mask = make_rendering(), sample.input_ids, sample.loss_mask
    assert (sample.session, sample.group) == ("s-0", "s")
    runs = np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2)
    output = [made.tokenizer.decode(ids[first:last].tolist()) for first, last in runs]
    assert len(output) == 2
    assert '"command": "ls"' in output[0]
    assert output[1].endswith("There is a.txt.<|im_end|>")
    for number, (first, _) in zip((2, 4), runs, strict=True):
        prompt = made.render(CONVERSATION[:number], ())
        assert ids[:first].tolist() == prompt[:first].tolist()


def test_token_ids_are_read(tmp_path: Path) -> None:
    """JSON lines and Parquet are read; rows that are too long or untrained are counted, not cut."""
    rows = [
        {"ids": [5, 6, 7], "loss_mask": [False, True, True], "session": "a-0", "task": "a"},
        {"input_ids": [1, 2], "completion_mask": [0, 1]},
        {"ids": [5, 6], "loss_mask": [False, False]},
        {"ids": [5] * 9, "loss_mask": [False] * 8 + [True]},
    ]
    lines = write_rows(tmp_path / "set.jsonl", *rows)
    exported = tmp_path / "set.parquet"
    record(tmp_path / "recorded", "a")
    export("parquet", tmp_path / "recorded", exported)
    got, left_out = read_set([lines, exported], make_rendering().tokenizer, make_rendering, 8)
    assert [row.input_ids.tolist() for row in got] == [[5, 6, 7], [1, 2], [10, 11, 12, 13, 14, 15]]
    masks = [[False, True, True], [False, True], [False, False, True, True, False, True]]
    assert [row.loss_mask.tolist() for row in got] == masks
    assert left_out == {"untrained": 1, "too_long": 1}


def test_rows_without_a_task_are_grouped_by_their_content(tmp_path: Path) -> None:
    """The same rows are held out, wherever the file is and however it is sorted."""
    rows = [{"ids": [5, at], "loss_mask": [False, True]} for at in (6, 7, 6)]
    found = []
    for name, order in (("one", rows), ("two", rows[::-1])):
        (tmp_path / name).mkdir()
        file = write_rows(tmp_path / name / "set.jsonl", *order)
        samples, _ = read_set([file], make_rendering().tokenizer, make_rendering, 8)
        assert len({one.session for one in samples}) == 3
        found.append({int(one.input_ids[1]): one.group for one in samples})
    assert found[0] == found[1]
    assert len(set(found[0].values())) == 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "x"}, "line 1 must have messages, or ids and loss_mask of equal length; it has"),
        ({"ids": [1, 2], "loss_mask": [True]}, "ids and loss_mask of equal length"),
        ({"ids": [1], "loss_mask": [0], "tokenizer": "00"}, "another tokenizer than the model's"),
        ({"messages": "hi"}, "line 1 is not a conversation in the format of the OpenAI API"),
        ({"messages": [{"role": "boss", "content": ""}]}, r"line 1 is not .*messages\[0\].role"),
    ],
)
def test_wrong_rows_are_reported(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    """The error has the file, the line and what is expected."""
    path = write_rows(tmp_path / "set.jsonl", row)
    with pytest.raises(UsageError, match=message):
        read_set([path], make_rendering().tokenizer, make_rendering, 99)
    with pytest.raises(UsageError, match="cannot be read as conversations"):
        read_set([tmp_path / "missing.jsonl"], make_rendering().tokenizer, make_rendering, 99)


# --------------------------------------------------------------------------- a run
def write_run(folder: Path, **sft: Any) -> SftRunConfig:
    """A random model, and 12 conversations with the same answer."""
    answer = {"role": "assistant", "content": "It is done."}
    rows = [
        {
            "messages": [{"role": "user", "content": f"Do {number}."}, answer],
            "metadata": {"session": f"t{number}-0", "task": f"t{number}"},
        }
        for number in range(12)
    ]
    return SftRunConfig(
        model=make_model(folder / "start"),
        data=(write_rows(folder / "set.jsonl", *rows),),
        heldout_share=0.3,
        every=2,
        sft=SftConfig(**({"lr": 1e-2, "epochs": 4, "sessions_per_update": 4} | sft)),
    )


def run(config: SftRunConfig, folder: Path) -> list[dict[str, Any]]:
    """Run it; return the lines of its metrics."""
    train(config, folder, make_sinks((), Console(quiet=True)), RunProgress())
    return read_lines(folder / METRICS)


async def test_held_out_loss_falls_and_the_model_answers(tmp_path: Path) -> None:
    """The embedded engine loads the trained model, which has learned the answer."""
    config = write_run(tmp_path, epochs=40)
    losses = [row["sft/heldout_loss"] for row in run(config, tmp_path / "run") if len(row) == 2]
    assert losses[-1] < 0.5 * losses[0]
    model, tokenizer, eos_ids = load(tmp_path / "run" / MODEL)
    made = Rendering(tokenizer, "qwen3")
    prompt = made.render([Message(Role.USER, "Do 99.")], ())
    request = GenerateRequest(
        prompt_ids=prompt, max_tokens=20, temperature=0, stop_ids=made.stop_ids
    )
    async with Engine(model, eos_ids=eos_ids, max_model_len=512) as engine:
        answer = join([chunk async for chunk in engine.generate(request)])
    _, message = StreamParser.parse(made, prompt, answer.ids.tolist())
    assert message.content == "It is done."


class Killed(Exception):
    """Ends a run."""


class KillingSinks(Sinks):
    """Sinks that end the run at the figures of a step, as a kill would."""

    def __init__(self, at: int) -> None:
        super().__init__(())
        self._at = at

    def log(self, step: int, figures: Any) -> None:
        """Raise at the step."""
        if step == self._at:
            raise Killed


def test_an_adapter_is_added_to_the_trained_model(tmp_path: Path) -> None:
    """The result has the held-out loss of the run; only adapted weights have changed."""
    config = msgspec.structs.replace(write_run(tmp_path), lora=Lora(rank=4, targets=("q_proj",)))
    state = train(config, tmp_path / "run", Sinks(()), RunProgress())
    first, last = (load(folder)[0] for folder in (config.model, tmp_path / "run" / MODEL))
    weights = last.state_dict()
    changed = {name for name, old in first.state_dict().items() if not old.equal(weights[name])}
    assert changed == {f"model.layers.{n}.self_attn.q_proj.weight" for n in range(2)}
    assert state.heldout[state.step] < state.heldout[0]
    again = msgspec.structs.replace(config, model=tmp_path / "run" / MODEL, lora=None)
    next_state = train(again, tmp_path / "next", Sinks(()), RunProgress())
    assert next_state.heldout[0] == pytest.approx(state.heldout[state.step], abs=1e-6)


@pytest.mark.parametrize("lora", [None, Lora(rank=4)])
def test_an_interrupted_run_has_the_same_result(tmp_path: Path, lora: Lora | None) -> None:
    """The weights are exactly the same; a run with other settings is refused."""
    config = msgspec.structs.replace(write_run(tmp_path), lora=lora)
    run(config, tmp_path / "whole")
    for at in (3, 5, 8):
        with pytest.raises(Killed):
            train(config, tmp_path / "run", KillingSinks(at), RunProgress())
    run(config, tmp_path / "run")
    whole, resumed = (load(tmp_path / name / MODEL)[0].state_dict() for name in ("whole", "run"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    changed = msgspec.structs.replace(config, every=9)
    with pytest.raises(UsageError, match="other values of every"):
        run(changed, tmp_path / "run")
