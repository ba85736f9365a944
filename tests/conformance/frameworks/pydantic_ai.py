"""pydantic-ai: an agent with a tool, over each of the four APIs."""

from collections.abc import AsyncIterable

from framework_script import read, run
from pydantic_ai import Agent
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.google import GoogleModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.google import GoogleProvider
from pydantic_ai.providers.openai import OpenAIProvider


def make_model(url: str, key: str, api: str) -> Model:
    """The model of this API."""
    if api == "anthropic":
        return AnthropicModel("m", provider=AnthropicProvider(api_key=key, base_url=url))
    if api == "google":
        return GoogleModel("m", provider=GoogleProvider(api_key=key, base_url=url))
    make = OpenAIResponsesModel if api == "openai_responses" else OpenAIChatModel
    return make("m", provider=OpenAIProvider(base_url=f"{url}/v1", api_key=key))


async def listen(_: object, events: AsyncIterable[object]) -> None:
    """Have answers streamed."""
    async for _event in events:
        pass


async def main(url: str, key: str, api: str, *, streamed: bool) -> str:
    """Run the agent; return its last answer."""
    agent = Agent(make_model(url, key, api), system_prompt="You read.", tools=[read])
    if not streamed:
        return (await agent.run("Mend it.")).output
    return (await agent.run("Mend it.", event_stream_handler=listen)).output


run(main)
