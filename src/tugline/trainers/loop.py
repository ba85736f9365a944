"""The training loop: sample groups, update the policy, publish it, evaluate; resume after a kill.

Step n trains on batch n. With staleness bound s, batch n + s is submitted once the weights of step
n - 1 are published; its tasks are chosen from the results of the steps until then. So at most s + 1
batches are submitted and not yet trained, no token is older than s versions, and no finished group
is discarded. Batches are trained in the order of submission, so long tasks are not postponed. With
s = 0, sampling and training alternate. With `schedule.refill` a step adds further groups to its
batch, see `tugline.trainers.groups`.

Order of writes (I3). A session is done once its result is in the store, a step once a checkpoint of
it or of a later step has been renamed into place. Checkpoints are written in the background, after
the weights have been published. A resumed run loads the newest one, which names the tasks of the
next batches, reads the results of their finished sessions from the store and runs the others: no
prompt is skipped or trained on twice, and a kill costs the training since the checkpoint, but no
session. A repeated step has the same results, and so the same next tasks. Version numbers are never
reused: if weights were published after the checkpoint, its weights get a new number.
"""

import asyncio
import contextlib
import shutil
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from tugline import log
from tugline.estimates import Comparison
from tugline.launch.folder_lock import folder_lock
from tugline.launch.garbage import freeze_gc
from tugline.launch.naming import make_prefix
from tugline.traces.base import sum_ledgers
from tugline.trainers.batches import TaskBatches
from tugline.trainers.config import CHECKPOINTS, MODEL, TrainConfig, store_config
from tugline.trainers.cost import CostMeter, count_solved
from tugline.trainers.engines import Replicas, ServedWeights, make_publisher, open_replicas
from tugline.trainers.evaluation import (
    VersionScore,
    compare,
    evaluate,
    format_estimate,
    read_attempts,
)
from tugline.trainers.groups import GroupSampler, StepGroups
from tugline.trainers.grpo import checkpoint
from tugline.trainers.grpo.train import StepReport
from tugline.trainers.metrics import (
    RolloutFigures,
    TrainState,
    TrainSummary,
    describe_replay,
    find_alarms,
    flatten,
)
from tugline.trainers.models import Models, model_folder, open_models, write_weights
from tugline.trainers.patience import summarize_failures
from tugline.trainers.progress import RunProgress
from tugline.trainers.proof import Probe
from tugline.trainers.rollouts import RolloutServer, open_rollout_server
from tugline.trainers.sinks import FAILED, ServerSink, Sinks
from tugline.trainers.supervised import SupervisedRows, read_supervised

_PROBE_IDS = 1024


class _Learned(NamedTuple):
    """Results of a training step."""

    report: StepReport
    rollout: RolloutFigures
    probe: Probe | None
    seconds: float


