"""langchain-openai: chat, streamed and whole, a batch, and the older completions."""

from __future__ import annotations

import json
from typing import Any

from langchain_openai import ChatOpenAI, OpenAI

QUESTION = "What is the capital of France?"
found: dict[str, Any] = {}
for model in ("smollm2", "shout"):
    chat = ChatOpenAI(model=model, temperature=0, max_tokens=24, max_retries=0)
    answer = chat.invoke(QUESTION)
    found[model] = [answer.content, "".join(str(chunk.content) for chunk in chat.stream(QUESTION))]
    found[f"{model} batch"] = [each.content for each in chat.batch([QUESTION, QUESTION])]
    found[f"{model} tokens"] = (answer.usage_metadata or {}).get("output_tokens")
scored = ChatOpenAI(model="smollm2", temperature=0, max_tokens=2, max_retries=0, logprobs=True, top_logprobs=2)
found["logprobs"] = len(scored.invoke(QUESTION).response_metadata["logprobs"]["content"])
found["text"] = OpenAI(model="smollm2", temperature=0, max_tokens=24, max_retries=0).invoke("The capital of France is")
print(json.dumps(found))
