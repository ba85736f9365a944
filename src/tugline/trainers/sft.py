"""Supervised fine-tuning on conversations of a stronger model: the same updates, another loss.

Only what the assistant said carries loss: the negative log likelihood of its tokens, averaged over
the tokens of an update. Sets hold exact token ids and their mask, or messages, which are rendered
with the model's chat template. The order of sessions follows from the seed alone, so the position
in the data is the number of updates; a run that was killed continues from its newest checkpoint.
"""

import contextlib
import hashlib
import json
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
from msgspec import Meta
from msgspec.structs import replace

from tugline.chat.dialects.base import HttpRequest
from tugline.chat.dialects.decoding import ParseCache
from tugline.chat.dialects.openai_chat import OpenAIChat
from tugline.chat.templates.rendering import Rendering
from tugline.chat.tokenizer import Tokenizer
from tugline.config import Config, load
from tugline.datasets.rows import read_rows
from tugline.errors import ConfigError, RequestError, UsageError
from tugline.inference.load import load as load_model
from tugline.launch.engine import make_rendering
from tugline.launch.server import folder_lock
from tugline.launch.settings import EngineSettings
from tugline.schema import PositiveFloat, PositiveInt
from tugline.trainers.config import CHECKPOINTS, MODEL, Lora, store_config
from tugline.trainers.grpo import checkpoint
from tugline.trainers.grpo.batch import MicroBatch, Row, plain_sample
from tugline.trainers.grpo.config import UpdateConfig
from tugline.trainers.grpo.distributed import add_up, gather, join_ranks
from tugline.trainers.grpo.update import Update, Updater
from tugline.trainers.models import merge_adapter, prepare, write_model_folder
from tugline.trainers.sinks import Sinks
from tugline.types import Ids, Mask, PluginSpec, Sample

TRACES = "traces.parquet"
CONVERSATIONS = "conversations.jsonl"
"""Files of a folder of `tugline generate`."""
_MASKS = ("loss_mask", "completion_mask")
Share = Annotated[float, Meta(ge=0, le=1)]


class SftConfig(UpdateConfig, frozen=True):
    """Settings of updates from conversations."""

    lr: PositiveFloat = 1e-5
    """Highest learning rate of AdamW, which it has after the warm-up."""
    final_lr: Share = 0.1
    """Share of `lr` that is left at the end of the decay, which is the end of the run."""
    epochs: PositiveInt = 2
    """Passes over the set."""


class SftRunConfig(Config, frozen=True, kw_only=True):
    """A run of ``tugline sft``. Relative paths, except `out`, are relative to the file."""

    model: Path
    """Hugging Face folder of the first weights."""
    data: tuple[Path, ...]
    """Sets: folders of `tugline generate`, or files of `tugline export sft` or `parquet`."""
    heldout_share: Share = 0.05
    """Share of tasks in `data` that are measured and never trained on."""
    renderer: str | None = None
    """Chat template for sets of messages, such as `qwen3`; None: the one of the model."""
    window: PositiveInt | None = None
    """Longest sequence, in tokens; longer ones are left out. None: the model's."""
    device: str | None = None
    """Device of the trainer; None: a GPU if there is one."""
    fsdp: bool = False
    """Under torchrun, shard the model over all processes (FSDP2) instead of copying it to each."""
    lora: Lora | None = None
    """Train an adapter with PEFT, which the trained model has added; None: all weights."""
    sft: SftConfig = SftConfig()
    """The updates."""
    every: PositiveInt = 20
    """Updates between two checkpoints, and two measurements of the held-out loss; the first and
    the last weights are always measured."""
    metrics: tuple[PluginSpec, ...] = ()
    """Sinks for metrics besides the console and `metrics.jsonl`, as for `tugline train`."""
    out: Path | None = None
    """Folder of the run, relative to where the command is started; None: `--out` names it."""


def read_config(path: Path) -> SftRunConfig:
    """Read the file at `path` with its paths made absolute. Raises `ConfigError`."""
    config, folder = load(path, SftRunConfig), path.absolute().parent
    data = tuple(folder / one.expanduser() for one in config.data)
    return replace(config, model=folder / config.model.expanduser(), data=data)


