"""Make the first model of the toy, and the sessions that it learns from.

    python examples/swe_gym/toy/make_start.py --harness pi

needs the rows of `make_rows.py`, and writes to the folder `start` beside this script:

- `model`: a model of Qwen3.5's architecture with random weights (gated delta nets, full attention,
  a vision tower), and a tokenizer with Qwen's special tokens;
- `sessions.parquet`: scripted sessions of the harness, for `tugline sft`.

A scripted engine answers in the model's place, and the real harness executes what it says: it
looks at the files, applies a patch and looks at the change. Half of the patches are wrong. The
tokenizer has one token for each piece of text that two sessions share, so the prompt of a harness,
6 to 80 KB, has about a hundred tokens.

``--engine vllm`` gives the model the shape that vLLM computes on a CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from make_rows import ISSUES
from msgspec.structs import replace
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
)

from tugline.chat.tokenizer import Tokenizer
from tugline.datasets.files import SelectedTasks, SetFile
from tugline.exports.base import make_exporter
from tugline.exports.pipeline import Export
from tugline.exports.pipeline import run as export
from tugline.inference.server import create_app
from tugline.launch.run import run_in_folder
from tugline.launch.settings import EngineSettings, Settings
from tugline.node.settings import NodeSettings
from tugline.protocol import ResultView
from tugline.recording.file import read
from tugline.recording.folder import list_recordings
from tugline.testing import Reply, ScriptedEngine
from tugline.types import Ids, PluginSpec, Task
from tugline.web.serve import serve

HERE = Path(__file__).resolve().parent
OUT = HERE / "start"
ROWS = "rows.jsonl"
SESSIONS = "sessions.parquet"
sys.path.append(str(HERE.parents[2] / "tools" / "warm_start"))

from demo_tokenizer import PAD, SPECIAL, common_blocks, train_tokenizer  # noqa: E402 - of the checkout

RENDERER = "qwen3.5"
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
END_OF_TURN = SPECIAL.index("<|im_end|>")
WINDOW = 32768
"""Context window of the model, in tokens."""
RECORDED_WINDOW = 524_288
"""Context window of the scripted engine, also for prompts in which every byte is a token."""
MAX_TOKENS = 4096
"""Longest answer, also where every byte is a token."""
SLOTS = 3
"""Sessions at the same time."""
PIECES = r"[^\n]+|\n+"
"""Lines: in the vocabulary, most lines of the answers are one token."""
REPEATED = 10
"""Times that the answers count in the text from which the vocabulary is made."""
WORDS = 2000
"""Tokens of the vocabulary that are not whole blocks of a prompt."""


SHAPES: dict[str, dict[str, Any]] = {
    "embedded": {
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "vllm": {
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "tie_word_embeddings": False,
    },
}
"""By engine: the linear heads, and whether the output has the weights of the embedding.

vLLM on a CPU has a kernel for linear heads of 128 only, and is inexact with tied embeddings once
it has loaded new weights.
"""
IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
}
"""Preprocessing of images, which vLLM reads also for a model that gets none."""


class ShellTool(NamedTuple):
    """The tool of a harness that runs a shell command."""

    name: str
    argument: str = "command"
    others: Mapping[str, str] = {}
    """Further arguments, which the harness requires."""


HARNESSES = {
    "codex": ShellTool("exec_command", "cmd"),
    "claude_code": ShellTool("Bash", others={"description": "As asked"}),
    "qwen_code": ShellTool("run_shell_command", others={"is_background": "false"}),
    "pi": ShellTool("bash"),
}


def main() -> None:
    """Record, and write model and sessions."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--harness", choices=sorted(HARNESSES), default="pi")
    parser.add_argument("--engine", choices=sorted(SHAPES), default="embedded")
    options = parser.parse_args()
    harness = options.harness
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    with tempfile.TemporaryDirectory(prefix="tugline-") as scratch:
        tokenizer = make_tokenizer(harness, Path(scratch) / "texts")
        write_model(tokenizer, OUT / "model", SHAPES[options.engine])
        twice = [replace(task, samples=2) for task in read_tasks(harness, WINDOW)]
        recordings = record(twice, harness, tokenizer, Path(scratch) / "sessions")
        parquet = make_exporter(PluginSpec("parquet"))
        export(Export(exporter=parquet, out=OUT / SESSIONS), recordings, lambda *_: None)
    print(f"{len(recordings)} sessions in {OUT / SESSIONS}")


