"""litellm: a loop over its `completion`, with the providers of three APIs."""

import json

import litellm
from framework_script import read, run

MODELS = {
    "openai_chat": ("openai/m", "/v1"),
    "anthropic": ("anthropic/m", ""),
    "google": ("gemini/m", "/v1beta/models/m"),
}
TOOL = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "Read a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    },
}


async def main(url: str, key: str, api: str, *, streamed: bool) -> str:
    """Run the agent; return its last answer."""
    model, path = MODELS[api]
    messages = [{"role": "system", "content": "You read."}, {"role": "user", "content": "Mend it."}]
    while True:
        answer = await litellm.acompletion(
            model, messages, tools=[TOOL], api_base=url + path, api_key=key, stream=streamed
        )
        if streamed:
            answer = litellm.stream_chunk_builder([chunk async for chunk in answer], messages)
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            content = read(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


run(main)
