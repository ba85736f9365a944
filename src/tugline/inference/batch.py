"""The synchronous batch of the embedded engine: admission, and one step of all rows.

A step admits waiting requests (copy the longest cached prefix, prefill the tails together), then
decodes one token for every running row. The batch owns the model and is driven by one thread,
without locks or awaits. Requests that arrive together and share a prompt (a GRPO group) are
admitted one after the other within a step, so that all use the KV of the first request.

Invariants: I1 (every token is recorded with its log probability and the version it was sampled
under; KV of older weights is never matched), I7 (only the new tokens of a turn are computed).
"""

import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple, cast

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from tugline.errors import UsageError
from tugline.inference.base import EngineStats
from tugline.inference.kv import Cut, PrefixTable, make_pool
from tugline.inference.routers import read_experts, use_routers
from tugline.inference.sampling import sample, uniforms
from tugline.inference.sequence import Routes, Sequence
from tugline.types import Experts, Finish, shared_prefix

PREFILL_TOKENS = 4096
"""Maximum tokens of a prefill, including padding; it bounds the wait of running rows."""

WORTH_WAITING = 48
"""Minimum tokens that a request must save to wait for another request's prefill."""

SMALLEST_PARKED = 16
"""Minimum length of parked sequences; shorter ones are cheaper to recompute than to keep."""

Matrix = npt.NDArray[np.int64]
"""Shape (rows, tokens)."""

_ROW = np.dtype(
    [
        ("kv", np.int32),  # computed positions
        ("last", np.int32),  # sampled token, not computed yet
        ("count", np.int32),  # number of sampled tokens
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("top_k", np.int32),
        ("min_p", np.float32),
        ("seed", np.uint64),
    ]
)


class Parked(NamedTuple):
    """What is kept of a finished sequence."""

    cut: Cut
    experts: Experts | None
    """Experts of its tokens, shape ``(length, layers, top_k)``; None for a dense model."""


