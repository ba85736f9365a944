"""Sessions of Tugline for TRL's `GRPOTrainer`: its `rollout_func`, its reward and its data set.

Each call of TRL publishes the trainer's weights to the engine if they changed, runs one group of
sessions per prompt with the real harness, and returns their exact tokens. The configuration is that
of `tugline train`, except that TRL makes the updates.
"""

import contextlib
import itertools
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from anyio.from_thread import start_blocking_portal
from datasets import Dataset
from msgspec.structs import replace
from trl import GRPOTrainer

from tugline.errors import UsageError
from tugline.exports.forms import drop_experts, drop_sets
from tugline.inference.load import load
from tugline.launch.naming import make_prefix
from tugline.trainers.batches import TaskBatches
from tugline.trainers.config import TrainConfig
from tugline.trainers.engines import make_publisher, open_replicas
from tugline.trainers.grpo.config import GrpoConfig
from tugline.trainers.grpo.hub import write_weights
from tugline.trainers.grpo.samples import read_group
from tugline.trainers.lora import merge_adapter
from tugline.trainers.models import Models, write_model
from tugline.trainers.publish import Publisher
from tugline.trainers.rollouts import RolloutServer, open_rollout_server
from tugline.types import Sample, Task, Trajectory

NO_EXPERTS = "TRL has no form for them; experts=False (--no-experts) trains without"
NO_SETS = (
    "TRL has no form for them; sample without top-p, top-k and min-p, or leave such tokens "
    "untrained with kept=False (--no-kept)"
)


class TuglineSessions:
    """Engine, server and node of a run, and the publication of weights; a context manager."""

    def __init__(
        self,
        config: TrainConfig,
        tasks_folder: Path,
        run_folder: Path,
        *,
        experts: bool = True,
        kept: bool = True,
    ) -> None:
        """`tasks_folder` is the folder of the configuration file; sessions go to `run_folder`.

        Sessions with experts or kept sets, which TRL does not replay, are a `UsageError`. Without
        `experts`, they are trained without; without `kept`, tokens with a set are not trained.
        """
        self._experts, self._kept = experts, kept
        if config.lora is not None:
            msg = "lora is not supported here: use the peft_config of TRL's trainer"
            raise UsageError(msg)
        choose = config.schedule.choose
        if choose != "order":
            msg = f"schedule.choose is {choose!r}, must be 'order' here"
            raise UsageError(msg)
        run_folder.mkdir(parents=True, exist_ok=True)
        self.config, self._folder = config, run_folder
        self.batches = TaskBatches(config, tasks_folder)
        self.batches.run = make_prefix(run_folder)
        served, tokenizer, end_ids = load(config.model or Path(), dtype=torch.float32)
        self.models = Models(self, served, tokenizer, end_ids)
        self.version = -1
        """Version of the engine's weights; -1 before the first publication."""

    def __enter__(self) -> Self:
        """Start engine, server and node, or connect to running ones."""
        with contextlib.ExitStack() as stack:
            self.portal = stack.enter_context(start_blocking_portal())
            opened = self.portal.wrap_async_context_manager(self._open())
            self.server, self._publisher = stack.enter_context(opened)
            known = self.portal.call(self.server.weights).version
            self.version = known or -1  # a version is never used again
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stack.close()

    @contextlib.asynccontextmanager
    async def _open(self) -> AsyncIterator[tuple[RolloutServer, Publisher]]:
        async with (
            open_replicas(self.config, self.models, self._folder) as replicas,
            open_rollout_server(self.config, self._folder, replicas.connection, print) as server,
        ):
            yield server, make_publisher(self.config, server.control, replicas)

    def read_samples(self, group: Sequence[Trajectory], config: GrpoConfig) -> list[Sample]:
        """Return the samples of a group as TRL can train them. Raises `UsageError`."""
        return fit_samples(read_group(group, config), experts=self._experts, kept=self._kept)

    def dataset(self) -> Dataset:
        """Return the tasks; a prompt is a task id, for which the harness makes the messages."""
        return Dataset.from_dict({"prompt": [task.id for task in self.batches.trained]})

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return the trainer's full weights, by the names of the model without an adapter."""
        raise NotImplementedError

    def write_weights(self, folder: Path, dtype: str | None) -> None:
        """Write the weights to serve into `folder`, in the names of the model's folder."""
        weights, model = self.weights(), self.config.model
        write_weights(folder, self.models.served, weights, weights.items(), model, dtype)

    def publish(self) -> None:
        """Load the trainer's weights into every replica, and announce the next version."""
        self.version += 1
        with tempfile.TemporaryDirectory(dir=self._folder, prefix="weights-") as name:
            if self.config.engine.urls:
                write_model(self.config, self.models, Path(name))
            self.portal.call(self._publisher.publish, Path(name).absolute(), self.version)


