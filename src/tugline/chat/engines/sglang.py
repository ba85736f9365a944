"""Formats of SGLang: its native ``/generate``, and its chat route, which reports ids.

Events of a stream repeat the whole answer unless the server runs with
``--incremental-streaming-output``; the reader accepts both forms. Log probabilities are those after
temperature, unless the server runs with ``SGLANG_RETURN_ORIGINAL_LOGPROB=1``. The chat route
reports ids once, at the end; until then tokens are only counted, and an interrupted call has counts
only (I2).
"""

from typing import Any, TypeVar

import msgspec

from tugline.chat.engines import base, chat, reports
from tugline.chat.engines.generate import TokenFormat, TokenReader, build_bans
from tugline.errors import EngineError, Unsupported
from tugline.types import Finish, LogprobMeaning

_MAX_KEPT = 4096
"""Highest ``top_k`` with which SGLang reports kept sets (``--sampling-mask-max-tokens``)."""


class _Sglang(base.EngineFormat):
    """Base of both routes."""

    name = "sglang"
    default_meaning = LogprobMeaning.PROCESSED

    def build_abort(self, request_id: str) -> base.Post | None:
        """See `EngineFormat.build_abort`."""
        return base.Post("/abort_request", [msgspec.json.encode({"rid": request_id})])


# --------------------------------------------------------------------------- ids in, ids out
class _Pair(msgspec.Struct, array_like=True, gc=False):
    logprob: float
    id: int


class _Finish(msgspec.Struct):
    type: str


class _SglangMeta(msgspec.Struct):
    finish_reason: _Finish | None = None
    completion_tokens: int = 0
    output_token_logprobs: list[_Pair] = []
    output_token_sampling_mask: Any = None
    """Ids that each token was chosen from, if it is valid."""
    output_token_sampling_logprobs: Any = None
    """Logprobs of the tokens among these, if it is valid."""
    routed_experts: Any = None
    """Base64 text of int32 values, if it is valid."""
    weight_version: str = ""
    weight_versions: list[base.ReportedSpan] | None = None


class _SglangReply(base.EngineReply):
    meta_info: _SglangMeta = msgspec.field(default_factory=_SglangMeta)


class _SglangReader(TokenReader[_SglangReply]):
    """Reader of cumulative and incremental replies, by the engine's count of tokens."""

    decoder = msgspec.json.Decoder(_SglangReply)
    shape: tuple[int, int] | None = None
    """Layers with experts, and experts of a token in each; None if they are not known."""

    def read_events(self, payloads: list[bytes]) -> list[base.Delta]:
        """See `Reader.read_events`; only the last of cumulative events is read."""
        replies = [self.decode(payloads[-1])]
        meta = replies[0].meta_info
        if len(meta.output_token_logprobs) < meta.completion_tokens:
            replies = [*map(self.decode, payloads[:-1]), *replies]
        return self.add_all(replies)

    def add(self, reply: _SglangReply) -> None:
        """Add the new tokens of a reply."""
        meta = reply.meta_info
        new = meta.completion_tokens - self.count
        reason = meta.finish_reason
        finish = base.parse_finish(reason.type if reason is not None else None)
        if new <= 0 and finish is None:
            return
        pairs = meta.output_token_logprobs
        if new > len(pairs):
            msg = (
                f"sglang reported logprobs of {len(pairs)} of {new} tokens; it must support "
                "`return_logprob`"
            )
            raise EngineError(msg)
        pairs = pairs[len(pairs) - new :] if new > 0 else []
        ids = [pair.id for pair in pairs]
        logprobs = [pair.logprob for pair in pairs]
        kept = _take_last(reports.read_kept(meta.output_token_sampling_mask), len(ids))
        if kept:
            among = _take_last(_read_floats(meta.output_token_sampling_logprobs), len(ids))
            logprobs = among or logprobs
            kept = kept if among else []
        experts = reports.read_flat_experts(meta.routed_experts, self.shape)
        self.make_room(experts)
        version = base.parse_version(meta.weight_version) if meta.weight_version else None
        spans = base.parse_spans(meta.weight_versions)
        self.add_tokens(ids, logprobs, finish, version, spans, kept)
        self.add_experts(experts)


T = TypeVar("T")


def _take_last(values: list[T], count: int) -> list[T]:
    """Return the last `count` values; none if there are fewer."""
    return values[len(values) - count :] if 0 < count <= len(values) else []


def _read_floats(value: object) -> list[float]:
    try:
        return msgspec.convert(value or [], list[float])
    except msgspec.ValidationError:
        return []


