"""Log probabilities of trained tokens under a Hugging Face causal language model.

The head is applied only where the next token is trained: a vocabulary of logits for every token
of a long prompt would cost more than all layers below it. Two ways give the same numbers up to
rounding: the plain one, and the shared one, which computes the common prefix of the rows once, with
gradient, and expands its keys and values over them.
"""

from __future__ import annotations

from typing import Any

import torch

from tugline.errors import ConfigError
from tugline.trainers.grpo.batch import MicroBatch


class PolicyModel:
    """A causal language model as a distribution over next tokens.

    The model is put in evaluation mode and stays there: with dropout the trained policy
    would differ from the one that sampled.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model.eval()
        untyped: Any = model  # Hugging Face's attributes, unknown to torch's stubs
        self._body = untyped.base_model
        self._head = untyped.get_output_embeddings()
        self._check_head()

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next(self.model.parameters()).device

    def logprobs(self, micro: MicroBatch) -> torch.Tensor:
        """Natural-log probabilities of the trained tokens, float32, shape ``(N,)``.

        The logits that predict a token are divided by its temperature.
        """
        states = self._shared(micro) if micro.prefix else self._plain(micro)
        logits: torch.Tensor = self._head(states).float() / micro.temperature[:, None]
        chosen = logits.gather(1, micro.ids[micro.row, micro.column][:, None])[:, 0]
        return chosen - logits.logsumexp(dim=1)

    def _plain(self, micro: MicroBatch) -> torch.Tensor:
        out = self._body(input_ids=micro.ids, use_cache=False)
        states: torch.Tensor = out.last_hidden_state[micro.row, micro.column - 1]
        return states

    def _shared(self, micro: MicroBatch) -> torch.Tensor:
        cache = self._body(input_ids=micro.ids[:1, : micro.prefix], use_cache=True).past_key_values
        cache.batch_repeat_interleave(len(micro.ids))
        rest = micro.ids[:, micro.prefix :]
        out = self._body(input_ids=rest, past_key_values=cache, use_cache=True)
        states: torch.Tensor = out.last_hidden_state[micro.row, micro.column - 1 - micro.prefix]
        return states

    @torch.no_grad()
    def _check_head(self) -> None:
        """Refuse a model that changes its logits after the head. Raises `ConfigError`."""
        ids = torch.arange(1, 9, device=self.device)[None]
        whole = self.model(input_ids=ids, use_cache=False).logits
        states = self._body(input_ids=ids, use_cache=False).last_hidden_state
        if not torch.allclose(whole, self._head(states), rtol=1e-4, atol=1e-6):
            msg = (
                f"model {type(self.model).__name__} changes its logits after the output layer "
                "(soft-capping or scaling); the GRPO trainer needs one that does not"
            )
            raise ConfigError(msg)
