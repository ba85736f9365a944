"""litellm: a loop over its `completion`, with the providers of three APIs."""

import asyncio
import json

import litellm
from framework_script import API, HOW, KEY, URL, read, report

MODELS = {"openai_chat": ("openai/m", f"{URL}/v1"), "anthropic": ("anthropic/m", URL)}
MODELS["google"] = ("gemini/m", f"{URL}/v1beta/models/m")
TOOL = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "Read a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    },
}


async def main() -> str:
    """Run the agent; return its last answer."""
    model, base = MODELS[API]
    messages = [{"role": "system", "content": "You read."}, {"role": "user", "content": "Mend it."}]
    while True:
        answer = await litellm.acompletion(
            model, messages, tools=[TOOL], api_base=base, api_key=KEY, stream=HOW == "streamed"
        )
        if HOW == "streamed":
            answer = litellm.stream_chunk_builder([chunk async for chunk in answer], messages)
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            content = read(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


report(asyncio.run(main()))
