"""How likely given ids are under a model: a plain forward pass, in pieces of bounded size.

Nothing of the engine's own cache is used or left, so this is a second opinion on what it sampled.
"""

from __future__ import annotations

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from tugline.types import Ids, Logprobs

_PIECE = 512
"""Positions whose logits, each as wide as the vocabulary, are in memory together."""


@torch.inference_mode()
def score(model: PreTrainedModel, ids: Ids, temperature: float) -> Logprobs:
    """Log probability of each id after all before it, without the first; shape ``(n - 1,)``.

    At `temperature`, or at 1 if that is 0, as `tugline.inference.sampling` tells those it draws.
    """
    whole = torch.from_numpy(ids.astype(np.int64)).to(model.device)
    cache = DynamicCache()
    found = []
    for start in range(0, len(ids) - 1, _PIECE):
        piece = whole[start : min(start + _PIECE, len(ids) - 1)]
        logits = model(input_ids=piece[None], past_key_values=cache, use_cache=True).logits[0]
        rows = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
        following = whole[start + 1 : start + 1 + len(piece)]
        found.append(rows.gather(1, following[:, None])[:, 0].cpu().numpy())
    return np.concatenate(found) if found else np.empty(0, np.float32)
