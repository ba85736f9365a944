"""A tiny Qwen3 that calls tools, made on the spot: what the real engines serve in these tests.

It is trained on fixed patterns. To a user it answers with a thought, a sentence and two calls of
`read`; to tool results with a thought and an answer; asked to recite it lists random numbers and
never ends. Its words are random, so that log probabilities are worth comparing. Input and output
embeddings are untied: engines that reload weights while running are exact only then.
"""

import asyncio
import hashlib
import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from demo_tokenizer import END_OF_TURN, PAD, train_tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tugline.chat.tokenizer import Tokenizer
from tugline.harnesses.install import install_once
from tugline.sandbox.cache import cache_folder
from tugline.trainers.grpo.batch import plain_sample
from tugline.trainers.sft import Sft, SftConfig
from tugline.types import Sample

WINDOW = 8192
STEPS = 300
BATCH = 8
POOL = 400
LONGEST = 512
WORDS = [
    "amber", "brook", "cedar", "delta", "ember", "fjord", "grove", "heron", "inlet", "jetty",
    "knoll", "lagoon", "marsh", "north", "otter", "pine", "quay", "ridge", "stone", "thorn",
    "umber", "vale", "wharf", "yarrow", "zephyr",
]  # fmt: skip
RECITE = "Recite."
RECITED = [
    "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve",
]  # fmt: skip
"""Words that occur only in recitations, so that one never ends."""
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": "string"}},
                "required": [key],
            },
        },
    }
    for name, description, key in (
        ("read", "Read a file.", "path"),
        ("run", "Run a command.", "command"),
    )
]
TEMPLATE = Path(__file__).with_suffix(".jinja").read_text()


class Folders(NamedTuple):
    """The model as it was trained, and the same slightly off: the next policy version."""

    first: Path
    second: Path


def make() -> Folders:
    """Both model folders, trained once (about half a minute) and kept in the cache."""
    recipe = Path(__file__).read_bytes() + TEMPLATE.encode()
    digest = hashlib.blake2b(recipe, digest_size=6).hexdigest()
    folder = cache_folder() / "engines" / f"tool-model-{digest}"

    async def fill(fresh: Path) -> None:
        tokenizer = make_tokenizer()
        model = _trained(tokenizer)
        save(model, tokenizer, fresh / "first")
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 0.1 * torch.randn_like(parameter))
        save(model, tokenizer, fresh / "second")

    folder.parent.mkdir(parents=True, exist_ok=True)
    asyncio.run(install_once(folder, fill))
    return Folders(folder / "first", folder / "second")


# --------------------------------------------------------------------------- training data
def _conversation(rng: random.Random, *, recite: bool) -> list[dict[str, Any]]:
    def pick(most: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, most)))

    messages: list[dict[str, Any]] = []
    if rng.random() < 0.8:
        messages.append({"role": "system", "content": f"You help with {pick(12)}."})
    for _ in range(rng.randint(0, 1) if recite else rng.randint(1, 2)):
        messages += _tool_turn(rng, pick)
    if rng.random() < 0.3:  # some harnesses do not echo thoughts
        for message in messages:
            message.pop("reasoning_content", None)
        messages += _tool_turn(rng, pick)
    if recite:
        messages.append({"role": "user", "content": RECITE})
        recital = " ".join(rng.choice(RECITED) for _ in range(LONGEST))
        messages.append({"role": "assistant", "content": recital})
    return messages


def _tool_turn(rng: random.Random, pick: Any) -> list[dict[str, Any]]:
    calls = [
        {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": "read", "arguments": {"path": f"{rng.choice(WORDS)}.txt"}},
        }
        for number in range(2)
    ]
    return [
        {"role": "user", "content": f"{rng.choice(('Mend', 'Find', 'Tell me of'))} {pick(8)}."},
        {
            "role": "assistant",
            "reasoning_content": f"The user asks for {rng.choice(WORDS)} or {rng.choice(WORDS)}.",
            "content": "Let me look.",
            "tool_calls": calls,
        },
        *(
            {"role": "tool", "tool_call_id": call["id"], "content": pick(10)}
            for call in calls[: rng.randint(1, 2)]
        ),
        {
            "role": "assistant",
            "reasoning_content": f"Now I know {rng.choice(WORDS)}.",
            "content": f"It is {rng.choice(WORDS)} and {rng.choice(WORDS)}.",
        },
    ]


def _example(tokenizer: PreTrainedTokenizerFast, conversation: list[dict[str, Any]]) -> Sample:
    """A conversation in the template; only tokens of the assistant are trained."""
    rng = random.Random(json.dumps(conversation))
    tools = None if rng.random() < 0.1 else rng.sample(TOOLS, len(TOOLS))
    if tools and rng.random() < 0.3:  # as SGLang writes them
        tools = [
            {**tool, "function": {**tool["function"], "defer_loading": None}} for tool in tools
        ]
    ids: list[int] = []
    mask: list[bool] = []
    rendered = ""
    for count, message in enumerate(conversation):
        if message["role"] != "assistant":
            continue
        learned = "reasoning_content" in message or message is conversation[-1]
        for end, prompted in ((count, True), (count + 1, False)):
            text = tokenizer.apply_chat_template(
                conversation[:end], tools, add_generation_prompt=prompted, tokenize=False
            )
            new = tokenizer.encode(text[len(rendered) :], add_special_tokens=False)
            rendered = text
            ids += new
            mask += [learned and not prompted] * len(new)
    return plain_sample(np.array(ids[:LONGEST], np.int32), np.array(mask[:LONGEST], np.bool_))


def _pool(tokenizer: Tokenizer, rng: random.Random) -> list[Sample]:
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer._backend, chat_template=TEMPLATE)
    return [_example(made, _conversation(rng, recite=n % 4 == 0)) for n in range(POOL)]


def make_tokenizer(extra: Sequence[str] = ()) -> Tokenizer:
    """Tokenizer of the conversations; each of `extra` is one token."""
    rng = random.Random(0)
    texts = [json.dumps(_conversation(rng, recite=n % 4 == 0)) for n in range(200)]
    return Tokenizer(
        train_tokenizer([*texts, *[TEMPLATE, json.dumps(TOOLS)] * 20], extra, 700), "t"
    )


def _trained(tokenizer: Tokenizer) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=tokenizer.size + -tokenizer.size % 64,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,  # the smallest that every engine has a kernel for
            max_position_embeddings=WINDOW,
            initializer_range=0.05,
            tie_word_embeddings=False,
            pad_token_id=PAD,
            eos_token_id=END_OF_TURN,
            bos_token_id=None,
        )
    )
    rng = random.Random(1)
    pool = _pool(tokenizer, rng)
    config = SftConfig(lr=4e-3, final_lr=0.05, warmup_updates=10, decay_updates=STEPS)
    trainer = Sft(model, config)
    for _ in range(STEPS):
        trainer.update(rng.sample(pool, BATCH))
    return model.eval()


def save(model: PreTrainedModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a model folder as on the hub, with the chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save(folder)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": WINDOW,
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(make())  # noqa: T201 - for whoever wants to look at the model
