"""smolagents: the agent that calls tools, over Chat Completions."""

from framework_script import HOW, KEY, URL, read, report
from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool

model = OpenAIModel("m", api_base=f"{URL}/v1", api_key=KEY)
agent = ToolCallingAgent(
    [tool(read)], model, stream_outputs=HOW == "streamed", verbosity_level=LogLevel.OFF
)
report(str(agent.run("Mend it.")))
