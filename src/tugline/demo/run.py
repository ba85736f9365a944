"""The demo: evaluate, train, evaluate again, resumable at any point.

A killed run can be resumed because of the order of writes (I3). A session counts once its result is
committed to the store; a step counts once its checkpoint is renamed into place, and the checkpoint
has every number of the run so far. ``--resume`` loads the newest checkpoint, asks the store for the
sessions of the interrupted step, and runs the missing ones. ``metrics.jsonl`` is written from the
checkpoint's numbers and never read.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
import yaml
from msgspec.structs import replace

from tugline import log
from tugline.config import load
from tugline.demo import tasks
from tugline.demo.live import ProgressDisplay
from tugline.demo.metrics import BuilderCost, RunSummary, Score, Step
from tugline.demo.report import picture
from tugline.demo.rig import Rig, describe, failed, load_policy, rig, sampled
from tugline.demo.settings import DemoSettings
from tugline.errors import UsageError
from tugline.harnesses.base import Harness
from tugline.inference.engine import Engine
from tugline.launch.server import folder_lock
from tugline.plugins import find
from tugline.rollout.parts import Parts
from tugline.traces.base import sum_ledgers
from tugline.trainers.grpo import checkpoint
from tugline.trainers.grpo.config import GrpoConfig
from tugline.trainers.grpo.train import Grpo, StepReport
from tugline.types import Call, Ledger, Reason, Trajectory

_log = log.get("demo")

TRAIN_THREADS = 2
ENGINE_THREADS = 1
"""One is fastest for a tiny model beside agents that want the other core."""
BUILDERS = ("per_request", "prefix_merging")
"""Builders compared at the end."""
SETTINGS = "settings.yaml"
PICTURE = "learning.png"
SUMMARY = "summary.json"
METRICS = "metrics.jsonl"


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """All numbers of a run so far; part of every checkpoint."""

    rows: tuple[Step, ...] = ()
    ledger: Ledger = Ledger()
    """Of the training sessions."""
    tokens_forwarded: int = 0
    training_s: float = 0.0
    sessions: int = 0
    failed: int = 0
    evaluation_s: float = 0.0
    """Duration of one evaluation on the held-out tasks, seconds."""
    elapsed_s: float = 0.0
    """Wall clock up to the checkpoint, over all processes of the run."""


@dataclass
class Demo:
    """One run in `folder`; `live` shows its progress."""

    settings: DemoSettings
    folder: Path
    live: ProgressDisplay
    progress: Progress = field(default_factory=Progress)
    earlier_s: float = 0.0
    """Wall clock of earlier processes of the run, seconds."""
    began: float = field(default_factory=time.monotonic)

    async def run(self) -> RunSummary:
        """Run every phase not done yet. Raises `TuglineError`; may be cancelled and run again."""
        with folder_lock(self.folder, instead="choose another --out"):
            _store_settings(self.folder, self.settings)
            self.live.phase("loading the policy")
            policy = load_policy()
            trainer = Grpo(policy.model, self._grpo())
            self._resume(trainer)
            engine = Engine(
                copy.deepcopy(policy.model),
                eos_ids=policy.eos_ids,
                max_model_len=self.settings.window,
                max_running=2 * self.settings.slots,
                version=len(self.progress.rows),
                threads=ENGINE_THREADS,
            )
            slots, port = self.settings.slots, self.settings.port
            async with (
                engine,
                rig(engine, policy.tokenizer, self.folder, slots=slots, port=port) as up,
            ):
                return await self._run_phases(up, engine, trainer)

    async def _run_phases(self, up: Rig, engine: Engine, trainer: Grpo) -> RunSummary:
        harness = Parts().harness(tasks.harness_spec(self.settings))
        self.live.phase(f"installing {harness.name}")
        await harness.install()
        before = await self._evaluate_before(up)
        for number in range(len(self.progress.rows) + 1, self.settings.steps + 1):
            if self._out_of_time():
                break
            await self._step(number, up, engine, trainer)
        after = await self._evaluate(up, "after")
        summary = await self._summarize(up, trainer, harness, before, after)
        text = msgspec.json.format(msgspec.json.encode(summary.to_dict()))
        (self.folder / SUMMARY).write_bytes(text + b"\n")
        picture(self.progress.rows, summary, self.folder / PICTURE)
        return summary

    # ----------------------------------------------------------------------- phases
    async def _evaluate_before(self, up: Rig) -> list[Trajectory]:
        """Evaluate the start policy, unless that was done already."""
        held_out = tasks.heldout_tasks(self.settings, "before")
        if self.progress.rows:
            return await up.cluster.load_results([task.id for task in held_out])
        self.live.phase(f"one {self.settings.harness} session as a check")
        await up.run(held_out[:1], lambda _done, _total: None)
        return await self._evaluate(up, "before")

    async def _evaluate(self, up: Rig, name: str) -> list[Trajectory]:
        self.live.phase(f"held-out tasks, {name} training")
        began = time.monotonic()
        results = await up.run(tasks.heldout_tasks(self.settings, name), self.live.sessions)
        took = time.monotonic() - began
        self.progress = msgspec.structs.replace(self.progress, evaluation_s=took)
        return results

    async def _step(self, number: int, up: Rig, engine: Engine, trainer: Grpo) -> None:
        """Sample groups, update the policy, swap the weights, save a checkpoint."""
        began, busy = time.monotonic(), engine.stats().busy_s
        self.live.phase(f"step {number}")
        results = await up.run(tasks.training_tasks(self.settings, number), self.live.sessions)
        rollout_s = max(time.monotonic() - began, 1e-9)
        engine_busy = (engine.stats().busy_s - busy) / rollout_s
        self.live.phase(f"step {number}: updating the policy")
        report = await asyncio.to_thread(_learn, trainer, results, number - 1)
        await engine.swap(trainer.model.state_dict(), number)
        row = Step(
            step=number,
            reward=_mean([one.reward.value for one in results if one.reward]),
            pass_rate=_score(results).rate,
            tokens=sampled(results),
            ledger=report.ledger,
            sessions_per_s=len(results) / rollout_s,
            engine_busy=engine_busy,
            updates=report.updates,
            max_abs_dlogprob=report.mismatch.total.max_abs if report.mismatch else None,
            seconds=time.monotonic() - began,
        )
        self._save(row, results, report, trainer)
        self.live.row(row)

    def _save(
        self, row: Step, results: Sequence[Trajectory], report: StepReport, trainer: Grpo
    ) -> None:
        done = self.progress
        self.progress = msgspec.structs.replace(
            done,
            rows=(*done.rows, row),
            ledger=sum_ledgers([done.ledger, report.ledger]),
            tokens_forwarded=done.tokens_forwarded + report.tokens_forwarded,
            training_s=done.training_s + report.seconds,
            sessions=done.sessions + len(results),
            failed=done.failed + failed(results),
            elapsed_s=self._elapsed_s(),
        )
        extra = msgspec.to_builtins(self.progress)
        folder = self.folder / "checkpoints"
        checkpoint.save(folder, trainer, step=row.step, version=row.step, extra=extra, keep=2)
        self._write_metrics()
        _log.info("step", **msgspec.to_builtins(row))

    async def _summarize(
        self,
        up: Rig,
        trainer: Grpo,
        harness: Harness,
        before: Sequence[Trajectory],
        after: Sequence[Trajectory],
    ) -> RunSummary:
        self.live.phase("the same sessions with each builder")
        done = self.progress
        last = [task.id for task in tasks.training_tasks(self.settings, len(done.rows))]
        results, recorded = await up.cluster.load_results(last), await up.recorded(last)
        costs = await asyncio.to_thread(compare_builders, results, recorded, trainer)
        measured = [*before, *after]
        held_out = sampled(measured)
        return RunSummary(
            before=_score(before),
            after=_score(after),
            seed=self.settings.seed,
            steps=len(done.rows),
            updates=sum(row.updates for row in done.rows),
            sessions=done.sessions + len(measured),
            failed_sessions=done.failed + failed(measured),
            ledger=sum_ledgers(
                [done.ledger, Ledger(held_out, dropped={Reason.HELD_OUT: held_out})]
            ),
            tokens_forwarded=done.tokens_forwarded,
            training_s=done.training_s,
            max_abs_dlogprob=max(
                (row.max_abs_dlogprob for row in done.rows if row.max_abs_dlogprob is not None),
                default=None,
            ),
            seconds=self._elapsed_s(),
            harness=harness.name,
            harness_version=harness.version or "",
            model=describe(trainer.model),
            builder=self.settings.builder,
            builders=costs,
        )

    # ----------------------------------------------------------------------- time and files
    def _grpo(self) -> GrpoConfig:
        return replace(self.settings.grpo, seed=self.settings.seed)

    def _elapsed_s(self) -> float:
        return self.earlier_s + time.monotonic() - self.began

    def _out_of_time(self) -> bool:
        """Whether one more step would leave too little time for the evaluation."""
        rows = self.progress.rows
        step_s = max((row.seconds for row in rows[-3:]), default=0.0)
        ahead_s = step_s + self.progress.evaluation_s
        return bool(rows) and self._elapsed_s() + ahead_s > 60 * self.settings.minutes

    def _resume(self, trainer: Grpo) -> None:
        latest = checkpoint.latest(self.folder / "checkpoints")
        if latest is not None:
            state = checkpoint.load(latest, trainer)
            self.progress = msgspec.convert(state.extra, Progress)
            self.earlier_s = self.progress.elapsed_s
            for row in self.progress.rows:
                self.live.row(row)
        self._write_metrics()

    def _write_metrics(self) -> None:
        """Rewrite all rows, so that a crash leaves none twice or incomplete."""
        draft = self.folder / f"{METRICS}.part"
        draft.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in self.progress.rows))
        draft.replace(self.folder / METRICS)


def _store_settings(folder: Path, settings: DemoSettings) -> None:
    """Store the run's settings. Raises `UsageError` if the folder belongs to another run."""
    file = folder / SETTINGS
    if not file.exists():
        draft = file.with_suffix(".part")
        draft.write_text(yaml.safe_dump(msgspec.to_builtins(settings), sort_keys=False))
        draft.replace(file)
    elif load(file, DemoSettings) != settings:
        msg = f"{folder} holds a run with other settings (see {SETTINGS}); choose another --out"
        raise UsageError(msg)