def read_tasks(harness: str, window: int) -> list[Task]:
    """Return the tasks of all rows, with the template of `train.yaml`.

    A harness with a `window` that is too small for its prompts would compact them.
    """
    config = yaml.safe_load((HERE / "train.yaml").read_text())
    template = config["template"]
    template["harness"] = {"name": harness, "options": {"context_window": window}}
    template["sampling"]["max_tokens"] = MAX_TOKENS
    file = SetFile(PluginSpec(**config["tasks"]["taskset"]), template)
    return SelectedTasks(file, "train.yaml", HERE).tasks()


# --------------------------------------------------------------------------- the script
def write_answers(task: str, patch: str, harness: str, *, right: bool) -> list[str]:
    """Return the answers of a session: commands, and a last text."""
    issue = ISSUES[int(task.rpartition("-")[2]) - 1]
    changed = [line for line in patch.splitlines() if not line.startswith(("diff ", "index "))]
    if not right:
        changed = [
            line.replace(*issue.mistake) if line.startswith("+") else line for line in changed
        ]
    source = issue.change[0]
    commands = {
        "I look for the files.": "ls larder tests",
        "I read the code.": f"cat {source}",
        "I read its tests.": f"cat {issue.tests[0]}",
        "I change the code.": "\n".join(["git apply <<'PATCH'", *changed, "PATCH"]),
        "I look at the change.": "git diff --stat",
    }
    tool = HARNESSES[harness]
    calls = [answer(thought, call(tool, command)) for thought, command in commands.items()]
    return [*calls, answer("The issue is resolved.", "Done.")]


def answer(thought: str, text: str) -> str:
    """Return an answer after the opening of its reasoning, in the format of Qwen3.5."""
    return f"{thought}\n</think>\n\n{text}<|im_end|>"


def call(tool: ShellTool, command: str) -> str:
    """Return a call of a tool, in the format of Qwen3.5."""
    arguments = {tool.argument: command, **tool.others}
    texts = [f"<parameter={name}>\n{value}\n</parameter>" for name, value in arguments.items()]
    lines = ["<tool_call>", f"<function={tool.name}>", *texts, "</function>", "</tool_call>"]
    return "\n".join(lines)


# --------------------------------------------------------------------------- recording
def record(tasks: Sequence[Task], harness: str, tokenizer: Tokenizer, folder: Path) -> list[Path]:
    """Record sessions of the tasks with a scripted engine; every second one resolves its issue."""
    patches = read_patches()

    def reply(_prompt: Ids, request: str) -> Reply:
        # The gateway names a request <kind>-<session>-<number of the call>.
        session, _, number = request.partition("-")[2].rpartition("-")
        task, _, sample = session.rpartition("-")
        text = "Nothing.<|im_end|>"  # the gateway tries the engine before there is a session
        if task in patches:
            answers = write_answers(task, patches[task], harness, right=is_right(int(sample)))
            text = answers[int(number)]
        return Reply(tokenizer.encode(text), tokens_per_chunk=64)

    folder.mkdir(parents=True)
    tokenizer.save(folder)
    views = asyncio.run(run(tasks, reply, tokenizer, folder))
    for view in views:
        expected = float(is_right(view.sample))
        if view.reward != expected:
            raise SystemExit(f"{view.session} earned {view.reward}, must be {expected}")
    return sorted(list_recordings(folder), key=find_session)


def is_right(sample: int) -> bool:
    """Whether the scripted session with this number resolves its issue."""
    return sample % 2 == 0


