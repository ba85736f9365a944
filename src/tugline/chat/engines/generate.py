"""Formats of exact mode: token ids in, token ids out.

`TokenFormat` and `TokenReader` are the bases for engines that take ids; a subclass defines the
route, the fields of its body, and the fields of ids, log probabilities and weight versions in its
reply. This module has ``/inference/v1/generate``, which the embedded engine and vLLM (with
``--enable-scale-out``) share, and vLLM's ``/v1/completions``, whose weight versions are those
announced to the gateway. vLLM's log probabilities are those before temperature, unless it was
started with ``--logprobs-mode processed_logprobs``.
"""

from abc import abstractmethod
from typing import Any

import msgspec
from msgspec.structs import replace

from tugline.chat.engines import base, reports
from tugline.chat.model_call import Constraint, ConstraintKind
from tugline.errors import EngineError
from tugline.types import Finish, LogprobMeaning, Mode, Sampling, VersionSpan
from tugline.types.task import INT32

_NO_SETS: list[list[int]] = []


class TokenFormat(base.EngineFormat):
    """Base of formats that send the prompt's ids."""

    mode = Mode.EXACT
    features = frozenset({base.Feature.STRUCTURED, base.Feature.BAN})
    path: str
    prompt_field: bytes

    @abstractmethod
    def build_fields(self, ask: base.EngineRequest) -> dict[str, Any]:
        """Build the body without its prompt."""

    def build_request(self, ask: base.EngineRequest) -> base.Post:
        """Join the prompt's encoded digits with the other fields."""
        if ask.prompt is None:
            raise EngineError(
                f"{self.name} expects a prompt of token ids, but the prompt was not rendered"
            )
        adapted = replace(ask, sampling=self.adapt_sampling(ask.sampling))
        fields = msgspec.json.encode(self.build_fields(adapted))
        before = b'{"' + self.prompt_field + b'":['
        return base.Post(self.path, ask.prompt.to_json(before, b"]," + fields[1:]))


class TokenReader(base.Reader[base.R]):
    """Base reader of replies with token ids."""

    def add_tokens(
        self,
        ids: list[int],
        logprobs: list[float],
        finish: Finish | None = None,
        version: int | None = None,
        spans: tuple[VersionSpan, ...] = (),
        kept: list[list[int]] = _NO_SETS,
    ) -> None:
        """Add tokens of one version; `spans` override the version of the whole reply so far.

        `kept` has a set for each token, or is ignored.
        """
        if len(ids) != len(logprobs):
            msg = (
                f"the engine sent {len(ids)} token ids but {len(logprobs)} logprobs; there "
                "must be one for each"
            )
            raise EngineError(msg)
        last = self.deltas[-1]
        changed = spans or (version is not None and version != last.version)
        if last.finish or last.spans or (changed and last.ids):
            last = base.Delta()
            self.deltas.append(last)
        if last.kept or (kept and len(kept) == len(ids)):
            last.kept += [[] for _ in last.ids[len(last.kept) :]]
            last.kept += kept if len(kept) == len(ids) else [[] for _ in ids]
        last.ids += ids
        last.logprobs += logprobs
        last.finish = finish
        last.spans = spans
        if version is not None:
            last.version = version
        self.count += len(ids)

    def make_room(self, report: base.ReportedExperts | None) -> None:
        """Begin another delta if `report` does not continue that of the last one."""
        last = self.deltas[-1].experts
        if report is not None and last is not None and not last.is_continued_by(report):
            self.deltas.append(base.Delta())

    def add_experts(self, report: base.ReportedExperts | None) -> None:
        """Add experts to the last delta, for which `make_room` was called before its tokens."""
        last = self.deltas[-1]
        if report is not None and last.experts is not None:
            last.experts.append(report)
        else:
            last.experts = report or last.experts


# --------------------------------------------------------------------------- replies
class _Logprob(msgspec.Struct, gc=False):
    logprob: float


class Logprobs(msgspec.Struct, gc=False):
    """Log probabilities of sampled tokens, in the form of OpenAI's chat or completions API."""

    content: list[_Logprob] | None = None
    token_logprobs: list[float] = []


class Choice(msgspec.Struct, gc=False):
    """An answer, or the part of it in one event."""

    token_ids: list[int] | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[base.ReportedSpan] | None = None
    routed_experts: Any = None
    """Base64 text of an ``.npy`` file, if it is valid."""
    routed_experts_start: int = 0
    sampling_mask: Any = None
    """A list of ids for each token, if it is valid."""

    def list_logprobs(self) -> list[float]:
        """Return the log probability of each token."""
        if self.logprobs is None:
            return []
        content = self.logprobs.content
        if content is None:
            return self.logprobs.token_logprobs
        return [item.logprob for item in content]


class _Reply(base.EngineReply, gc=False):
    choices: list[Choice] = msgspec.field(default_factory=list)


