"""OpenAI Agents SDK: an agent with a tool, over Responses (its default) or Chat Completions."""

import asyncio
import json
import sys

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

URL, KEY, API, HOW = sys.argv[1:]
read_paths: list[str] = []


@function_tool
def read(path: str) -> str:
    """Read a file."""
    read_paths.append(path)
    return f"{path} is there"


async def main() -> str:
    """What it says in the end."""
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY)
    make = OpenAIResponsesModel if API == "openai_responses" else OpenAIChatCompletionsModel
    model = make("m", openai_client=client)
    agent = Agent(name="Reader", instructions="You read.", tools=[read], model=model)
    if HOW == "whole":
        return str((await Runner.run(agent, "Mend it.")).final_output)
    result = Runner.run_streamed(agent, "Mend it.")
    async for _ in result.stream_events():
        pass
    return str(result.final_output)


set_tracing_disabled(disabled=True)
print(json.dumps({"text": asyncio.run(main()), "read": read_paths}))
