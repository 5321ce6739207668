"""How models write calls of tools and reasoning, by the names that a router's settings take."""

from typing import Literal

ToolParser = Literal[
    "auto", "none", "gpt-oss", "mistral", "mistral-list", "gemma", "function-gemma", "qwen-coder", "hermes", "llama"
]
ReasoningParser = Literal["auto", "none", "gpt-oss", "think", "mistral", "gemma"]