class Batch:
    """Running rows, waiting requests and parked KV of one model."""

    def __init__(
        self, model: PreTrainedModel, *, max_model_len: int, max_running: int, max_parked: int
    ) -> None:
        self.version = 0
        self.admission_paused = False
        """True while no waiting request is admitted."""
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self._model = model
        self._max_running, self._max_parked = max_running, max_parked
        self._rows = np.zeros(max_running, _ROW)
        self._running_prefixes = PrefixTable(max_running, max_model_len)
        self._parked_prefixes = PrefixTable(max_parked, max_model_len)
        self._parked: OrderedDict[int, Parked] = OrderedDict()
        """By slot in `_parked_prefixes`, least recently used first."""
        self._pool = make_pool(model)
        self._routers = use_routers(model)
        self._updates: dict[Sequence, None] = {}
        self._stats = EngineStats()

    # ----------------------------------------------------------------- between steps
    @property
    def idle(self) -> bool:
        """Whether `step` would do nothing."""
        return not self.running and not (self.waiting and not self.admission_paused)

    @torch.inference_mode()
    def cancel(self, sequences: Iterable[Sequence]) -> None:
        """End sequences that have not ended, with finish ``abort``."""
        aborted = {id(sequence) for sequence in sequences if sequence.finish is None}
        for sequence in [*self.running, *self.waiting]:
            if id(sequence) in aborted:
                sequence.finish = Finish.ABORT
                self._updates[sequence] = None
        for sequence in [sequence for sequence in self.waiting if sequence.finish]:
            self._stats.finished[Finish.ABORT] += 1
            self.waiting.remove(sequence)
        self._retire()

    def swap(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Replace the weights and drop all KV. Raises `UsageError`, with nothing changed.

        Running rows return to the head of the queue; their context is recomputed under the new
        weights before they continue.
        """
        _check_weights(self._model, weights)
        with torch.no_grad():
            self._model.load_state_dict(weights, strict=False)
        self.version = version
        self.waiting.extendleft(reversed(self.running))
        self.running.clear()
        self._running_prefixes.forget(slice(None))
        self._parked_prefixes.forget(slice(None))
        self._parked.clear()

    def take_updates(self) -> list[Sequence]:
        """Return and clear the sequences with new tokens or a finish reason."""
        updates = list(self._updates)
        self._updates.clear()
        return updates

    def stats(self) -> EngineStats:
        """Return a snapshot of the counters."""
        return msgspec.structs.replace(
            self._stats,
            running=len(self.running),
            waiting=len(self.waiting),
            parked=len(self._parked),
            finished=dict(self._stats.finished),
        )

    # ----------------------------------------------------------------- one step
    @torch.inference_mode()
    def step(self) -> None:
        """Admit waiting requests, then decode one token for every row that was running before."""
        decoding = len(self.running)
        if not self.admission_paused:
            self._admit()
        if decoding:
            self._decode(decoding)
        self._retire()

    def _admit(self) -> None:
        budget = PREFILL_TOKENS
        while self.waiting and len(self.running) < self._max_running and budget > 0:
            chosen = self._choose(budget)
            for sequence, _, _ in chosen:
                self.waiting.remove(sequence)
            budget -= self._prefill(chosen)

    def _choose(self, budget: int) -> list[tuple[Sequence, int, int]]:
        """Return requests to prefill together, each with its prefix as returned by `_find`."""
        chosen: list[tuple[Sequence, int, int]] = []
        widest = useful = 0
        free = self._max_running - len(self.running)
        for sequence in list(self.waiting)[: 2 * self._max_running]:
            source, cached = self._find(sequence)
            tail = len(sequence.context) - cached
            width = max(widest, tail)
            total = useful + tail
            padded = width * (len(chosen) + 1)
            if chosen and (padded > budget or padded > 2 * total + WORTH_WAITING):
                continue
            ids = sequence.context[:-1]
            least = cached + WORTH_WAITING
            if any(shared_prefix(ids, other.context) > least for other, _, _ in chosen):
                continue
            chosen.append((sequence, source, cached))
            widest = width
            useful = total
            if len(chosen) == free or self._pool.recurrent:
                break
        return chosen

    def _find(self, sequence: Sequence) -> tuple[int, int]:
        """Find the longest cached prefix: its row (``-1 - slot`` if parked) and length.

        The last token of a context is always computed, because its logits are needed.
        """
        ids = sequence.context[:-1]
        if self._pool.recurrent:
            slot, parked = self._parked_prefixes.longest(ids, whole=True)
            return -1 - slot, parked
        row, running = self._running_prefixes.longest(ids)
        slot, parked = self._parked_prefixes.longest(ids)
        return (row, running) if running >= parked else (-1 - slot, parked)

    def _prefill(self, chosen: list[tuple[Sequence, int, int]]) -> int:
        """Start `chosen` as rows; return the number of computed tokens, including padding."""
        first = len(self.running)
        self._pool.ensure(first + len(chosen), max(len(s.context) for s, _, _ in chosen) + 1)
        for row, (sequence, source, cached) in enumerate(chosen, first):
            self._start(sequence, row)
            self._copy_prefix(source, row, cached)
            if not sequence.count:
                self._stats.prompt_tokens += sequence.prompt_len
                self._stats.reused_tokens += cached
        self._supersede(chosen)
        if self._pool.recurrent:
            chosen = [self._prefill_states(first, *chosen[0])]
        width = max(len(sequence.context) - cached for sequence, _, cached in chosen)
        ids = np.zeros((len(chosen), width), np.int64)
        positions = np.full((len(chosen), width), -1, np.int64)
        for index, (sequence, _, cached) in enumerate(chosen):
            tail = len(sequence.context) - cached
            ids[index, width - tail :] = sequence.context[cached:]
            positions[index, width - tail :] = np.arange(cached, len(sequence.context))
        self._forward(first, ids, positions)
        return ids.size

    def _prefill_states(
        self, row: int, sequence: Sequence, source: int, cached: int
    ) -> tuple[Sequence, int, int]:
        """Compute a context but its last token, and keep a copy, which other requests continue.

        Padding would change the states, so no other row is computed with it.
        """
        end = len(sequence.context) - 1
        if end > cached:
            positions = np.arange(cached, end)[None]
            self._logits(row, sequence.context[None, cached:end].astype(np.int64), positions)
            self._park(row, end)
        return sequence, source, end

    def _start(self, sequence: Sequence, row: int) -> None:
        request = sequence.request
        self._rows[row] = (
            *(len(sequence.context), 0, sequence.count),
            *(request.temperature, request.top_p, request.top_k, request.min_p, sequence.seed),
        )
        if self._routers:
            sequence.routes.append(Routes(len(sequence.ids), sequence.count))
        self._running_prefixes.put(row, sequence.context)
        self.running.append(sequence)

    def _copy_prefix(self, source: int, row: int, cached: int) -> None:
        """Copy the first `cached` tokens of what `_find` found to `row`, which is started."""
        if not cached:
            self._pool.clear(row)
            return
        if source >= 0:
            self._pool.move(source, row, cached)
        else:
            self._pool.paste(self._parked[-1 - source].cut, row, cached)
        if self._routers:
            self.running[row].routes[-1].add(self._get_experts(source, cached))

    def _get_experts(self, source: int, length: int) -> Experts:
        """Return the experts of the first tokens of a row, or of parked KV."""
        if source >= 0:
            return self.running[source].routes[-1].get(0, length)
        return cast("Experts", self._parked[-1 - source].experts)[:length]

    def _supersede(self, chosen: list[tuple[Sequence, int, int]]) -> None:
        """Drop parked KV that a running row now has in full; mark other used KV as recent."""
        for slot, cached in {(-1 - source, cached) for _, source, cached in chosen if source < 0}:
            if slot not in self._parked:
                continue
            whole = cached == self._parked_prefixes.length(slot)
            if whole and not self._pool.recurrent:
                self._parked_prefixes.forget(slot)
                del self._parked[slot]
            else:
                self._parked.move_to_end(slot)

    def _decode(self, count: int) -> None:
        rows = self._rows[:count]
        self._pool.ensure(count, int(rows["kv"].max()) + 1)
        self._running_prefixes.extend(np.arange(count), rows["last"])
        positions = rows["kv"][:, None].astype(np.int64)
        rows["kv"] += 1
        self._forward(0, rows["last"][:, None].astype(np.int64), positions)

    def _forward(self, first: int, ids: Matrix, positions: Matrix) -> None:
        """Run the model on rows from `first` and sample one token for each.

        `ids` and `positions` have shape (rows, tokens); padding is on the left, at position -1.
        """
        began = time.perf_counter()
        rows = self._rows[first : first + len(ids)]
        logits = self._logits(first, ids, positions)
        drawn = sample(logits, rows, uniforms(rows["seed"], rows["count"]))
        rows["last"] = drawn.tokens
        rows["count"] += 1
        sequences = self.running[first : first + len(ids)]
        values = zip(drawn.tokens.tolist(), drawn.logprobs.tolist(), drawn.kept, strict=True)
        for sequence, (token, logprob, kept) in zip(sequences, values, strict=True):
            sequence.push(token, logprob, self.version, kept)
            self._updates[sequence] = None
        self._stats.sampled_tokens += len(sequences)
        self._stats.steps += 1
        self._stats.busy_s += time.perf_counter() - began

    def _logits(self, first: int, ids: Matrix, positions: Matrix) -> torch.Tensor:
        device = self._model.device
        dtype = self._model.dtype
        length = int(positions.max()) + 1
        where = torch.from_numpy(positions).to(device)
        seen = where.clamp(min=0)
        hidden = torch.arange(length, device=device) > seen[:, None, :, None]
        mask = torch.zeros(hidden.shape, device=device, dtype=dtype)
        mask.masked_fill_(hidden, torch.finfo(dtype).min)
        self._pool.aim(first, torch.where(where < 0, self._pool.scratch, where), length)
        answer = self._model(
            input_ids=torch.from_numpy(ids).to(device),
            attention_mask=mask,
            position_ids=seen,
            cache=self._pool,
            use_cache=True,
            logits_to_keep=1,
        )
        if self._routers:
            self._add_experts(first, positions)
        logits: torch.Tensor = answer.logits[:, -1]
        return logits

    def _add_experts(self, first: int, positions: Matrix) -> None:
        """Keep the experts of the tokens of a forward pass, which are not those of padding."""
        chosen = read_experts(self._routers)
        computed = chosen.reshape(*positions.shape, *chosen.shape[1:])
        for row, (rows, where) in enumerate(zip(computed, positions, strict=True), first):
            self.running[row].routes[-1].add(rows[where >= 0])

    # ----------------------------------------------------------------- the end of a sequence
    def _retire(self) -> None:
        """Park rows that have ended, and fill their places with the last rows."""
        for row in reversed(range(len(self.running))):
            finish = self.running[row].finish
            if finish is None:
                continue
            self._stats.finished[finish] += 1
            self._park(row, int(self._rows[row]["kv"]))
            last = len(self.running) - 1
            if row != last:
                self._pool.move(last, row, int(self._rows[last]["kv"]))
                self._rows[row] = self._rows[last]
                self._running_prefixes.move(last, row)
                self.running[row] = self.running[last]
            self._running_prefixes.forget(last)
            self.running.pop()

    def _park(self, row: int, length: int) -> None:
        if not self._max_parked or length < SMALLEST_PARKED:
            return
        if len(self._parked) < self._max_parked:
            slot = next(slot for slot in range(self._max_parked) if slot not in self._parked)
        else:
            slot, _ = self._parked.popitem(last=False)
        experts = self._get_experts(row, length).copy() if self._routers else None
        self._parked[slot] = Parked(self._pool.cut(row, length), experts)
        self._parked_prefixes.put(slot, self.running[row].ids[:length])


def _check_weights(model: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> None:
    own = model.state_dict()
    tied = {name for name in own if name in (model.all_tied_weights_keys or {})}
    for name in weights.keys() ^ own.keys():
        if name in weights or name not in tied:
            kind = "does not belong to" if name in weights else "is missing for"
            msg = f"weights: {name!r} {kind} a model of type {model.config.model_type!r}"
            raise UsageError(msg)
    for name, value in weights.items():
        if value.shape != own[name].shape:
            msg = f"weights: {name!r} has shape {tuple(value.shape)}, not {tuple(own[name].shape)}"
            raise UsageError(msg)
