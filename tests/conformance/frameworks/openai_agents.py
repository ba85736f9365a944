"""OpenAI Agents SDK: an agent with a tool, over Responses (its default) or Chat Completions."""

import asyncio

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from framework_script import API, HOW, KEY, URL, read, report
from openai import AsyncOpenAI


async def main() -> str:
    """Run the agent; return its last answer."""
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY)
    make = OpenAIResponsesModel if API == "openai_responses" else OpenAIChatCompletionsModel
    model = make("m", openai_client=client)
    agent = Agent(name="Reader", instructions="You read.", tools=[function_tool(read)], model=model)
    if HOW == "whole":
        return str((await Runner.run(agent, "Mend it.")).final_output)
    result = Runner.run_streamed(agent, "Mend it.")
    async for _ in result.stream_events():
        pass
    return str(result.final_output)


set_tracing_disabled(disabled=True)
report(asyncio.run(main()))
