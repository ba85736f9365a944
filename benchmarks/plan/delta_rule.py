"""The memory of flash-linear-attention's gated delta rule, simulated: its tensors without values.

The kernels need a GPU. `simulate` allocates the same tensors as `chunk_gated_delta_rule` of
flash-linear-attention (commit bc3b101d) in the same order, and saves the same ones for the backward
pass. It computes nothing: use it on fake tensors only.
"""

# ruff: noqa: INP001, PLR0913, PLR0917 - part of a program; the signatures of the kernel
from __future__ import annotations

from typing import Any

import torch

CHUNK = 64
Tensor = torch.Tensor


class SimulatedRule(torch.autograd.Function):
    """`ChunkGatedDeltaRuleFunction` without its arithmetic.

    Queries and keys have shape ``(B, T, H, K)``, values ``(B, T, HV, V)``, gates ``(B, T, HV)``.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the output and the final state."""
        q, k, v, g, beta = (each.contiguous() for each in (q, k, v, g, beta))  # `input_guard`
        ctx.types = g.dtype
        q, q_rstd = norm(q)
        k, k_rstd = norm(k)
        g = torch.empty_like(g, dtype=torch.float32)  # `chunk_local_cumsum`
        a = k.new_empty(*v.shape[:3], CHUNK)
        w, u = represent(k, v)
        h, new_values = make_states(k, u)
        final = k.new_empty(k.shape[0], v.shape[2], k.shape[3], v.shape[3], dtype=torch.float32)
        out = torch.empty_like(new_values)
        del w, u, h
        ctx.save_for_backward(q, q_rstd, k, k_rstd, v, g, beta, a, state)
        return out, final

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, _d_final: Tensor) -> tuple[Tensor | None, ...]:
        """Return gradients of the inputs."""
        q, _, k, _, v, g, beta, _, state = ctx.saved_tensors
        d_out = d_out.contiguous()
        w, u = represent(k, v)
        h, new_values = make_states(k, u)
        dv = torch.empty_like(d_out)
        dh = torch.empty_like(h)
        dv = torch.empty_like(dv)
        heads = v.shape[2]
        dq = sum_groups(q.new_empty(*q.shape[:2], heads, q.shape[3]), q)
        dk = sum_groups(k.new_empty(*k.shape[:2], heads, k.shape[3]), k)
        dw = torch.empty_like(w)
        dg = torch.empty_like(g)
        del w, u, h, dh, new_values
        more = sum_groups(k.new_empty(*k.shape[:2], heads, k.shape[3]), k)
        dv = torch.empty_like(v)
        d_beta = torch.empty_like(beta)
        del dw, more
        dq = torch.empty_like(dq)
        dk = torch.empty_like(dk)
        d_state = None if state is None else torch.empty_like(state)
        return dq, dk, dv, dg.to(ctx.types), d_beta, d_state


def norm(x: Tensor) -> tuple[Tensor, Tensor]:
    """`l2norm_fwd`: the normalized tensor, and a float32 per head."""
    return torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)


def represent(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """`recompute_w_u_fwd`: keys and values of the WY representation, by value head."""
    return k.new_empty(*k.shape[:2], v.shape[2], k.shape[3]), torch.empty_like(v)


def make_states(k: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """`chunk_gated_delta_rule_fwd_h`: the state of each chunk, and new values."""
    chunks = -(-k.shape[1] // CHUNK)
    states = k.new_empty(k.shape[0], chunks, u.shape[2], k.shape[3], u.shape[3])
    return states, torch.empty_like(u)


def sum_groups(whole: Tensor, like: Tensor) -> Tensor:
    """Sum over the value heads that share a key head."""
    if whole.shape == like.shape:
        return whole
    groups = whole.shape[2] // like.shape[2]
    return whole.view(*whole.shape[:2], like.shape[2], groups, whole.shape[3]).sum(3)


def simulate(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """`chunk_gated_delta_rule`, as transformers calls it."""
    made: tuple[Tensor, Tensor] = SimulatedRule.apply(  # type: ignore[no-untyped-call]
        query, key, value, g, beta, initial_state
    )
    return made
