"""pydantic-ai: answers of a type, by a tool's call and as JSON, and an agent that calls tools."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIChatModelSettings

QUESTION = "What is the capital of France?"
SETTINGS = OpenAIChatModelSettings(temperature=0, max_tokens=160)


class Answer(BaseModel):
    capital: str = Field(max_length=20)
    continent: Literal["Europe", "Asia"]


async def main() -> dict[str, Any]:
    base, calls = OpenAIChatModel("smollm2"), OpenAIChatModel("calls")
    by_tool = await Agent(base, output_type=Answer, model_settings=SETTINGS).run(QUESTION)
    by_format = await Agent(base, output_type=NativeOutput(Answer), model_settings=SETTINGS).run(QUESTION)
    asked: list[str] = []
    agent = Agent(calls, model_settings=SETTINGS)

    @agent.tool_plain
    def capital(of: str) -> str:
        asked.append(of)
        return "Paris"

    async with agent.iter(QUESTION) as run:
        async for _ in run:
            if asked:
                break
    return {"tool": by_tool.output.model_dump(), "format": by_format.output.model_dump(), "asked": asked}


print(json.dumps(asyncio.run(main())))
