"""Exact mode: token ids in, token ids out.

`TokenFormat` and `TokenReader` serve every engine that takes ids; a subclass names the route, the
fields of its body, and where its reply has the ids, the log probability of each, and the weight
versions. The route ``/inference/v1/generate``, which the embedded engine and vLLM share, is here.
"""

from abc import abstractmethod
from typing import Any

import msgspec

from tugline.chat.engines import base
from tugline.chat.model_call import Constraint, ConstraintKind
from tugline.errors import EngineError
from tugline.types import Finish, Mode, VersionSpan


class TokenFormat(base.EngineFormat):
    """A route that takes the prompt's ids."""

    mode = Mode.EXACT
    path: str
    prompt_field: bytes

    @abstractmethod
    def build_fields(self, request: base.EngineRequest) -> dict[str, Any]:
        """Build the body without its prompt."""

    def build_request(self, request: base.EngineRequest) -> base.Post:
        """Join the prompt's ready-made digits with the settings."""
        if request.prompt is None:
            msg = f"{self.name} takes token ids; the prompt was not rendered"
            raise EngineError(msg)
        fields = msgspec.json.encode(self.build_fields(request))
        before = b'{"' + self.prompt_field + b'":['
        return base.Post(self.path, request.prompt.to_json(before, b"]," + fields[1:]))


class TokenReader(base.Reader[base.R]):
    """Reads token-out replies."""

    advice = "ask it for the logprob of every sampled token"

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
            msg = f"engine sent {len(ids)} token ids, {len(logprobs)} logprobs; {self.advice}"
            raise EngineError(msg)
        last = self.deltas[-1]
        changed = spans or (version is not None and version != last.version)
        if last.finish or last.spans or (changed and last.ids):
            last = base.DeltaBuilder()
            self.deltas.append(last)
        last.ids += ids
        last.logprobs += logprobs
        last.finish, last.spans = finish, spans
        if version is not None:
            last.version = version
        self.count += len(ids)


# --------------------------------------------------------------------------- /inference/v1/generate
class Generate(TokenFormat):
    """The route ``/inference/v1/generate``; replies say their weight versions."""

    path = "/inference/v1/generate"
    prompt_field = b"token_ids"

    def build_fields(self, request: base.EngineRequest) -> dict[str, Any]:
        """Build the body without its prompt."""
        return {
            "model": request.model,
            "sampling_params": build_sampling(request),
            "stream": request.stream,
            "request_id": request.request_id,
        }

    def make_reader(self, request: base.EngineRequest) -> base.Reader[Any]:
        """Make a reader."""
        return _GenerateReader()


class Embedded(Generate):
    """The embedded engine; its logprobs are of the distribution really sampled from."""

    name = "embedded"
    abort_path = "/abort_requests"


def build_sampling(request: base.EngineRequest) -> dict[str, Any]:
    """Build the sampling settings as vLLM names them."""
    sampling = request.sampling
    params: dict[str, Any] = base.NEUTRAL | {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or 0,
        "stop_token_ids": request.stop_ids,
        "logprobs": 0,
    }
    if sampling.seed is not None:
        params["seed"] = sampling.seed
    if request.banned:
        params["logit_bias"] = build_bans(request.banned)
    if request.constraint is not None:
        params["structured_outputs"] = build_structured(request.constraint)
    return params


def build_bans(banned: tuple[int, ...]) -> dict[str, float]:
    """Build a bias under which the ids are never sampled."""
    return {str(token): -100.0 for token in banned}


def build_structured(constraint: Constraint) -> dict[str, Any]:
    """Build vLLM's field for constrained decoding."""
    if constraint.kind is ConstraintKind.JSON_OBJECT:
        return {"json_object": True}
    if constraint.kind is ConstraintKind.JSON_SCHEMA:
        return {"json": msgspec.json.decode(constraint.schema)}
    return {str(constraint.kind): constraint.schema}


class _Logprob(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Logprob] = []


class _Choice(msgspec.Struct, gc=False):
    token_ids: list[int] = []
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[base.ReportedSpan] | None = None


class _Reply(base.EngineReply, gc=False):
    choices: list[_Choice] = msgspec.field(default_factory=list)


class _GenerateReader(TokenReader[_Reply]):
    """Reads versions event by event (embedded), or for the whole reply at its end (vLLM)."""

    decoder = msgspec.json.Decoder(_Reply)

    def add(self, reply: _Reply) -> None:
        """Add the first choice."""
        if not reply.choices:
            return
        choice = reply.choices[0]
        content = choice.logprobs.content if choice.logprobs is not None else []
        logprobs = [item.logprob for item in content]
        finish = base.parse_finish(choice.finish_reason)
        spans = base.parse_spans(choice.weight_versions)
        start = self.count
        if not spans:
            self.add_tokens(choice.token_ids, logprobs, finish)
        elif spans[0].start < start:
            self.add_tokens(choice.token_ids, logprobs, finish, spans=spans)
        else:
            for span in spans:
                last = span is spans[-1]
                part = slice(span.start - start, None if last else span.end - start)
                self.add_tokens(
                    choice.token_ids[part], logprobs[part], finish if last else None, span.version
                )
