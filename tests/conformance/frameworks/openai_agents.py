"""OpenAI Agents SDK: an agent with a tool, over Responses (its default) or Chat Completions."""

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from framework_script import read, run
from openai import AsyncOpenAI


async def main(url: str, key: str, api: str, *, streamed: bool) -> str:
    """Run the agent; return its last answer."""
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key)
    make = OpenAIResponsesModel if api == "openai_responses" else OpenAIChatCompletionsModel
    model = make("m", openai_client=client)
    agent = Agent(name="Reader", instructions="You read.", tools=[function_tool(read)], model=model)
    if not streamed:
        return str((await Runner.run(agent, "Mend it.")).final_output)
    result = Runner.run_streamed(agent, "Mend it.")
    async for _ in result.stream_events():
        pass
    return str(result.final_output)


set_tracing_disabled(disabled=True)
run(main)
