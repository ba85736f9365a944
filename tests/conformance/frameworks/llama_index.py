"""LlamaIndex: its agent for models that call functions, over Chat Completions or Responses."""

import asyncio

from framework_script import API, HOW, KEY, URL, read, report
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai import OpenAI, OpenAIResponses


async def main() -> str:
    """Run the agent; return its last answer."""
    make = OpenAIResponses if API == "openai_responses" else OpenAI
    llm = make(model="gpt-4.1", api_base=f"{URL}/v1", api_key=KEY)
    agent = FunctionAgent(
        tools=[read], llm=llm, system_prompt="You read.", streaming=HOW == "streamed"
    )
    return str(await agent.run("Mend it."))


report(asyncio.run(main()))