class TuglineRollouts(TuglineSessions):
    """`rollout_func` of a `GRPOTrainer` in one process."""

    def __init__(
        self, config: TrainConfig, tasks_folder: Path, run_folder: Path, **options: bool
    ) -> None:
        super().__init__(config, tasks_folder, run_folder, **options)
        self._tasks = {task.id: task for task in self.batches.trained}
        self._step, self._calls = -1, itertools.count()
        self.tokens_left_out = 0
        """Trained tokens without a row: TRL has one row per session, for its longest trace."""

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return the trainer's weights, with the adapter of PEFT merged."""
        return merge_adapter(self._trainer.accelerator.unwrap_model(self._trainer.model))

    def __call__(self, prompts: Sequence[str], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        """Run a group for each prompt, which TRL repeats once per session."""
        if trainer.accelerator.num_processes > 1:
            msg = (
                "this recipe supports one process of TRL; `torchrun tugline train` supports several"
            )
            raise UsageError(msg)
        self._trainer, training = trainer, trainer.model.training
        if trainer.state.global_step != self._step:
            self.publish()
            self._step, self._calls = trainer.state.global_step, itertools.count()
        size = trainer.num_generations if training else trainer.num_generations_eval
        run = f"{'step' if training else 'eval'}{self._step:06d}.{next(self._calls)}"
        tasks = [
            replace(self.batches.make(f"{run}.{i}", self._tasks[name], f"{run}.{i}"), samples=size)
            for i, name in enumerate(prompts[::size])
        ]
        results = self.portal.call(self.server.run, tasks, lambda _done, _total: None)
        rows = [row for task in tasks for row in self._make_rows(task, results)]
        return {name: [row[name] for row in rows] for name in rows[0]}

    def _make_rows(self, task: Task, results: Sequence[Trajectory]) -> list[dict[str, Any]]:
        """Return a row for every sample of a task, failed ones included."""
        group = {one.sample: one for one in results if one.task == task.id}
        samples = self.read_samples(list(group.values()), GrpoConfig())
        samples.sort(key=lambda sample: sample.trained)
        longest = {sample.session: sample for sample in samples}
        self.tokens_left_out += sum(
            sample.trained for sample in samples if sample is not longest[sample.session]
        )
        end_id = min(self.models.eos_ids)
        return [make_row(group.get(i), longest, end_id) for i in range(task.samples)]


def fit_samples(samples: Iterable[Sample], *, experts: bool, kept: bool) -> list[Sample]:
    """Return samples without experts and kept sets, if they have tokens to train.

    Raises `UsageError` for experts if `experts` is set, and for tokens with a kept set if `kept`
    is; these are not trained otherwise.
    """
    routed = [drop_experts(each, refuse=NO_EXPERTS if experts else None) for each in samples]
    fitted = [drop_sets(each, refuse=NO_SETS if kept else None) for each in routed]
    return [each for each in fitted if each.trained]


def make_row(
    session: Trajectory | None, samples: Mapping[str, Sample], end_id: int
) -> dict[str, Any]:
    """Return the columns of a session; the completion begins with the first sampled token.

    A session without a sample has no trained token, but counts for its group if it has a reward.
    """
    reward = session.reward.value if session is not None and session.reward else None
    sample = samples.get(session.session) if session is not None else None
    if sample is None:
        prompt, completion, mask, logprobs = [end_id], [end_id], [0], [0.0]
    else:
        first = int(np.argmax(sample.versions >= 0))
        prompt = sample.input_ids[:first].tolist()
        completion = sample.input_ids[first:].tolist()
        mask = sample.loss_mask[first:].astype(int).tolist()
        logprobs = sample.logprobs[first:].tolist()
    return {
        "prompt_ids": prompt,
        "completion_ids": completion,
        "env_mask": mask,
        "logprobs": logprobs,
        "tugline_reward": reward,
    }


def reward(tugline_reward: list[float | None], **_: Any) -> list[float | None]:
    """Return the rewards; None for failures that do not count for the policy."""
    return tugline_reward
