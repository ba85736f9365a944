"""Strands Agents, over Chat Completions, streamed only."""

from framework_script import read, run
from strands import Agent, tool
from strands.models.openai import OpenAIModel


async def main(url: str, key: str, _: str, *, streamed: bool) -> str:
    """Run the agent; return its last answer."""
    assert streamed
    model = OpenAIModel(client_args={"base_url": f"{url}/v1", "api_key": key}, model_id="m")
    agent = Agent(model=model, tools=[tool(read)], system_prompt="You read.", callback_handler=None)
    return str(await agent.invoke_async("Mend it.")).strip()


run(main)
