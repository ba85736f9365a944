"""LlamaIndex: its agent for models that call functions, over Chat Completions or Responses."""

from framework_script import read, run
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai import OpenAI, OpenAIResponses


async def main(url: str, key: str, api: str, *, streamed: bool) -> str:
    """Run the agent; return its last answer."""
    make = OpenAIResponses if api == "openai_responses" else OpenAI
    llm = make(model="gpt-4.1", api_base=f"{url}/v1", api_key=key)
    agent = FunctionAgent(tools=[read], llm=llm, system_prompt="You read.", streaming=streamed)
    return str(await agent.run("Mend it."))


run(main)
