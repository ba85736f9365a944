"""Supervised fine-tuning on conversations, such as those of a stronger model.

The updates are those of GRPO, with another loss: the negative log likelihood of the assistant's
tokens, averaged over the tokens of an update. Data sets have exact token ids and their mask, or
messages, which are rendered with the model's chat template. The order of sessions depends only on
the seed, so the position in the data is the number of updates; a killed run continues from its
newest checkpoint.
"""

import contextlib
import hashlib
import json
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
from msgspec import Meta
from msgspec.structs import replace

from tugline.chat.dialects.openai_chat import parse_conversation
from tugline.chat.templates.rendering import Rendering
from tugline.chat.tokenizer import Tokenizer
from tugline.config import NO_CHANGES, Config, load
from tugline.datasets.rows import read_rows
from tugline.errors import ConfigError, RequestError, UsageError
from tugline.launch.engine import make_rendering
from tugline.launch.folder_lock import folder_lock
from tugline.launch.settings import EngineSettings
from tugline.schema import PositiveFloat, PositiveInt
from tugline.trainers.config import CHECKPOINTS, MODEL, Lora, store_config
from tugline.trainers.grpo import checkpoint
from tugline.trainers.grpo.batch import MicroBatch, Row, plain_sample
from tugline.trainers.grpo.config import UpdateConfig
from tugline.trainers.grpo.distributed import add_up, gather, join_ranks
from tugline.trainers.grpo.forward import TokenLoss
from tugline.trainers.grpo.hub import get_base_model
from tugline.trainers.grpo.update import Update, Updater
from tugline.trainers.lora import write_trained
from tugline.trainers.models import Placement, load_model, model_folder, name_draft
from tugline.trainers.progress import RunProgress
from tugline.trainers.sinks import Sinks
from tugline.types import Ids, Mask, PluginSpec, Sample

TRACES = "traces.parquet"
CONVERSATIONS = "conversations.jsonl"
"""Files in a folder written by `tugline generate`."""
_MASKS = ("loss_mask", "completion_mask")
Share = Annotated[float, Meta(ge=0, le=1)]


class SftConfig(UpdateConfig, frozen=True):
    """Settings of updates from conversations."""

    lr: PositiveFloat = 1e-5
    """Peak learning rate of AdamW, reached after the warm-up."""
    final_lr: Share = 0.1
    """Learning rate at the end of the decay, which is the end of the run, as a share of `lr`."""
    epochs: PositiveInt = 2
    """Passes over the data."""


class SftRunConfig(Config, frozen=True, kw_only=True):
    """A run of ``tugline sft``. Relative paths, except `out`, are relative to the file."""

    model: Path
    """Hugging Face folder of the initial model."""
    data: tuple[Path, ...]
    """Data sets: folders of `tugline generate`, or files of `tugline export sft` or `parquet`."""
    heldout_share: Share = 0.05
    """Share of the tasks in `data` that are held out: evaluated, never trained on."""
    renderer: str | None = None
    """Chat template for data sets of messages, such as `qwen3`; None: the model's."""
    window: PositiveInt | None = None
    """Maximum sequence length in tokens; longer sequences are left out. None: the model's window.
    """
    device: str | None = None
    """Device of the trainer; None: a GPU if there is one."""
    fsdp: bool = False
    """Under torchrun, shard the model over all processes (FSDP2) instead of copying it to each."""
    lora: Lora | None = None
    """Adapter to train with PEFT and merge into the trained model; None: all weights are trained.
    """
    sft: SftConfig = SftConfig()
    """The updates."""
    every: PositiveInt = 20
    """Updates between checkpoints, and between evaluations of the held-out loss; the first and
    last weights are always evaluated."""
    metrics: tuple[PluginSpec, ...] = ()
    """Sinks for metrics besides the console and `metrics.jsonl`, as for `tugline train`."""
    out: Path | None = None
    """Folder of the run, relative to the current directory; None: given by `--out`."""


def read_config(path: Path, changes: Mapping[str, Any] = NO_CHANGES) -> SftRunConfig:
    """Read the file at `path` with its paths made absolute. Raises `ConfigError`.

    `changes` override values of the file by dotted key.
    """
    config = load(path, SftRunConfig, changes)
    folder = path.absolute().parent
    data = tuple(folder / part.expanduser() for part in config.data)
    return replace(config, model=folder / config.model.expanduser(), data=data)


# --------------------------------------------------------------------------- the set
def read_set(
    paths: Sequence[Path], tokenizer: Tokenizer, make: Callable[[], Rendering], window: int
) -> tuple[list[Sample], Counter[str]]:
    """Return the samples of data sets, and the number of rows left out by reason.

    `make` returns the chat template; it is called for rows of messages only. Raises `UsageError`
    for a file that is not a data set, or has ids of another tokenizer.
    """
    digest = hashlib.sha256(tokenizer.to_json().encode()).hexdigest()
    samples: list[Sample] = []
    left_out: Counter[str] = Counter()
    for path in paths:
        file = _choose_file(path, digest)
        for where, row in _read_set_rows(file):
            if "messages" in row or "prompt" in row:
                ids, mask = _render(make(), row, where)
            else:
                ids, mask = _read_ids(row, digest, where)
            if not mask.any() or len(ids) > window:
                left_out["too_long" if mask.any() else "untrained"] += 1
                continue
            about = row.get("metadata") or row
            session = about.get("session")
            # not `where`: the held-out part must not depend on the folder
            task = about.get("task") or session or hashlib.sha256(ids.tobytes()).hexdigest()
            samples.append(plain_sample(ids, mask, session=str(session or where), task=str(task)))
    return samples, left_out


