"""A small model of every family of transformers whose experts the trainer replays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from support.models import HYBRID_SIZE as HYBRID
from support.models import ROPE, SMALL

EXPERTS = 8
"""Experts of a layer."""
TAKEN = 2
"""Experts of a token."""
_SIZE: dict[str, Any] = SMALL | {"max_position_embeddings": 256, "tie_word_embeddings": False}
_SIZE |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SIZE |= {"num_experts_per_tok": TAKEN, "moe_intermediate_size": 24, "initializer_range": 0.3}
_QWEN: dict[str, Any] = {
    "num_experts": EXPERTS,
    "norm_topk_prob": True,
    "shared_expert_intermediate_size": 24,
}
_LOCAL: dict[str, Any] = {"num_local_experts": EXPERTS}
_GROUPS: dict[str, Any] = {
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
}
_GROUPS |= {"n_routed_experts": EXPERTS, "first_k_dense_replace": 1, "num_hidden_layers": 3}
_LATENT: dict[str, Any] = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8}
_LATENT |= {"qk_rope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4, "head_dim": 8}


def _make(name: str, model: str | None = None, **changes: Any) -> Callable[[], PreTrainedModel]:
    def make() -> PreTrainedModel:
        config = getattr(transformers, f"{name}Config")(**_SIZE | changes)
        made: PreTrainedModel = getattr(transformers, f"{model or name}ForCausalLM")(config)
        return made

    return make


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen2_moe": _make("Qwen2Moe", **_QWEN),
    "qwen3_moe": _make("Qwen3Moe", **_QWEN),
    "qwen3_moe, not normalised": _make("Qwen3Moe", **_QWEN | {"norm_topk_prob": False}),
    "qwen3_next": _make("Qwen3Next", **HYBRID | _QWEN),
    "qwen3_5_moe": _make("Qwen3_5MoeText", "Qwen3_5Moe", **HYBRID | _QWEN, rope_parameters=ROPE),
    "mixtral": _make("Mixtral", **_LOCAL),
    "gpt_oss": _make("GptOss", **_LOCAL),
    "deepseek_v2": _make(
        "DeepseekV2", **_GROUPS | _LATENT | {"topk_method": "group_limited_greedy"}
    ),
    "deepseek_v2, greedy": _make("DeepseekV2", **_GROUPS | _LATENT | {"topk_method": "greedy"}),
    "deepseek_v3": _make("DeepseekV3", **_GROUPS | _LATENT),
    "deepseek_v3, one group": _make(
        "DeepseekV3", **_GROUPS | _LATENT | {"n_group": 1, "topk_group": 1}
    ),
    "glm4_moe": _make("Glm4Moe", **_GROUPS),
    "glm4_moe_lite": _make("Glm4MoeLite", **_GROUPS | _LATENT),
    "olmoe": _make("Olmoe", **_QWEN),
    "flex_olmo": _make("FlexOlmo", **_QWEN),
    "minimax_m2": _make("MiniMaxM2", **_LOCAL),
    "ernie4_5_moe": _make("Ernie4_5_Moe", moe_num_experts=EXPERTS, moe_k=TAKEN),
    "granitemoe": _make("GraniteMoe", **_LOCAL),
    "lfm2_moe": _make(
        "Lfm2Moe", num_experts=EXPERTS, num_dense_layers=1, layer_types=["conv", "full_attention"]
    ),
    "kimi_linear": _make("KimiLinear", **_GROUPS | _LATENT),
    "dots1": _make("Dots1", **_GROUPS),
    "hy_v3": _make("HYV3", num_experts=EXPERTS),
    "jamba": _make("Jamba", num_experts=EXPERTS),
    "nemotron_h": _make("NemotronH", **_GROUPS),
    "mimo_v2_flash": _make("MiMoV2Flash", **_GROUPS),
    "solar_open": _make("SolarOpen", **_GROUPS),
}
"""Models whose experts are replayed."""
REFUSED: dict[str, Callable[[], PreTrainedModel]] = {
    "phimoe": _make("Phimoe", **_LOCAL),
    "hunyuan_v1_moe": _make("HunYuanMoEV1", num_experts=EXPERTS, moe_topk=TAKEN),
    "longcat_flash": _make("LongcatFlash", **_GROUPS | _LATENT),
    "afmoe": _make("Afmoe", num_experts=EXPERTS),
    "deepseek_v4": _make("DeepseekV4", **_LOCAL),
}
"""Models whose routers are not supported."""


def make_family(name: str, seed: int = 0) -> PreTrainedModel:
    """Return a new model of `FAMILIES` or `REFUSED`, with a bias that changes the choice."""
    torch.manual_seed(seed)
    model = (FAMILIES | REFUSED)[name]()
    for tensor_name, tensor in model.named_buffers():
        if tensor_name.endswith("correction_bias"):
            tensor.normal_(std=0.1)
    return model