def _learn(trainer: Grpo, results: Sequence[Trajectory], version: int) -> StepReport:
    torch.set_num_threads(TRAIN_THREADS)
    return trainer.step(results, version=version)


def _score(results: Sequence[Trajectory]) -> Score:
    """Count the sessions that solved their task; failed ones did not."""
    return Score(
        sum(one.reward is not None and one.reward.value >= 1 for one in results), len(results)
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def compare_builders(
    trajectories: Sequence[Trajectory], calls: Mapping[str, Sequence[Call]], trainer: Grpo
) -> tuple[BuilderCost, ...]:
    """Measure one training step per builder on the same sessions (arXiv 2605.24220).

    Recorded calls are built anew with every builder, and a copy of the policy takes one step on
    each result: the same tokens are trained, what differs is how often their context is computed.
    `trainer` and its model stay unchanged.
    """
    return tuple(_measure_builder(name, trajectories, calls, trainer) for name in BUILDERS)


def _measure_builder(
    name: str,
    trajectories: Sequence[Trajectory],
    calls: Mapping[str, Sequence[Call]],
    trainer: Grpo,
) -> BuilderCost:
    builder = find("builder", name)()
    rebuilt = []
    for trajectory in trajectories:
        if trajectory.session in calls:
            traces, ledger, _ = builder.build(calls[trajectory.session])
            rebuilt.append(msgspec.structs.replace(trajectory, traces=traces, ledger=ledger))
    scratch = Grpo(copy.deepcopy(trainer.model), trainer.config)
    report = scratch.step(rebuilt, version=0)
    return BuilderCost(
        builder=name,
        sessions=len(rebuilt),
        traces=sum(len(one.traces) for one in rebuilt),
        updates=report.updates,
        tokens_trained=report.tokens_trained,
        tokens_forwarded=report.tokens_forwarded,
        seconds=report.seconds,
    )