# --------------------------------------------------------------------------- the set
def read_set(
    paths: Sequence[Path], tokenizer: Tokenizer, make: Callable[[], Rendering], window: int
) -> tuple[list[Sample], Counter[str]]:
    """Return the samples of sets, and how many rows are left out, by reason.

    `make` makes the chat template, where a set has messages only. Raises `UsageError` for a file
    that is no set, or whose ids are of another tokenizer.
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
            # not `where`: what is held out must not depend on the folder
            task = about.get("task") or session or hashlib.sha256(ids.tobytes()).hexdigest()
            samples.append(plain_sample(ids, mask, session=str(session or where), task=str(task)))
    return samples, left_out


def _choose_file(path: Path, digest: str) -> Path:
    """Return the file to read of a folder: its traces, if they are of the model's tokenizer."""
    if not path.is_dir():
        return path
    exact = path / TRACES
    fits = exact.exists() and all(
        row.get("tokenizer") == digest for _, row in _read_set_rows(exact)
    )
    return exact if fits else path / CONVERSATIONS


def _read_set_rows(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the rows of a set, each with its place for messages. Raises `UsageError`."""
    try:
        yield from read_rows(file)
    except ConfigError as error:
        raise UsageError(f"{file} is no set of conversations or traces: {error}") from error


def _read_ids(row: Mapping[str, Any], digest: str, where: str) -> tuple[Ids, Mask]:
    """Return the ids of a row of ``export parquet`` or ``export trl``, and their mask."""
    ids, mask = (row.get(a, row.get(b)) for a, b in (("ids", "input_ids"), _MASKS))
    if not isinstance(ids, list) or not isinstance(mask, list) or len(ids) != len(mask):
        msg = f"{where} needs messages, or ids and loss_mask of one length; it has {sorted(row)}"
        raise UsageError(msg)
    if row.get("tokenizer") not in {None, "", digest}:
        msg = f"{where}: its ids are of another tokenizer than the model's; give conversations,"
        msg += " as `tugline export sft` writes them"
        raise UsageError(msg)
    return np.array(ids, np.int32), np.array(mask, np.bool_)


def _render(rendering: Rendering, row: Mapping[str, Any], where: str) -> tuple[Ids, Mask]:
    """Render a conversation in the form of the OpenAI API, or of Hugging Face templates."""
    messages = row.get("messages") or [*(row.get("prompt") or ()), *(row.get("completion") or ())]
    try:
        messages = msgspec.convert(messages, list[dict[str, Any]])
        for message in messages:
            for call in message.get("tool_calls") or ():
                function = call.get("function", {})
                if not isinstance(function.get("arguments"), str):
                    function["arguments"] = json.dumps(function.get("arguments", {}))
        body = {"model": "", "messages": messages, "tools": row.get("tools") or None}
        request = HttpRequest("POST", "v1", "/chat/completions", "", {}, msgspec.json.encode(body))
        parsed = OpenAIChat().parse(request, ParseCache())
        return rendering.render_answers(parsed.messages, parsed.tools)
    except (RequestError, msgspec.ValidationError, AttributeError) as error:
        msg = f"{where} is no conversation in the form of the OpenAI API: {error}"
        raise UsageError(msg) from error


# --------------------------------------------------------------------------- updates
class Sft(Updater):
    """Trains `model` in place to say the trained tokens of samples."""

    def update(self, samples: Sequence[Sample]) -> Update:
        """Make one update; its loss is the mean over the trained tokens, in nats."""
        tokens = sum(int(sample.loss_mask.sum()) for sample in samples)
        return self.apply([Row(sample, 1 / tokens) for sample in samples])

    @torch.no_grad()
    def measure(self, samples: Sequence[Sample]) -> float:
        """Return the loss of samples under the weights as they are."""
        passes = [self.policy.logprobs(micro) for micro in self.pack([*map(Row, samples)])]
        own = torch.cat(passes).double()
        total, count = add_up([float(own.sum()), len(own)], self.policy.device)
        return -total / count

    def token_losses(self, new: torch.Tensor, micro: MicroBatch, figures: Update) -> torch.Tensor:
        """Return the negative log likelihood of each token."""
        return -new


# --------------------------------------------------------------------------- a run
class SftState(msgspec.Struct, frozen=True, kw_only=True):
    """Position of a run and its totals; part of every checkpoint."""

    step: int = 0
    """Updates made or skipped, and so the position in the data."""
    tokens: int = 0
    """Trained tokens, each as often as it was trained."""
    loss: float = 0.0
    """Of the last update, in nats per token."""
    heldout: dict[int, float] = {}
    """Held-out loss after so many updates."""
    elapsed_s: float = 0.0
    """Over all processes of the run."""


def train(
    config: SftRunConfig, folder: Path | None, sinks: Sinks, report: Callable[[str], None]
) -> SftState:
    """Run to the end in `folder`, from its newest checkpoint; `report` takes lines for people.

    The other ranks of torchrun bring no folder: they take that of rank 0, and only train. May be
    killed at any point and called again. Raises `TuglineError`.
    """
    with contextlib.ExitStack() as stack:
        if folder:
            stack.enter_context(folder_lock(folder, instead="choose another --out"))
            store_config(folder, config)
        device = stack.enter_context(join_ranks(config.device))
        shared = next(filter(None, gather([folder])))
        report("loading the model")
        model, tokenizer, _ = load_model(config.model, dtype=torch.float32)
        model.to(device)  # type: ignore[arg-type]  # its stub is of a wrapper
        trained, heldout = _read_data(config, model, tokenizer, report)
        policy = prepare(model, config.lora, config.sft.seed, fsdp=config.fsdp)
        run = _SftRun(config, shared, policy, trained, heldout)
        sinks.start(shared, msgspec.to_builtins(config, enc_hook=str), run.state.step)
        try:
            run.train(sinks)
        finally:
            sinks.close()
        weights = merge_adapter(policy)
        if folder:
            write_model_folder(weights, model, config.model, folder / MODEL)
        return run.state


def _read_data(
    config: SftRunConfig, model: Any, tokenizer: Tokenizer, report: Callable[[str], None]
) -> tuple[list[Sample], list[Sample]]:
    """Return what is trained on and what is held out. Raises `UsageError` if nothing is left."""
    text = model.config.get_text_config()
    window = config.window or int(text.max_position_embeddings)

    settings = EngineSettings(renderer=config.renderer)
    make = cache(partial(make_rendering, settings, tokenizer, str(text.model_type)))
    data, left_out = read_set(config.data, tokenizer, make, window)
    trained: list[Sample] = []
    heldout: list[Sample] = []
    for one in data:
        place = random.Random(f"{config.sft.seed}/{one.group}").random()
        (heldout if place < config.heldout_share else trained).append(one)
    counts = f"{len(trained)} conversations to train, {len(heldout)} held out;"
    counts += f" left out: {dict(left_out) or '-'}"
    if not trained:
        raise UsageError(f"data: nothing is left to train on: {counts}")
    report(counts)
    return trained, heldout


@dataclass(eq=False)
class _SftRun:
    """The updates of a run; position n of the data follows from the configuration alone."""

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
        self._trainer = trainer = Sft(self.model, replace(config, decay_updates=until))
        self.state = checkpoint.load_newest(
            self.folder / CHECKPOINTS, lambda at: checkpoint.load(at, trainer), SftState()
        )

    def train(self, sinks: Sinks) -> None:
        """Make the updates that are missing."""
        began, earlier_s = time.monotonic(), self.state.elapsed_s
        self._measure(sinks)
        while self.state.step < self.total:
            at, step = time.monotonic(), self.state.step + 1
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

    def _choose(self, step: int) -> list[Sample]:
        """Return the samples of an update, counted from 1."""
        epoch, place = divmod(step - 1, self._per_epoch)
        order = list(range(len(self._sessions)))
        random.Random(f"{self.config.sft.seed}/{epoch}").shuffle(order)
        chosen = np.array_split(order, self._per_epoch)[place]
        return [sample for index in chosen for sample in self._sessions[index]]

    def _measure(self, sinks: Sinks) -> None:
        """Measure the held-out loss, if it is due and not known."""
        step = self.state.step
        due = step % self.config.every == 0 or step == self.total
        if due and self.heldout and step not in self.state.heldout:
            loss = self._trainer.measure(self.heldout)
            self.state = replace(self.state, heldout={**self.state.heldout, step: loss})
            sinks.log(step, {"sft/heldout_loss": loss})
