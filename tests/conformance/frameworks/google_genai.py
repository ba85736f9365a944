"""google-genai: a chat that calls Python functions by itself."""

from framework_script import read, run
from google import genai
from google.genai import types


async def main(url: str, key: str, _api: str, *, streamed: bool) -> str:
    """Run the agent; return its last answer."""
    client = genai.Client(api_key=key, http_options=types.HttpOptions(base_url=url))
    config = types.GenerateContentConfig(system_instruction="You read.", tools=[read])
    chat = client.aio.chats.create(model="m", config=config)
    if not streamed:
        return (await chat.send_message("Mend it.")).text or ""
    text = ""
    async for chunk in await chat.send_message_stream("Mend it."):
        text = "" if chunk.function_calls else text + (chunk.text or "")
    return text


run(main)
