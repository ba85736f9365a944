"""Sessions of Tugline for TRL's `AsyncGRPOTrainer`: its rollout worker and its weight transfer.

Groups are sampled while TRL trains. They are delivered in the order of their start, so that long
tasks are not delayed. A new group starts only while few are waiting, so that TRL does not have to
discard old ones.
"""

import asyncio
import itertools
import queue
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
from tugline_trl import TuglineSessions

from tugline.errors import EngineError
from tugline.trainers.config import TrainConfig
from tugline.types import Trajectory

_POLL_S = 0.1
"""Seconds between two checks of how much TRL has consumed."""


class TuglineWorker(TuglineSessions):
    """`rollout_worker` and `weight_transfer` of one `AsyncGRPOTrainer`."""

    def __init__(
        self, config: TrainConfig, tasks_folder: Path, run_folder: Path, **options: bool
    ) -> None:
        super().__init__(config, tasks_folder, run_folder, **options)
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self._weights: dict[str, torch.Tensor] = {}
        self._offset = 0
        self._progress = time.monotonic()

    # ------------------------------------------------------------------ WeightTransferProtocol
    def init_weight_transfer(self) -> None:
        """Do nothing: engine and server are running already."""

    def pause(self) -> None:
        """Do nothing: publishing pauses by itself."""

    resume = destroy = pause

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Publish weights. Raises `EngineError` at the deadline of a replica."""
        self._weights = dict(iterator)
        if self.models.served.config.tie_word_embeddings:
            self._weights["lm_head.weight"] = self._weights["model.embed_tokens.weight"]
        self.publish()
        self._weights = {}

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return the weights that TRL is sending."""
        return self._weights

    # ------------------------------------------------------------------ RolloutWorkerProtocol
    def start(self) -> None:
        """Start sampling; TRL has sent its first weights."""
        self._running = self.portal.start_task_soon(self._produce)

    def stop(self) -> None:
        """Stop sampling; the next run in this folder continues the running sessions."""
        self._running.cancel()

    def update_model_version(self, model_version: int) -> None:
        """Record TRL's number of the version published last."""
        self._offset = model_version - self.version

    def check_health(self, stale_after_s: float) -> None:
        """Raise the error that stopped sampling, or `EngineError` if no group finishes in time."""
        if self._running.done():
            self._running.result()
        if time.monotonic() - self._progress > stale_after_s:
            msg = f"no group of sessions was finished within {stale_after_s:g} s"
            raise EngineError(msg)

    async def _produce(self) -> None:
        """Keep groups running, and deliver them in the order of their start."""
        schedule = self.config.schedule
        limit = (schedule.staleness + 1) * schedule.tasks_per_step * schedule.samples
        chosen = ((number, self.batches.choose(number, {})) for number in itertools.count(1))
        tasks = (task for step in chosen for task in self.batches.batch(*step))
        pending: deque[asyncio.Task[list[Trajectory]]] = deque()
        groups = itertools.count()
        async with asyncio.TaskGroup() as running:
            while True:
                while len(pending) * schedule.samples + self.rollout_buffer.qsize() < limit:
                    sessions = self.server.run([next(tasks)], lambda _done, _total: None)
                    pending.append(running.create_task(sessions))
                if pending and pending[0].done():
                    self.hand_over(pending.popleft().result(), next(groups))
                elif pending:
                    await asyncio.wait([pending[0]], timeout=_POLL_S)
                else:
                    await asyncio.sleep(_POLL_S)

    def hand_over(self, group: Sequence[Trajectory], number: int) -> None:
        """Queue a row for each trace, except for groups without a signal, which train nothing."""
        self._progress = time.monotonic()
        for sample in self.read_samples(group, self.config.grpo):
            trained = sample.loss_mask
            if not sample.advantages.any():
                continue
            row = RolloutSample(
                prompt=[],
                completion=[],
                input_ids=sample.input_ids,
                completion_mask=trained.astype(np.int64),
                old_log_probs=sample.logprobs,
                advantage=float(sample.advantages[trained][0]),
                model_version=int(sample.versions[trained].min()) + self._offset,
                group_id=number,
                metrics={"reward": sample.reward} | sample.reward_parts,
                enqueued_at=time.time(),
            )
            self.rollout_buffer.put(row)
