"""Microsoft's Agent Framework, over Chat Completions or Responses."""

from agent_framework import Agent
from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient
from framework_script import read, run


async def main(url: str, key: str, api: str, *, streamed: bool) -> str:
    """Run the agent; return its last answer."""
    kind = OpenAIChatClient if api == "openai_responses" else OpenAIChatCompletionClient
    client = kind(model="m", base_url=f"{url}/v1", api_key=key)
    agent = Agent(client=client, instructions="You read.", tools=[read])
    if not streamed:
        return (await agent.run("Mend it.")).messages[-1].text
    stream = agent.run("Mend it.", stream=True)
    async for _ in stream:
        pass
    return (await stream.get_final_response()).messages[-1].text


run(main)
