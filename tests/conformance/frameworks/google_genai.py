"""google-genai: a chat that calls Python functions by itself."""

import asyncio

from framework_script import HOW, KEY, URL, read, report
from google import genai
from google.genai import types


async def main() -> str:
    """Run the agent; return its last answer."""
    client = genai.Client(api_key=KEY, http_options=types.HttpOptions(base_url=URL))
    config = types.GenerateContentConfig(system_instruction="You read.", tools=[read])
    chat = client.aio.chats.create(model="m", config=config)
    if HOW == "whole":
        return (await chat.send_message("Mend it.")).text or ""
    text = ""
    async for chunk in await chat.send_message_stream("Mend it."):
        text = "" if chunk.function_calls else text + (chunk.text or "")
    return text


report(asyncio.run(main()))