def find_session(recording: Path) -> str:
    """Return the id of a recorded session."""
    header = read(recording).header
    return header.session.id if header else ""


async def run(
    tasks: Sequence[Task], reply: Callable[[Ids, str], Reply], tokenizer: Tokenizer, folder: Path
) -> list[ResultView]:
    """Run the tasks in `folder` with an engine that gives these replies."""
    engine = ScriptedEngine(
        reply, vocab_size=tokenizer.size, max_model_len=RECORDED_WINDOW, eos_ids=[END_OF_TURN]
    )
    async with serve(create_app(engine, model_name="scripted")) as url:
        settings = Settings(
            engine=EngineSettings(
                urls=(url,), tokenizer=folder / "tokenizer.json", renderer=RENDERER
            ),
            node=NodeSettings(slots=SLOTS),
        )
        return await run_in_folder(tasks, settings, folder, print_session)


def print_session(view: ResultView, *, new: bool) -> None:  # noqa: ARG001 - a callback's parameter
    """Print the name of a session that has ended."""
    print(view.session)


def read_patches() -> dict[str, str]:
    """Return the reference patches by task."""
    rows = map(json.loads, (HERE / ROWS).read_text().splitlines())
    return {row["instance_id"]: row["patch"] for row in rows}


# --------------------------------------------------------------------------- tokenizer and model
def make_tokenizer(harness: str, folder: Path) -> Tokenizer:
    """Train the tokenizer on the text of a session of each task."""
    special = (*SPECIAL, *VISION)
    bytes_only = Tokenizer(train_tokenizer([], [], special=special), "bytes")
    tasks = read_tasks(harness, RECORDED_WINDOW)
    last_calls = [read(path).calls[-1] for path in record(tasks, harness, bytes_only, folder)]
    texts = [bytes_only.decode([*call.prompt_ids, *call.sampled_ids]) for call in last_calls]
    blocks = common_blocks(texts[0], texts[2])  # sessions that change different files
    answers = [
        text
        for task, patch in read_patches().items()
        for right in (True, False)
        for text in write_answers(task, patch, harness, right=right)
    ]
    corpus = [*texts, *answers * REPEATED]
    trained = train_tokenizer(corpus, blocks, WORDS + len(blocks), special, PIECES)
    tokenizer = Tokenizer(trained, "tugline-toy")
    count = len(tokenizer.encode(texts[0]))
    print(f"{harness}: a session of {len(texts[0]):,} characters has {count:,} tokens")
    return tokenizer


def write_model(tokenizer: Tokenizer, folder: Path, shape: Mapping[str, Any]) -> None:
    """Write a model of Qwen3.5's architecture, as on the hub, with random weights."""
    torch.manual_seed(0)
    text: dict[str, Any] = {
        "vocab_size": tokenizer.size,
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 4,  # the last one has full attention
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": WINDOW,
        "initializer_range": 0.05,  # 0.02, the default, suits wide models
        "eos_token_id": END_OF_TURN,
        **shape,
    }
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 96,
        "num_position_embeddings": 16,
    }
    start, end, image, video = map(tokenizer.convert_tokens_to_ids, VISION)
    config = Qwen3_5Config(
        text_config=Qwen3_5TextConfig(**text).to_dict(),
        vision_config=vision,
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
        tie_word_embeddings=shape["tie_word_embeddings"],
    )
    model = Qwen3_5ForConditionalGeneration(config)
    model.generation_config.eos_token_id = END_OF_TURN
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(IMAGES))
    write_tokenizer(tokenizer, folder)


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the tokenizer and its chat template, as on the hub."""
    tokenizer.save(folder)
    loaded = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        eos_token=SPECIAL[END_OF_TURN],
        pad_token=SPECIAL[PAD],
        additional_special_tokens=list(VISION),
        chat_template=(HERE / "chat_template.jinja").read_text(),
    )
    loaded.save_pretrained(folder)
    tokenizer.save(folder)  # as it was: the sessions name its checksum


if __name__ == "__main__":
    main()
