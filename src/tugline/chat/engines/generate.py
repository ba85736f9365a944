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

from tugline.chat.engines import base
from tugline.chat.model_call import Constraint, ConstraintKind
from tugline.errors import EngineError
from tugline.types import Finish, LogprobMeaning, Mode, VersionSpan


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
        fields = msgspec.json.encode(self.build_fields(ask))
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
    ) -> None:
        """Add tokens of one version; `spans` override the version of the whole reply so far."""
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
        last.ids += ids
        last.logprobs += logprobs
        last.finish = finish
        last.spans = spans
        if version is not None:
            last.version = version
        self.count += len(ids)


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
        if plain and items and len(ids) == len(items) == 1 and not (latest.finish or latest.spans):
            # fast path for most events of a stream, with the same result as `add_tokens`
            latest.ids.append(ids[0])
            latest.logprobs.append(items[0].logprob)
            self.count += 1
            return
        logprobs = choice.list_logprobs()
        finish = base.parse_finish(choice.finish_reason)
        if choice.token_ids is None and finish not in {None, Finish.ABORT} and not self.count:
            raise EngineError(self.missing_ids)
        spans = base.parse_spans(choice.weight_versions)
        start = self.count
        if not spans or spans[0].start < start:
            self.add_tokens(ids, logprobs, finish, spans=spans)
        else:
            for span in spans:
                last = span is spans[-1]
                part = slice(span.start - start, None if last else span.end - start)
                self.add_tokens(ids[part], logprobs[part], finish if last else None, span.version)


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
    """Format of the embedded engine; logprobs are of the distribution sampled from."""

    name = "embedded"
    features = frozenset()
    advice = "this server is not Tugline's embedded engine"
    abort_path = "/abort_requests"


class VllmGenerate(Generate):
    """Exact mode of vLLM with weight versions; the server needs ``--enable-scale-out``."""

    name = "vllm"
    advice = "start vLLM with --enable-scale-out"
    abort_path = "/inference/v1/abort_requests"
    abort_id = "generate-tokens-{}"
    default_meaning = LogprobMeaning.RAW


class VllmCompletions(TokenFormat):
    """Exact mode of vLLM without ``--enable-scale-out``; replies have no weight versions.

    Aborts need the server's development routes.
    """

    name = "vllm"
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
