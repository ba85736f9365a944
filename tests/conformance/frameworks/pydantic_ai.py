"""pydantic-ai: an agent with a tool, over each of the four APIs."""

import asyncio
from collections.abc import AsyncIterable

from framework_script import API, HOW, KEY, URL, read, report
from pydantic_ai import Agent
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.google import GoogleModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.google import GoogleProvider
from pydantic_ai.providers.openai import OpenAIProvider


def make_model() -> Model:
    """The model of this API."""
    if API == "anthropic":
        return AnthropicModel("m", provider=AnthropicProvider(api_key=KEY, base_url=URL))
    if API == "google":
        return GoogleModel("m", provider=GoogleProvider(api_key=KEY, base_url=URL))
    make = OpenAIResponsesModel if API == "openai_responses" else OpenAIChatModel
    return make("m", provider=OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY))


agent = Agent(make_model(), system_prompt="You read.", tools=[read])


async def listen(_: object, events: AsyncIterable[object]) -> None:
    """Have answers streamed."""
    async for _event in events:
        pass


async def main() -> str:
    """Run the agent; return its last answer."""
    if HOW == "whole":
        return (await agent.run("Mend it.")).output
    return (await agent.run("Mend it.", event_stream_handler=listen)).output


report(asyncio.run(main()))