class ChoiceReader(TokenReader[_Reply]):
    """Reader of replies with versions in each event (embedded), or at the end (vLLM)."""

    decoder = msgspec.json.Decoder(_Reply)

    def add(self, reply: _Reply) -> None:
        """Add the first choice."""
        if not reply.choices:
            return
        choice = reply.choices[0]
        latest = self.deltas[-1]
        ids = choice.token_ids or []
        items = choice.logprobs and choice.logprobs.content
        plain = choice.finish_reason is None and choice.weight_versions is None
        ended = latest.finish or latest.spans
        reports_more = latest.kept or choice.sampling_mask or choice.routed_experts
        if plain and items and len(ids) == len(items) == 1 and not (ended or reports_more):
            # fast path for most events of a stream, with the same result as `add_tokens`
            latest.ids.append(ids[0])
            latest.logprobs.append(items[0].logprob)
            self.count += 1
            return
        logprobs = choice.list_logprobs()
        finish = base.parse_finish(choice.finish_reason)
        if choice.token_ids is None and finish not in {None, Finish.ABORT} and not self.count:
            raise EngineError(self.missing_ids)
        experts = reports.read_experts(choice.routed_experts, choice.routed_experts_start)
        self.make_room(experts)
        kept = reports.read_kept(choice.sampling_mask)
        spans = base.parse_spans(choice.weight_versions)
        start = self.count
        if not spans or spans[0].start < start:
            self.add_tokens(ids, logprobs, finish, spans=spans, kept=kept)
        else:
            for span in spans:
                last = span is spans[-1]
                part = slice(span.start - start, None if last else span.end - start)
                end = finish if last else None
                self.add_tokens(ids[part], logprobs[part], end, span.version, kept=kept[part])
        self.add_experts(experts)


# --------------------------------------------------------------------------- formats
class Generate(TokenFormat):
    """Route ``/inference/v1/generate``; replies report their weight versions."""

    path = "/inference/v1/generate"
    prompt_field = b"token_ids"
    reader = ChoiceReader
    missing_ids = "the engine sent no token ids"

    def build_fields(self, ask: base.EngineRequest) -> dict[str, Any]:
        """Build the body without its prompt."""
        return {
            "model": ask.model,
            "sampling_params": build_sampling(ask),
            "stream": True,
            "request_id": ask.request_id,
        }


class Embedded(Generate):
    """Format of the embedded engine; logprobs are of the distribution sampled from.

    It always reports experts, if its model has any, and kept sets.
    """

    name = "embedded"
    features = frozenset({base.Feature.EXPERTS, base.Feature.KEPT})
    advice = "this server is not Tugline's embedded engine"
    abort_path = "/abort_requests"


class Vllm(base.EngineFormat):
    """Base of vLLM's formats.

    A vLLM that reports kept sets requires a ``top_k`` and a temperature above 0.
    """

    name = "vllm"

    def adapt_sampling(self, sampling: Sampling) -> Sampling:
        """See `EngineFormat.adapt_sampling`.

        Greedily, the likeliest token is the only one left, with a log probability of 0.
        """
        if not self.kept:
            return sampling
        if sampling.temperature == 0:
            return replace(sampling, temperature=1.0, top_k=1)
        return replace(sampling, top_k=sampling.top_k or INT32)


class VllmGenerate(Vllm, Generate):
    """Exact mode of vLLM with weight versions; the server needs ``--enable-scale-out``.

    Options of the server, not fields of a request, make it report experts and kept sets.
    """

    features = TokenFormat.features | {base.Feature.EXPERTS, base.Feature.KEPT}
    advice = "start vLLM with --enable-scale-out"
    abort_path = "/inference/v1/abort_requests"
    abort_id = "generate-tokens-{}"
    default_meaning = LogprobMeaning.RAW


class VllmCompletions(Vllm, TokenFormat):
    """Exact mode of vLLM without ``--enable-scale-out``; replies have no weight versions.

    Aborts need the server's development routes.
    """

    advice = "upgrade to vLLM 0.10.2 or later"
    path = "/v1/completions"
    prompt_field = b"prompt"
    reader = ChoiceReader
    missing_ids = "vllm sent no token ids: `return_token_ids` needs vLLM 0.10.2 or later"
    abort_path = "/abort_requests"
    abort_id = "cmpl-{}-0"
    default_meaning = LogprobMeaning.RAW

    def build_fields(self, ask: base.EngineRequest) -> dict[str, Any]:
        """Build the body without its prompt."""
        return {
            **build_sampling(ask),
            "model": ask.model,
            "stream": True,
            "return_token_ids": True,
            "request_id": ask.request_id,
        }


# --------------------------------------------------------------------------- settings
def build_sampling(ask: base.EngineRequest) -> dict[str, Any]:
    """Build vLLM's sampling parameters."""
    sampling = ask.sampling
    constraint = ask.request.constraint
    params: dict[str, Any] = base.NEUTRAL | {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or 0,
        "min_p": sampling.min_p or 0.0,
        "seed": sampling.seed,
        "stop_token_ids": ask.stop_ids,
        "logprobs": 0,
        "stream_interval": ask.stream_interval,
        "logit_bias": build_bans(ask.banned),
        "structured_outputs": None if constraint is None else build_structured(constraint),
    }
    return {name: value for name, value in params.items() if value is not None}


def build_bans(banned: tuple[int, ...]) -> dict[str, float] | None:
    """Build a logit bias that excludes the ids; None for no ids."""
    return {str(token): -100.0 for token in banned} or None


def build_structured(constraint: Constraint) -> dict[str, Any]:
    """Build vLLM's field for constrained decoding."""
    if constraint.kind is ConstraintKind.JSON_OBJECT:
        return {"json_object": True}
    return {"json": msgspec.json.decode(constraint.schema)}
