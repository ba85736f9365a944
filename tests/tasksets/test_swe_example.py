"""`examples/swe_gym`: its files are valid, and agree; `e2e/test_swe_gym.py` runs the toy."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from demo_tokenizer import SPECIAL, train_tokenizer
from renderers import Qwen35RendererConfig, create_renderer
from transformers import PreTrainedTokenizerFast

from support.swe_repository import EXAMPLE, make_repository, write_rows
from tasksets.test_swe import GYM
from tugline.chat.tokenizer import Tokenizer
from tugline.datasets.base import TaskTemplate
from tugline.datasets.files import read_set
from tugline.datasets.swe import SweTaskSet
from tugline.demo.run import WARM_START
from tugline.rollout.parts import Parts
from tugline.schema import read_values
from tugline.trainers import sft
from tugline.trainers.batches import TaskBatches
from tugline.trainers.config import read_config

SIZES = (EXAMPLE, EXAMPLE / "toy")
FILES = ("train.yaml", "verified.yaml")
SOURCE = {"options.dataset", "options.split", "options.path", "options.repos"}
"""Options of the task set that say where the rows are."""
ONLY_FULL = {
    "engine.urls",
    "engine.wait_s",
    "fsdp",
    "grpo.autocast",
    "node.engines",
    "node.max_initializing",
    "node.quota_gb",
    "publish_folder",
}
"""What the toy does without: several devices and machines, and much memory."""


@pytest.mark.parametrize("folder", SIZES)
@pytest.mark.parametrize("name", FILES)
def test_tasks_are_valid(folder: Path, name: str, tmp_path: Path) -> None:
    """All keys of a template are known, and each plug-in can be created with its options."""
    values = read_values(folder / name)
    template = TaskTemplate.read(values["template"], name, folder)
    source = values["tasks"]["taskset"] if "tasks" in values else values["taskset"]
    repos = source["options"].get("repos")  # of the toy, whose tasks have no image
    (task,) = SweTaskSet(path=write_rows(tmp_path / "rows.jsonl", GYM), repos=repos).tasks(template)
    Parts().check(task)


@pytest.mark.parametrize("folder", SIZES)
def test_files_are_valid(folder: Path) -> None:
    """Each file is read by the command that it is for."""
    assert read_config(folder / "train.yaml", WARM_START).schedule.steps >= 2
    assert read_set(folder / "verified.yaml") is not None
    if (folder / "sft.yaml").exists():
        assert sft.read_config(folder / "sft.yaml").model == folder / "start" / "model"


def list_keys(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of all values that are no tables."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            yield from list_keys(value, f"{name}.")
        else:
            yield name


@pytest.mark.parametrize("name", FILES)
def test_both_sizes_have_the_same_keys(name: str) -> None:
    """They differ in the source of the rows, the runtime's options and what only GPUs need."""
    full, toy = (set(list_keys(read_values(folder / name))) for folder in SIZES)
    named = {key for key in full ^ toy if key.partition("taskset.")[2] in SOURCE}
    named |= {key for key in full if key.startswith("template.runtime.options.")}
    assert (full ^ toy) - named == (ONLY_FULL if name == "train.yaml" else set())


def test_the_configuration_is_that_of_the_paper() -> None:
    """293 tasks, 4 prompts x 16 samples, one epoch, Adam, truncated weights, one prefix tree."""
    config = read_config(EXAMPLE / "train.yaml", WARM_START)
    select = config.tasks.select
    assert select is not None
    schedule = config.schedule
    assert (select.limit, schedule.tasks_per_step, schedule.samples) == (293, 4, 16)
    assert schedule.steps == 293 // 4
    assert config.template["builder"] == {"name": "prefix_merging"}
    assert config.template["harness"]["options"] == {"context_window": 65536}
    grpo = config.updates
    assert (grpo.lr, grpo.epochs, grpo.sessions_per_update) == (1e-6, 1, 4 * 16)
    assert (grpo.importance, grpo.micro_tokens) == ("truncate", 65536)
    toy = read_config(EXAMPLE / "toy" / "train.yaml", WARM_START)
    batch = toy.schedule.tasks_per_step * toy.schedule.samples
    assert toy.grpo.sessions_per_update == batch


def test_the_toy_holds_an_issue_out(tmp_path: Path) -> None:
    """Of the four issues, three are trained on and one is evaluated."""
    shutil.copy(EXAMPLE / "toy" / "train.yaml", tmp_path)
    make_repository(tmp_path)
    batches = TaskBatches(read_config(tmp_path / "train.yaml", WARM_START), tmp_path)
    batches.check()
    assert sorted(task.id[-1] for task in batches.trained) == ["1", "2", "4"]
    assert [task.id[-1] for task in batches.held_out] == ["3"]


BASH = {"name": "bash", "description": "Run é", "parameters": {"type": "object", "properties": {}}}


def make_call(name: str, **arguments: object) -> dict[str, Any]:
    """A tool call as in the OpenAI API, with its arguments as an object."""
    return {"id": name, "type": "function", "function": {"name": "bash", "arguments": arguments}}


CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief. "},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "ok", "reasoning_content": "dropped by the template"},
    {"role": "user", "content": "two"},
    {
        "role": "assistant",
        "content": "look",
        "reasoning_content": "I think",
        "tool_calls": [make_call("a", command="ls\n<x>", n=3), make_call("b", command="cat")],
    },
    {"role": "tool", "tool_call_id": "a", "content": " x\n"},
    {"role": "tool", "tool_call_id": "b", "content": "y"},
    {"role": "assistant", "reasoning_content": "r", "tool_calls": [make_call("c", command="")]},
    {"role": "tool", "tool_call_id": "c", "content": "z"},
]


@pytest.mark.parametrize("messages", [CONVERSATION, CONVERSATION[1:], CONVERSATION[:4]])
@pytest.mark.parametrize("tools", [[{"type": "function", "function": BASH}], None])
def test_the_toy_has_the_chat_template_of_qwen3_5(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> None:
    """The template of its tokenizer gives the text that the gateway renders."""
    special = (*SPECIAL, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    tokenizer = Tokenizer(train_tokenizer([], [], special=special), "bytes")
    renderer = create_renderer(tokenizer, Qwen35RendererConfig())
    hub = PreTrainedTokenizerFast(
        tokenizer_object=train_tokenizer([], [], special=special),
        chat_template=(EXAMPLE / "toy" / "chat_template.jinja").read_text(),
    )
    rendered = renderer.render_ids(messages, tools=tools, add_generation_prompt=True)
    text = hub.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, tokenize=False
    )
    assert text == tokenizer.decode([*rendered])
