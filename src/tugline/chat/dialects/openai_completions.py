"""OpenAI text completions: a prompt that is continued as it is, without a template.

The prompt is one text, or the token ids of one. The answer is the text of the sampled ids as it is,
with white space and written-out special tokens, up to the id that ends it. The log probability of
each sampled token is known, those of other tokens and of the prompt are not.
"""

from collections.abc import Sequence
from itertools import accumulate, count
from typing import Any, ClassVar

from msgspec import Raw

from tugline.chat.dialects import base, decoding, openai
from tugline.chat.model_call import Piece, Request, Response, TextDelta, Usage

_REFUSALS: dict[str, tuple[Any, ...]] = {
    "logprobs": (0,),
    "suffix": ("",),
    "best_of": (1,),
    "add_special_tokens": (True,),
    **dict.fromkeys(("include_stop_str_in_output", "return_token_ids"), (False,)),
    **dict.fromkeys(("prompt_embeds", "response_format", "use_beam_search"), ()),
    "truncate_prompt_tokens": (),
    **openai.REFUSALS,
}
"""Fields that change the response, and their values that ask for nothing unusual."""


class _Body(openai.ChoiceFields, kw_only=True):
    prompt: Any = None
    echo: bool | None = None
    logprobs: int | None = None


_decoder = decoding.decoder_with_refusals(_Body, _REFUSALS)


class _TextStream(openai.ChoiceStream):
    """Responses as server-sent events; log probabilities come with the last of each."""

    label = "text_completion", "cmpl"

    def start(self, usage: Usage) -> bytes:
        return b"".join(self._add(i, self.request.echo.decode()) for i in range(self.request.n))

    def add(self, piece: Piece, index: int = 0) -> bytes:
        return self._add(index, piece.text if isinstance(piece, TextDelta) else "")

    def finish_choice(self, index: int, response: Response) -> bytes:
        return self._add(index, "", response)

    def _add(self, index: int, text: str, response: Response | None = None) -> bytes:
        return self.before + _encode_choice(index, text, response) + self.after


class OpenAICompletions(openai.OpenAIDialect):
    """``POST /completions``."""

    name = "openai_completions"
    stream_type = _TextStream
    posts: ClassVar = {"/completions": base.Action.ANSWER}
    fields: ClassVar = {"messages": "prompt"}

    def parse(self, request: base.HttpRequest, cache: decoding.ParseCache) -> Request:
        """See `Dialect.parse`."""
        body = decoding.decode(request.body, _decoder, "the request body")
        decoding.check_refusals(body, _REFUSALS)
        prompt, options = _parse_prompt(body.prompt), body.stream_options
        if body.echo and (body.logprobs is not None or not isinstance(prompt, str)):
            advice = " with logprobs, or with a prompt of ids; it must be false"
            raise decoding.unsupported(value=True, place="echo", advice=advice)
        return Request(
            model=body.model, prompt=prompt, logprobs=body.logprobs is not None,
            sampling=body.build_sampling(body.max_tokens or 16, body.stop), n=body.n or 1,
            stream=bool(body.stream), usage_in_stream=bool(options and options.include_usage),
            echo=str(prompt).encode() if body.echo else b"",
            thread=openai.find_thread(request.headers),
        )  # fmt: skip

    def encode(self, request: Request, responses: Sequence[Response]) -> bytes:
        """A ``text_completion`` object with one choice for each response."""
        texts = [request.echo.decode() + response.message.content for response in responses]
        choices = [Raw(_encode_choice(*one)) for one in zip(count(), texts, responses)]
        return openai.encode_choices(_TextStream.label, responses, choices)


def _parse_prompt(value: Any) -> str | tuple[int, ...]:
    if isinstance(value, list) and all(type(token) is int for token in value):
        return tuple(value)
    if not isinstance(value, str):
        problem = "must be one text or the ids of one; each prompt needs a request of its own"
        raise decoding.invalid(value, "prompt", problem)
    return value


def _encode_choice(index: int, text: str, response: Response | None = None) -> bytes:
    reason = None if response is None else openai.find_reason(response)
    logprobs: dict[str, Any] | None = None
    if response is not None and response.tokens:
        texts, values = zip(*response.tokens, strict=True)
        offsets = list(accumulate(map(len, texts[:-1]), initial=0))
        logprobs = {"tokens": texts, "token_logprobs": values, "text_offset": offsets}
        logprobs["top_logprobs"] = [{text: value} for text, value in response.tokens]
    choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
    return base.encode(choice)