def _choose_file(path: Path, digest: str) -> Path:
    """Return the file of a folder to read: its traces, if they are of the model's tokenizer."""
    if not path.is_dir():
        return path
    exact = path / TRACES
    fits = exact.exists() and all(
        row.get("tokenizer") == digest for _, row in _read_set_rows(exact)
    )
    return exact if fits else path / CONVERSATIONS


def _read_set_rows(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the location (for messages) and content of each row. Raises `UsageError`."""
    try:
        yield from read_rows(file)
    except ConfigError as error:
        raise UsageError(f"{file} cannot be read as conversations or traces: {error}") from error


def _read_ids(row: Mapping[str, Any], digest: str, where: str) -> tuple[Ids, Mask]:
    """Return the ids of a row of ``export parquet`` or ``export trl``, and their mask."""
    ids, mask = (row.get(a, row.get(b)) for a, b in (("ids", "input_ids"), _MASKS))
    if not isinstance(ids, list) or not isinstance(mask, list) or len(ids) != len(mask):
        msg = (
            f"{where} must have messages, or ids and loss_mask of equal length; it has "
            f"{sorted(row)}"
        )
        raise UsageError(msg)
    if row.get("tokenizer") not in {None, "", digest}:
        msg = f"{where}: the ids are of another tokenizer than the model's; use conversations"
        msg += " as written by `tugline export sft`"
        raise UsageError(msg)
    return np.array(ids, np.int32), np.array(mask, np.bool_)


def _render(rendering: Rendering, row: Mapping[str, Any], where: str) -> tuple[Ids, Mask]:
    """Render a conversation in the format of the OpenAI API, or of Hugging Face templates."""
    messages = row.get("messages") or [*(row.get("prompt") or ()), *(row.get("completion") or ())]
    try:
        messages = msgspec.convert(messages, list[dict[str, Any]])
        for message in messages:
            for call in message.get("tool_calls") or ():
                function = call.get("function", {})
                if not isinstance(function.get("arguments"), str):
                    function["arguments"] = json.dumps(function.get("arguments", {}))
        return rendering.render_answers(*parse_conversation(messages, row.get("tools")))
    except (RequestError, msgspec.ValidationError, AttributeError) as error:
        msg = f"{where} is not a conversation in the format of the OpenAI API: {error}"
        raise UsageError(msg) from error


# --------------------------------------------------------------------------- updates
class Sft(Updater):
    """Trains `model` in place on the negative log likelihood of tokens."""

    def update(self, samples: Sequence[Sample]) -> Update:
        """Make one update; its loss is the mean over the trained tokens, in nats."""
        tokens = sum(sample.trained for sample in samples)
        return self.apply([Row(sample, 1 / tokens) for sample in samples])

    @torch.no_grad()
    def measure(self, samples: Sequence[Sample]) -> float:
        """Return the loss of samples under the current weights, in nats per token."""
        passes = [self.policy.logprobs(micro) for micro in self.pack([*map(Row, samples)])]
        own = torch.cat(passes).double()
        total, count = add_up([float(own.sum()), len(own)], self.policy.device)
        return -total / count

    def make_loss(self, micro: MicroBatch, figures: Update) -> TokenLoss:
        """Return the negative log likelihood."""
        return lambda new, _: -new


# --------------------------------------------------------------------------- a run
class SftState(msgspec.Struct, frozen=True, kw_only=True):
    """Position of a run and its totals; part of every checkpoint."""

    step: int = 0
    """Updates made or skipped, which is the position in the data."""
    tokens: int = 0
    """Trained tokens, counted again in each epoch."""
    loss: float = 0.0
    """Loss of the last update, in nats per token."""
    heldout: dict[int, float] = {}
    """Held-out loss by number of updates."""
    elapsed_s: float = 0.0
    """Wall-clock time, summed over all starts of the run."""


def train(
    config: SftRunConfig, folder: Path | None, sinks: Sinks, progress: RunProgress
) -> SftState:
    """Train to the end in `folder`, from its newest checkpoint, observed by `progress`.

    `folder` is None on the other ranks of torchrun, which use that of rank 0 and only train. The
    run may be killed at any point and started again. Raises `TuglineError`.
    """
    with contextlib.ExitStack() as stack:
        if folder:
            stack.enter_context(folder_lock(folder, instead="choose another --out"))
            store_config(folder, config)
        device = stack.enter_context(join_ranks(config.device))
        shared = next(filter(None, gather([folder])))
        progress.begin_phase("loading the model")
        placement = Placement.of(device, config.sft, fsdp=config.fsdp)
        model, tokenizer, _ = load_model(config.model, placement, config.lora, config.sft.seed)
        trained, heldout = _read_data(config, model, tokenizer, progress.report)
        run = _SftRun(config, shared, model, trained, heldout)
        progress.report(f"packing: {run.packing}")
        sinks.start(shared, msgspec.to_builtins(config, enc_hook=str), run.state.step)
        try:
            run.train(sinks, progress)
        finally:
            sinks.close()
        result = shared / MODEL
        other = nullcontext(name_draft(result))  # rank 0 makes it
        with model_folder(config.model, result) if folder else other as draft:
            write_trained(draft, model, config.model)
        return run.state


def _read_data(
    config: SftRunConfig, model: Any, tokenizer: Tokenizer, report: Callable[[str], object]
) -> tuple[list[Sample], list[Sample]]:
    """Return the training and the held-out samples. Raises `UsageError` if none is to train."""
    text = get_base_model(model).config.get_text_config()
    window = config.window or int(text.max_position_embeddings)

    settings = EngineSettings(renderer=config.renderer)
    make = cache(partial(make_rendering, settings, tokenizer, str(text.model_type)))
    data, left_out = read_set(config.data, tokenizer, make, window)
    trained: list[Sample] = []
    heldout: list[Sample] = []
    for sample in data:
        draw = random.Random(f"{config.sft.seed}/{sample.group}").random()
        (heldout if draw < config.heldout_share else trained).append(sample)
    counts = f"{len(trained)} conversations to train, {len(heldout)} held out;"
    counts += f" left out: {dict(left_out) or '-'}"
    if not trained:
        raise UsageError(f"data contains nothing to train on: {counts}")
    report(counts)
    return trained, heldout


@dataclass(eq=False)
class _SftRun:
    """The updates of a run; the order of the data depends only on the configuration."""

    config: SftRunConfig
    folder: Path
    model: torch.nn.Module
    trained: Sequence[Sample]
    heldout: Sequence[Sample]

    def __post_init__(self) -> None:
        config = self.config.sft
        sessions: dict[str, list[Sample]] = {}
        for sample in self.trained:
            sessions.setdefault(sample.session, []).append(sample)
        self._sessions = list(sessions.values())
        self._per_epoch = math.ceil(len(sessions) / config.sessions_per_update)
        self.total = self._per_epoch * config.epochs
        until = config.decay_updates or max(self.total, config.warmup_updates + 1)
        self._trainer = trainer = Sft(
            self.model,
            replace(
                config, decay_updates=until, micro_tokens=config.micro_tokens or self.config.window
            ),
            self.config.model,
        )
        self.state = checkpoint.load_newest(
            self.folder / CHECKPOINTS, lambda at: checkpoint.load(at, trainer), SftState()
        )

    @property
    def packing(self) -> str:
        """See `PolicyModel.packing`."""
        return self._trainer.policy.packing

    def train(self, sinks: Sinks, progress: RunProgress) -> None:
        """Make the remaining updates."""
        progress.count_updates(self.state.step, self.total)
        began = time.monotonic()
        earlier_s = self.state.elapsed_s
        self._measure(sinks)
        while self.state.step < self.total:
            at = time.monotonic()
            step = self.state.step + 1
            done = self._trainer.update(self._choose(step))
            self.state = replace(
                self.state,
                step=step,
                tokens=self.state.tokens + int(done.sums["tokens"]),
                loss=done.sums["loss"],
                elapsed_s=earlier_s + time.monotonic() - began,
            )
            self._measure(sinks)
            rate = self._trainer.optimizer.param_groups[0]["lr"]
            figures = {f"sft/{name}": value for name, value in done.sums.items()}
            figures |= {"sft/grad_norm": done.grad_norm, "sft/learning_rate": rate}
            figures |= {"sft/skipped": len(done.culprits), "time/step_s": time.monotonic() - at}
            sinks.log(step, figures)
            if step % self.config.every == 0 or step == self.total:
                extra = msgspec.to_builtins(self.state, str_keys=True)
                checkpoint.save(
                    self.folder / CHECKPOINTS, self._trainer, step=step, version=step, extra=extra
                )
            progress.count_updates(step, self.total)

    def _choose(self, step: int) -> list[Sample]:
        """Return the samples of update number `step`, counted from 1."""
        epoch, position = divmod(step - 1, self._per_epoch)
        order = list(range(len(self._sessions)))
        random.Random(f"{self.config.sft.seed}/{epoch}").shuffle(order)
        chosen = np.array_split(order, self._per_epoch)[position]
        return [sample for index in chosen for sample in self._sessions[index]]

    def _measure(self, sinks: Sinks) -> None:
        """Measure the held-out loss if that is due and not done."""
        step = self.state.step
        due = step % self.config.every == 0 or step == self.total
        if due and self.heldout and step not in self.state.heldout:
            loss = self._trainer.measure(self.heldout)
            self.state = replace(self.state, heldout={**self.state.heldout, step: loss})
            sinks.log(step, {"sft/heldout_loss": loss})
