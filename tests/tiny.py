"""A tokenizer small enough to make on the spot, and the renderings built on it."""

# ruff: noqa: RUF001  # special tokens as their models write them

from __future__ import annotations

import functools
from collections.abc import Sequence

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from tugline.chat.templates.base import CONFIGS
from tugline.chat.templates.rendering import Rendering
from tugline.chat.tokenizer import Tokenizer

_CHATML = (
    "<|endoftext|> <|im_start|> <|im_end|> <think> </think>"
    " <tool_call> </tool_call> <tool_response> </tool_response>"
)
_VISION = f"{_CHATML} <|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|>"
_GLM = (
    "[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <|endoftext|> <think> </think>"
    " <tool_call> </tool_call> <tool_response> </tool_response>"
    " <arg_key> </arg_key> <arg_value> </arg_value>"
)
_LAGUNA = "〈|EOS|〉 <think> </think> <assistant> </assistant> <tool_call> </tool_call>"
_DEEPSEEK = (
    "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜>"
    " <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜>"
    " <｜tool▁sep｜> <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜>"
    " <｜tool▁output▁begin｜> <｜tool▁output▁end｜>"
)
_KIMI = (
    "<|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> <|im_end|>"
    " <|tool_calls_section_begin|> <|tool_calls_section_end|>"
    " <|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|>"
)
_HY3 = (
    "<｜hy_begin_of_sentence{0}｜> <｜hy_eos{0}｜> <｜hy_User{0}｜> <｜hy_Assistant{0}｜>"
    " <｜reasoning_mode{0}｜> <think{0}> </think{0}> <tool_calls{0}> </tool_calls{0}>"
    " <tool_call{0}> </tool_call{0}> <tool_sep{0}> <arg_key{0}> </arg_key{0}>"
    " <arg_value{0}> </arg_value{0}> <tool_responses{0}> </tool_responses{0}>"
    " <tool_response{0}> </tool_response{0}>"
).format(":opensource")
_INKLING = (
    "<|message_user|> <|message_model|> <|message_system|> <|message_tool|> <|content_text|>"
    " <|content_thinking|> <|content_image|> <|content_audio_input|> <|content_xml|>"
    " <|content_invoke_tool_json|> <|content_invoke_tool_text|> <|content_model_end_sampling|>"
    " <|end_message|> <|audio_end|> <|unused_200054|> <|unused_200053|>"
)

SPECIALS: dict[str, str] = {
    **dict.fromkeys(("qwen3", "prime-qwen3"), _CHATML),
    **dict.fromkeys(("nemotron-3", "nemotron-3-ultra", "nemotron-3.5"), _CHATML),
    **dict.fromkeys(("qwen3-vl", "qwen3.5", "qwen3.6", "qwen3.8"), _VISION),
    **dict.fromkeys(("glm-4.5", "glm-5", "glm-5.1", "glm-5.3"), _GLM),
    **dict.fromkeys(("laguna-xs.2", "laguna-m.1", "laguna-xs-2.1", "laguna-s-2.1"), _LAGUNA),
    "deepseek-v3": _DEEPSEEK,
    "deepseek-r1": f"{_DEEPSEEK} <think> </think>",
    "deepseek-v4": (
        "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> <think> </think>"
        " ｜DSML｜ <｜latest_reminder｜> <｜action｜> <｜query｜> <｜authority｜> <｜domain｜>"
        " <｜title｜> <｜read_url｜>"
    ),
    "kimi-k2": _KIMI,
    "kimi-k2.5": (
        f"{_KIMI} <think> </think> <|media_begin|> <|media_content|> <|media_pad|> <|media_end|>"
    ),
    "minimax-m2": "]~!b[ ]~b] [e~[ <think> </think> <minimax:tool_call> </minimax:tool_call>",
    "hy3": _HY3,
    "llama-3": (
        "<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|end_of_text|>"
        " <|eom_id|>"
    ),
    "gemma4": (
        "<bos> <eos> <|turn> <turn|> <|channel> <channel|> <|think|> <|tool> <tool|>"
        " <|tool_call> <tool_call|> <|tool_response> <tool_response|> <|image> <|image|> <image|>"
    ),
    "inkling": _INKLING,
    "gpt-oss": (
        "<|start|> <|end|> <|return|> <|call|> <|channel|> <|message|> <|constrain|> <|endoftext|>"
    ),
}
"""The special tokens that each template is made of."""

OFFLINE = sorted(set(CONFIGS) - {"gpt-oss"})
"""Templates that render without asking the internet for a vocabulary."""


def tokenizer(specials: Sequence[str] = tuple(_CHATML.split())) -> Tokenizer:
    """Byte-level, without merges: every byte is an id, so any text round-trips."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(specials))
    return Tokenizer(backend, "byte-level")


def merging_tokenizer(specials: Sequence[str], *, across_words: bool = False) -> Tokenizer:
    """Byte-level with merges, also of line breaks with what stands beside them `across_words`."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=not across_words
    )
    backend.decoder = decoders.ByteLevel()
    text = ['user\n\nassistant\n  x = {"a": 1}\n\n\n\n\tx\n1\n', " x\n\n  y\n user\n{\n }\n"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(text * 20, trainer)
    backend.add_special_tokens(list(specials))
    return Tokenizer(backend, "merging")


@functools.cache
def rendering(name: str = "qwen3", thinking_retention: str = "all") -> Rendering:
    """A template over the byte-level tokenizer with the special tokens it needs."""
    return Rendering(tokenizer(SPECIALS[name].split()), name, thinking_retention=thinking_retention)
