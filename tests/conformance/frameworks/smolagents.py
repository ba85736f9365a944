"""smolagents: the agent that calls tools, over Chat Completions."""

from framework_script import read, run
from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool


async def main(url: str, key: str, _api: str, *, streamed: bool) -> str:
    """Run the agent; return its last answer."""
    model = OpenAIModel("m", api_base=f"{url}/v1", api_key=key)
    agent = ToolCallingAgent(
        [tool(read)], model, stream_outputs=streamed, verbosity_level=LogLevel.OFF
    )
    return str(agent.run("Mend it."))


run(main)
