"""litellm as OpenAI's and as vLLM's client: chat, streamed and whole, and completions."""

from __future__ import annotations

import json
import os
from typing import Any

import litellm

BASE = os.environ["OPENAI_BASE_URL"]
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
COMMON: dict[str, Any] = {
    "api_base": BASE,
    "api_key": os.environ["OPENAI_API_KEY"],
    "temperature": 0,
    "max_tokens": 24,
    "num_retries": 0,
}
found: dict[str, Any] = {}
for provider in ("openai", "hosted_vllm"):
    for model in ("smollm2", "shout"):
        whole: Any = litellm.completion(model=f"{provider}/{model}", messages=MESSAGES, **COMMON)
        stream: Any = litellm.completion(model=f"{provider}/{model}", messages=MESSAGES, stream=True, **COMMON)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        found[f"{provider}/{model}"] = [whole.choices[0].message.content, text]
        found["tokens"] = whole.usage.completion_tokens
text_completion: Any = litellm.text_completion(
    model="text-completion-openai/smollm2", prompt="The capital of France is", **COMMON
)
found["text"] = text_completion.choices[0].text
try:
    litellm.completion(model="openai/nobody", messages=MESSAGES, **COMMON)
except litellm.NotFoundError as error:
    found["unknown"] = error.status_code
print(json.dumps(found))
