"""Parquet tables: all fields of traces, and rows for TRL and verl.

Files are written in batches of bounded size, with pyarrow from the extra ``export``. They contain
no date or path, so equal rows give equal bytes. A map is a list of ``{key, value}``, because
Hugging Face `datasets` does not support Arrow maps. `docs/formats.md` explains the columns.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tugline.errors import ConfigError, UsageError
from tugline.exports.base import Exporter, RowWriter, SessionExport, SkipReason, TrainerExporter
from tugline.exports.forms import place_experts
from tugline.trainers.grpo.samples import read_spans
from tugline.types import Trace

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as _error:
    _MISSING = "this format is written with pyarrow, which needs: pip install 'tugline[export]'"
    raise UsageError(_MISSING) from _error

_BATCH_ROWS = 256
_BATCH_TOKENS = 1 << 20
_BATCH_BYTES = 1 << 26
"""Number of rows, tokens or bytes of experts at which a batch is written."""
_FIELDS = ("kind", "parent", "shared", "thread", "exact", "thinking_retention", "ids", "logprobs")
"""Fields of a trace that become columns unchanged."""


def _map(value: pa.DataType) -> pa.DataType:
    return pa.list_(pa.struct({"key": pa.string(), "value": value}))


TYPES: dict[str, pa.DataType] = {
    "text": pa.string(),
    "texts": pa.list_(pa.string()),
    "bool": pa.bool_(),
    "int": pa.int32(),
    "float": pa.float64(),
    "ids": pa.list_(pa.int32()),
    "longs": pa.list_(pa.int64()),
    "bools": pa.list_(pa.bool_()),
    "bits": pa.list_(pa.int8()),
    "floats": pa.list_(pa.float32()),
    "bytes": pa.binary(),
    "experts": pa.list_(pa.list_(pa.list_(pa.int16()))),
    "tags": _map(pa.string()),
    "numbers": _map(pa.float64()),
    "spans": pa.list_(
        pa.struct(
            dict.fromkeys(("call", "start", "end", "version", "repeats"), pa.int32())
            | dict.fromkeys(("malformed", "truncated"), pa.bool_())
            | {"masked": pa.string()}
        )
    ),
    "failure": pa.struct({"boundary": pa.string(), "message": pa.string()}),
    "ledger": pa.struct(
        dict.fromkeys(("sampled", "trained"), pa.int64())
        | dict.fromkeys(("masked", "dropped"), _map(pa.int64()))
    ),
}
"""Arrow types by the names in `TableExporter.columns`."""


def pairs(mapping: Mapping[Any, object]) -> list[dict[str, object]]:
    """Convert a mapping to the value of a map column, sorted by key."""
    return [{"key": str(key), "value": mapping[key]} for key in sorted(mapping)]


class TableExporter(Exporter):
    """Base of formats with typed columns."""

    suffix = ".parquet"
    columns = ""
    """Columns as ``name:type``, with the types in `TYPES`."""

    def open(self, path: Path) -> RowWriter:
        """Create the Parquet file."""
        fields = (column.split(":") for column in self.columns.split())
        return _TableWriter(path, pa.schema([(name, TYPES[kind]) for name, kind in fields]))


class _TableWriter(RowWriter):
    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._schema = schema
        self._rows: list[Mapping[str, object]] = []
        self._tokens = 0
        self._bytes = 0
        self._writer: Any = pq.ParquetWriter(str(path), schema, compression="zstd")

    def write(self, values: Mapping[str, object]) -> None:
        """Buffer a row, and write the batch if it is full."""
        self._rows.append(values)
        arrays = [value for value in values.values() if isinstance(value, np.ndarray)]
        self._tokens += max((len(array) for array in arrays), default=0)
        self._bytes += sum(array.nbytes for array in arrays if array.ndim > 1)
        self._bytes += sum(len(value) for value in values.values() if isinstance(value, bytes))
        full = len(self._rows) >= _BATCH_ROWS or self._tokens >= _BATCH_TOKENS
        if full or self._bytes >= _BATCH_BYTES:
            self._flush()

    def _flush(self) -> None:
        columns = [
            _make_column([row.get(field.name) for row in self._rows], field.type)
            for field in self._schema
        ]
        self._writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=self._schema))
        self._rows = []
        self._tokens = 0
        self._bytes = 0

    def close(self) -> None:
        """Write the last batch and close the file."""
        if self._rows:
            self._flush()
        self._writer.close()


def _make_column(values: list[Any], kind: pa.DataType) -> pa.Array:
    if kind != TYPES["experts"]:
        return pa.array(values, kind)
    return pa.concat_arrays(
        [pa.nulls(1, kind) if value is None else _nest(value) for value in values]
    )


def _nest(experts: npt.NDArray[np.int16]) -> pa.Array:
    """Return a column of one row of nested lists; a list of objects would take minutes."""
    nested = pa.array(experts.reshape(-1))
    for size in reversed(experts.shape):
        offsets = np.arange(0, len(nested) + 1, size, dtype=np.int32)
        nested = pa.ListArray.from_arrays(offsets, nested)
    return nested


# --------------------------------------------------------------------------- traces
class Parquet(TableExporter):
    """Table of all traces with all fields, untrained ones included; the reward may be null."""

    needs_reward = False
    trains = False
    columns = """
        session:text task:text sample:int group:int trace:int kind:text parent:int shared:int
        thread:text exact:bool thinking_retention:text ids:ids loss_mask:bools logprobs:floats
        versions:ids spans:spans images:texts reward:float trace_reward:float
        call_rewards:numbers reward_parts:numbers status:text failure:failure ledger:ledger
        tags:tags model:text tokenizer:text harness:text builder:text
        experts:bytes experts_shape:ids experts_type:text kept_offsets:ids kept_ids:ids"""

    def row(self, session: SessionExport, index: int, trace: Trace) -> Mapping[str, object]:
        """Return the fields of the trace and of its session."""
        result = session.recording.result
        ledger = session.built.ledger
        reward = result.reward if result is not None else None
        rewards = reward.per_trace if reward is not None else ()
        if result is None or result.builder != session.builder_name:
            rewards = ()  # they are rewards of another builder's traces
        return {
            "session": session.header.session.id,
            "task": session.header.task.id,
            "sample": session.header.session.sample,
            "group": session.group,
            "trace": index,
            **{name: getattr(trace, name) for name in _FIELDS},
            "loss_mask": trace.mask,
            "versions": read_spans(trace)[0],
            "spans": msgspec.to_builtins(trace.spans),
            "images": list(trace.images),
            "reward": session.reward,
            "trace_reward": rewards[index] if len(rewards) == len(session.built.traces) else None,
            "call_rewards": pairs(reward.per_call if reward is not None else {}),
            "reward_parts": pairs(reward.parts if reward is not None else {}),
            "status": result.status if result is not None else None,
            "failure": msgspec.to_builtins(result.failure) if result is not None else None,
            "ledger": msgspec.structs.asdict(ledger)
            | {"masked": pairs(ledger.masked), "dropped": pairs(ledger.dropped)},
            "tags": pairs(session.header.task.tags),
            "model": session.header.model,
            "tokenizer": session.header.tokenizer,
            "harness": session.header.task.harness.name,
            "builder": session.builder_name,
            **_describe_choices(trace),
        }


def _describe_choices(trace: Trace) -> dict[str, object]:
    """Return the columns of experts, as bytes with shape and numpy type, and of kept sets."""
    columns = dict[str, object].fromkeys(
        ("experts", "experts_shape", "experts_type", "kept_offsets", "kept_ids")
    )
    if trace.experts is not None:
        kind = trace.experts.dtype.newbyteorder("<")
        columns["experts"] = trace.experts.astype(kind, copy=False).tobytes()
        columns["experts_shape"] = list(trace.experts.shape)
        columns["experts_type"] = kind.str
    if trace.kept is not None:
        columns["kept_offsets"] = trace.kept.offsets
        columns["kept_ids"] = trace.kept.ids
    return columns


# --------------------------------------------------------------------------- other trainers


@dataclass(kw_only=True, eq=False)
class Trl(TrainerExporter, TableExporter):
    """Rollouts for TRL's GRPO trainers, and tokenized data for its SFT trainer.

    ``prompt_ids``, ``completion_ids``, ``logprobs`` and ``env_mask`` are the return values of a
    ``rollout_func``; ``input_ids``, ``completion_mask``, ``old_log_probs``, ``advantage``,
    ``model_version`` and ``group_id`` are a ``RolloutSample`` of the asynchronous trainer. The
    completion begins with the first sampled token. TRL replays no experts and no kept sets.
    """

    columns = """
        session:text task:text trace:int prompt_ids:ids completion_ids:ids logprobs:floats
        env_mask:bits input_ids:ids completion_mask:bits old_log_probs:floats reward:float
        advantage:float model_version:int group_id:int"""

    def row(self, session: SessionExport, index: int, trace: Trace) -> Mapping[str, object]:
        """Return the columns; `model_version` is that of the oldest token."""
        first = trace.spans[0].start
        mask = trace.mask.astype(np.int8)
        return {
            "session": session.header.session.id,
            "task": session.header.task.id,
            "trace": index,
            "prompt_ids": trace.ids[:first],
            "completion_ids": trace.ids[first:],
            "logprobs": trace.logprobs[first:],
            "env_mask": mask[first:],
            "input_ids": trace.ids,
            "completion_mask": mask,
            "old_log_probs": trace.logprobs,
            "reward": session.reward,
            "advantage": session.advantage,
            "model_version": min(span.version for span in trace.spans),
            "group_id": session.group,
        }


@dataclass(kw_only=True, eq=False)
class Verl(TrainerExporter, TableExporter):
    """Rollout batches of verl; the response begins with the first sampled token.

    By default lists are not padded, like the output of verl's agent loop. The options
    ``prompt_length`` and ``response_length`` pad them with `pad_id` to these lengths, prompts on
    the left and responses on the right, so that columns become the tensors of a ``DataProto``.
    `dense_layers` are the numbers of the model's layers without a router. verl has no form for kept
    sets.
    """

    holds_experts = True

    columns = """
        uid:text session:text trace:int data_source:text prompts:longs responses:longs
        input_ids:longs attention_mask:longs position_ids:longs response_mask:longs
        rollout_log_probs:floats rm_scores:floats reward:float min_global_steps:int
        max_global_steps:int __num_turns__:int routed_experts:experts"""

    prompt_length: int | None = None
    response_length: int | None = None
    pad_id: int = 0
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if (self.prompt_length is None) != (self.response_length is None):
            msg = "export 'verl': set both prompt_length and response_length, or neither"
            raise ConfigError(msg)

    def row(
        self, session: SessionExport, index: int, trace: Trace
    ) -> Mapping[str, object] | SkipReason:
        """Return the columns; a trace that does not fit the padding is skipped, not cut."""
        first = trace.spans[0].start
        versions = [span.version for span in trace.spans]
        size = len(trace.ids) - first
        left = first if self.prompt_length is None else self.prompt_length
        right = size if self.response_length is None else self.response_length
        if first > left or size > right:
            return SkipReason.TOO_LONG

        def padded(values: npt.NDArray[Any], fill: int = 0) -> npt.NDArray[Any]:
            return np.pad(values, (left - first, right - size), constant_values=fill)

        ids = padded(trace.ids.astype(np.int64), self.pad_id)
        attention = padded(np.ones(len(trace.ids), np.int64))
        scores = np.zeros(right, np.float32)
        scores[size - 1] = session.reward
        return {
            "uid": session.header.task.id,
            "session": session.header.session.id,
            "trace": index,
            "data_source": session.header.task.harness.name,
            "prompts": ids[:left],
            "responses": ids[left:],
            "input_ids": ids,
            "attention_mask": attention,
            "position_ids": np.maximum(attention.cumsum() - 1, 0),
            "response_mask": padded(trace.mask.astype(np.int64))[left:],
            "rollout_log_probs": padded(trace.logprobs)[left:],
            "rm_scores": scores,
            "reward": session.reward,
            "min_global_steps": min(versions),
            "max_global_steps": max(versions),
            "__num_turns__": len({span.call for span in trace.spans}),
            "routed_experts": self._place_experts(trace, left - first, right - size),
        }

    def _place_experts(self, trace: Trace, before: int, after: int) -> npt.NDArray[np.int16] | None:
        """Return experts of all tokens and of the padding, which are 0 where none are known."""
        if trace.experts is None:
            return None
        spread = place_experts(trace.experts, len(trace.ids) + after, self.dense_layers)
        return np.pad(spread.astype(np.int16), ((before, 0), (0, 0), (0, 0)))