async def train(
    config: TrainConfig,
    batches: TaskBatches,
    folder: Path,
    sinks: Sinks,
    progress: RunProgress,
    *,
    console: bool = False,
) -> TrainSummary:
    """Train to the end in `folder`, from its newest checkpoint, observed by `progress`.

    With `console`, the console of a server in this process is served. It may be cancelled or killed
    at any point and called again. Raises `TuglineError`.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(folder_lock(folder, instead="choose another --out"))
        supervised = read_supervised(config)
        store_config(folder, config)
        supervised.store(folder)
        published = config.weights_folder(folder)
        shutil.rmtree(published, ignore_errors=True)  # of a run that was killed
        batches.store(folder)
        batches.run = make_prefix(folder) if config.server is not None else ""
        for line in await asyncio.to_thread(batches.list_weaknesses):
            progress.report(line)
        progress.begin_phase("loading the model")
        models = stack.enter_context(open_models(config))
        progress.report(f"packing: {models.trainer.packing}")
        state = checkpoint.load_newest(folder / CHECKPOINTS, models.trainer.load, TrainState())
        async with (
            open_replicas(config, models, published / "first") as replicas,
            open_rollout_server(
                config, folder, replicas.connection, progress.report, console=console
            ) as server,
        ):
            sinks = Sinks([sinks, ServerSink(server.report_step)])
            sinks.start(folder, msgspec.to_builtins(config, enc_hook=str), state.step)
            try:
                freeze_gc()
                loop = TrainingLoop(
                    config,
                    batches,
                    folder,
                    models,
                    replicas,
                    server,
                    state,
                    sinks,
                    progress,
                    supervised,
                )
                return await loop.run()
            finally:
                # It waits for reports, which this event loop sends.
                await asyncio.to_thread(sinks.close)


@dataclass(eq=False)
class TrainingLoop:
    """The steps of a run, with its models, replicas and server open."""

    config: TrainConfig
    batches: TaskBatches
    folder: Path
    models: Models
    replicas: Replicas
    server: RolloutServer
    state: TrainState
    sinks: Sinks
    progress: RunProgress
    supervised: SupervisedRows
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    def __post_init__(self) -> None:
        self._schedule = self.config.schedule
        self._trainer = self.models.trainer
        self._served = ServedWeights(
            self.config,
            self.models,
            make_publisher(self.config, self.server.control, self.replicas),
            self.config.weights_folder(self.folder),
            self.progress.report,
        )
        self._began = time.monotonic()
        self._saved = self._began
        self._earlier_s = self.state.elapsed_s
        self._cost = CostMeter(self.config.prices, self.state.cost)
        self._groups = GroupSampler(
            self.config, self.batches, self.folder, self.server, self.progress, self.sleep
        )
        self.state = self._groups.choose(self.state)
        # malloc keeps freed memory per thread, so all steps run in the same thread
        self._learner = ThreadPoolExecutor(1, "learner")
        self._evaluation: asyncio.Task[None] | None = None
        self._step_s = 0.0

    async def run(self) -> TrainSummary:
        """Publish the first weights, and run the remaining steps and evaluations."""
        restoring = log.start_task(self._served.restore_replicas(), "restore-replicas")
        try:
            await self._publish_first()
            self._start_evaluation()
            minutes = self._schedule.minutes
            limit_s = None if minutes is None else max(0.0, 60 * minutes - self._elapsed_s())
            self.progress.start(self._schedule.steps, self.state.step, limit_s)
            while self.state.step < self._schedule.steps and not self._is_out_of_time():
                await self._step()
                self._start_evaluation()
            self._start_evaluation(last=True)
            await self._finish_evaluation()
        finally:
            restoring.cancel()
            if self._evaluation is not None:
                self._evaluation.cancel()
            shutil.rmtree(self.config.weights_folder(self.folder), ignore_errors=True)
            self._learner.shutdown(wait=False)
        await asyncio.to_thread(self._save)
        await asyncio.to_thread(self._write_result)
        await asyncio.to_thread(self._trainer.finish_saving)
        self.state = replace(self.state, elapsed_s=self._elapsed_s(), cost=self._cost.total)
        return TrainSummary(state=self.state, change=await self._compare_scores())

    async def _publish_first(self) -> None:
        """Load the weights of the checkpoint into every replica."""
        known = (await self.server.weights()).version
        if known > self.state.version:
            self.state = replace(self.state, version=known + 1)
        self.progress.begin_phase(f"loading version {self.state.version} into the engine")
        await self._served.publish(self.state.version, await self._make_first_probe())

    async def _make_first_probe(self) -> Probe | None:
        """Return a probe of the next tasks' instructions, which these weights leave as they are.

        It shows whether an engine loads weights rightly before anything is sampled.
        """
        tasks = self._groups.list_batch(self.state, self.state.step + 1)
        text = "\n\n".join(task.instruction for task in tasks)
        ids = np.array(self.models.tokenizer.encode(text)[:_PROBE_IDS], np.int32)
        if len(ids) < 2:
            return None
        event_loop = asyncio.get_running_loop()
        logprobs = await event_loop.run_in_executor(self._learner, self._trainer.score, ids)
        return Probe(ids, logprobs, logprobs)

    # ----------------------------------------------------------------------- a step
    async def _step(self) -> None:
        """Train on the next batch, as described in the module."""
        began = time.monotonic()
        number = self.state.step + 1
        version = self.state.version
        await self._groups.submit(self.state)
        groups = await self._groups.collect(self.state)
        wait_s = time.monotonic() - began
        self.progress.begin_phase(f"step {number}, updating the policy")
        event_loop = asyncio.get_running_loop()
        learned = await event_loop.run_in_executor(self._learner, self._learn, groups)
        figures = flatten(learned.rollout, "rollout") | flatten(learned.report, "update")
        # Figures by version are left out: every step would add new names.
        lasting = {name: value for name, value in figures.items() if "/by_version/" not in name}
        await self._finish_evaluation()  # it needs the weights that are still served
        self.sinks.log(number, {"version": float(version)} | lasting)
        self._count(learned, groups)
        self._cost.add_sessions(groups.results)
        publication = await self._served.publish(self.state.version, learned.probe)
        self._step_s = time.monotonic() - began
        spent = {"wait_s": wait_s, "train_s": learned.seconds, "step_s": self._step_s}
        times = {f"time/{name}": seconds for name, seconds in spent.items()}
        if learned.rollout.failed:
            self.sinks.note(number, FAILED, summarize_failures(groups.results))
        replay = describe_replay(learned.report)
        if replay is not None:
            self.sinks.note(number, "replay", replay)
        cost = self._cost.report(self.state.solved)
        self.sinks.log(number, flatten(publication, "publish") | cost | times)
        for name, text in find_alarms(
            learned.rollout, learned.report, publication, self.state.entropies
        ).items():
            self.sinks.alarm(number, name, text)
        if self._is_checkpoint_due():
            await asyncio.to_thread(self._save)
        self.progress.finish_step()

    def _learn(self, groups: StepGroups) -> _Learned:
        began = time.monotonic()
        version = self.state.version
        rollout = groups.measure(version, self.config)
        traces = [trace for result in groups.results for trace in result.traces if trace.mask.any()]
        longest = max(traces, key=lambda trace: trace.trained, default=None)
        ids = None if longest is None else longest.ids[:_PROBE_IDS]
        before = None if ids is None else self._trainer.score(ids)
        supervised = self.supervised.choose(self.state.step + 1)
        report = self._trainer.step(groups.results, version, supervised)
        probe = None
        if ids is not None and before is not None:
            probe = Probe(ids, before, self._trainer.score(ids))
        return _Learned(report, rollout, probe, time.monotonic() - began)

    def _count(self, learned: _Learned, groups: StepGroups) -> None:
        """Add a trained step to the totals, and choose the tasks of another batch."""
        done = self.state
        report = learned.report
        rollout = learned.rollout
        known = () if rollout.entropy is None else (rollout.entropy,)
        rates = self.batches.update_rates(done.pass_rates, groups.numbers, groups.results)
        counted = replace(
            done,
            step=done.step + 1,
            version=done.version + 1,
            pass_rates=rates,
            ledger=sum_ledgers([done.ledger, report.ledger]),
            sessions=done.sessions + len(groups.results),
            failed=done.failed + rollout.failed,
            solved=done.solved + count_solved(groups.results),
            updates=done.updates + report.updates,
            tokens_forwarded=done.tokens_forwarded + report.tokens_forwarded,
            training_s=done.training_s + report.seconds,
            entropies=(*done.entropies, *known),
        )
        self.state = self._groups.choose(counted, groups.rounds[-1].end)

    def _is_checkpoint_due(self) -> bool:
        every = self._schedule.checkpoint_every
        if every is not None:
            return self.state.step % every == 0
        return time.monotonic() - self._saved >= 60 * self._schedule.checkpoint_minutes

    def _save(self) -> None:
        """Begin to save a checkpoint, or update the state in the existing one of the step."""
        self._saved = time.monotonic()
        self._trainer.finish_saving()
        folder = self.folder / CHECKPOINTS
        state = replace(self.state, elapsed_s=self._elapsed_s(), cost=self._cost.total)
        path = checkpoint.path_of(folder, state.step)
        extra = msgspec.to_builtins(state, str_keys=True)
        if path.exists():  # for later results, such as an evaluation
            checkpoint.update(path, version=state.version, extra=extra)
        else:
            self._trainer.save(folder, state.step, state.version, extra, self._schedule.keep)

    def _write_result(self) -> None:
        """Write the trained model as a folder that every engine can serve."""
        with model_folder(self.config.model or Path(), self.folder / MODEL) as draft:
            write_weights(self.config, self.models, draft)

    # ----------------------------------------------------------------------- evaluation
    def _start_evaluation(self, *, last: bool = False) -> None:
        """Start evaluating the published weights if an evaluation is due and not done."""
        plan = self.config.heldout
        step = self.state.step
        known = any(score.step == step for score in self.state.scores)
        due = plan is not None and (last or step % plan.every == 0)
        if due and not known and self._evaluation is None:
            self._evaluation = asyncio.create_task(self._evaluate(), name="evaluation")

    async def _finish_evaluation(self) -> None:
        if self._evaluation is not None:
            await self._evaluation
            self._evaluation = None

    async def _evaluate(self) -> None:
        began = time.monotonic()
        step = self.state.step
        version = self.state.version
        tasks = self.batches.evaluation(version)
        await self._groups.start(tasks)
        results = await self._groups.run(tasks, f"held out, step {step}")
        self._cost.add_sessions(results)
        sampled_by = [
            {span.version for trace in result.traces for span in trace.spans} for result in results
        ]
        score = VersionScore(
            step=step,
            version=version,
            evaluation=evaluate(read_attempts(results), k=self.batches.samples),
            mixed=sum(not versions <= {version} for versions in sampled_by),
            sampled=sum(result.ledger.sampled for result in results),
            seconds=time.monotonic() - began,
        )
        self.state = replace(self.state, scores=(*self.state.scores, score))
        self.sinks.log(step, flatten(score.evaluation, "heldout") | {"heldout/version": version})
        rates = [f"pass@{k} {format_estimate(e)}" for k, e in score.evaluation.pass_at.items()]
        self.sinks.note(step, "held out", "  ".join(rates))

    async def _compare_scores(self) -> Comparison | None:
        """Compare the last evaluation with the first."""
        scores = self.state.scores
        if len(scores) < 2:
            return None
        ends = []
        for score in (scores[0], scores[-1]):
            tasks = [task.id for task in self.batches.evaluation(score.version)]
            ends.append(read_attempts(await self.server.load_results(tasks)))
        return compare(ends[1], ends[0])

    # ----------------------------------------------------------------------- time
    def _elapsed_s(self) -> float:
        return self._earlier_s + time.monotonic() - self._began

    def _is_out_of_time(self) -> bool:
        """Whether one more step would leave too little time for the last evaluation."""
        if self._schedule.minutes is None:
            return False
        evaluation_s = self.state.scores[-1].seconds if self.state.scores else 0.0
        ahead_s = self._step_s + evaluation_s
        return self._elapsed_s() + ahead_s > 60 * self._schedule.minutes