class SglangGenerate(_Sglang, TokenFormat):
    """Exact mode of SGLang; replies report their weight versions.

    Kept sets come with logprobs among them, so they are not requested where logprobs are raw.
    """

    features = TokenFormat.features | {base.Feature.EXPERTS, base.Feature.KEPT}

    advice = "upgrade SGLang"
    path = "/generate"
    prompt_field = b"input_ids"
    reader = _SglangReader

    def build_fields(self, ask: base.EngineRequest) -> dict[str, Any]:
        """Build the body without its prompt."""
        kept = ask.kept and self.logprob_meaning is LogprobMeaning.PROCESSED
        reported = {"return_routed_experts": ask.experts, "return_sampling_mask": kept}
        return {
            "sampling_params": _build_sampling(ask, bounded=kept),
            "return_logprob": True,
            "rid": ask.request_id,
            "stream": True,
            **{name: True for name, wanted in reported.items() if wanted},
        }

    def make_reader(self) -> base.Reader[Any]:
        """See `EngineFormat.make_reader`; the experts' shape is not in a reply."""
        reader = _SglangReader(self.missing_ids)
        reader.shape = self.experts
        return reader


def _build_sampling(ask: base.EngineRequest, *, bounded: bool) -> dict[str, Any]:
    sampling = ask.sampling
    top_k = sampling.top_k or -1
    if bounded:
        top_k = min(sampling.top_k or _MAX_KEPT, _MAX_KEPT)
    constraint = ask.request.constraint
    params: dict[str, Any] = base.NEUTRAL | {
        "max_new_tokens": sampling.max_tokens,
        "stream_interval": ask.stream_interval,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": top_k,
        "min_p": sampling.min_p or 0.0,
        "stop_token_ids": ask.stop_ids,
        "sampling_seed": sampling.seed,
        "skip_special_tokens": False,
        "logit_bias": build_bans(ask.banned),
        "json_schema": None if constraint is None else constraint.schema or '{"type":"object"}',
    }
    return {name: value for name, value in params.items() if value is not None}


# --------------------------------------------------------------------------- messages in
class _ChatReader(chat.ChatReader):
    """Reader that emits text as it comes, and ids, logprobs and the end when ids are reported."""

    def __init__(self, missing_ids: str) -> None:
        super().__init__(missing_ids)
        self._logprobs: list[float] = []
        self._finish: Finish | None = None
        self._has_ids = False

    def add_tokens(self, reply: chat.ChatReply, delta: base.Delta, *, spoke: bool) -> None:
        """Count tokens until their ids come; then subtract the count."""
        for choice in reply.choices[:1]:
            new = choice.list_logprobs()
            self._logprobs += new
            delta.unreported_tokens += len(new)
            self._finish = delta.finish or self._finish
            delta.finish = None
        if reply.metadata is not None and reply.metadata.weight_versions:
            delta.spans = base.parse_spans(reply.metadata.weight_versions)
        if reply.sglext is not None and reply.sglext.output_ids:
            self._has_ids = True
            delta.prompt = chat.read_array(reply.sglext.input_ids)
            ids = reply.sglext.output_ids[0]
            if len(ids) == len(self._logprobs):
                delta.ids = ids
                delta.logprobs = self._logprobs
                delta.unreported_tokens -= len(ids)
            else:
                delta.unreported_tokens += len(ids) - len(self._logprobs)
            delta.finish = self._finish or Finish.STOP
        elif reply.usage is not None and not self._has_ids:
            if self._finish is not Finish.ABORT:  # SGLang reports no ids of aborted requests
                raise EngineError(self.missing_ids)
            delta.finish = Finish.ABORT


class SglangChat(_Sglang, chat.ChatFormat):
    """Observed mode of SGLang."""

    reader = _ChatReader
    advice = "start it with --tool-call-parser and --reasoning-parser"
    missing_ids = (
        "sglang sent text without token ids; it must support `return_output_ids_in_sglext`"
    )
    reasoning_field = "reasoning_content"

    def build_fields(self, ask: base.EngineRequest) -> dict[str, Any]:
        """See `ChatFormat.build_fields`. Raises `Unsupported` for a field that SGLang ignores."""
        if ask.request.tools and not ask.request.parallel:
            msg = "sglang's chat route cannot limit a response to one tool call; use exact mode"
            raise Unsupported(msg, param="parallel_tool_calls")
        return base.NEUTRAL | {
            "logprobs": True,
            "return_input_ids_in_sglext": True,
            "return_output_ids_in_sglext": True,
            "rid": ask.request_id,
            "skip_special_tokens": False,  # else a special token that ends reasoning is lost
            "top_k": ask.sampling.top_k or -1,
            "min_p": ask.sampling.min_p or 0.0,
            "response_format": chat.build_response_format(ask.request.constraint),
        }
