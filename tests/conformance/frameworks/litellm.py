"""litellm: a loop over its `completion`, with the providers of three APIs."""

import asyncio
import json
import sys

import litellm

URL, KEY, API, HOW = sys.argv[1:]
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
read_paths: list[str] = []


async def main() -> str:
    """What it says in the end."""
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
            path = json.loads(call.function.arguments)["path"]
            read_paths.append(path)
            result = {"role": "tool", "tool_call_id": call.id, "content": f"{path} is there"}
            messages.append(result)


print(json.dumps({"text": asyncio.run(main()), "read": read_paths}))
