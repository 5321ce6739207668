"""The same requests to a vLLM and to a router: whether greedy texts are equal, and where the answers' forms differ.

    python tests/clients/compare.py VLLM_URL OUR_URL OUR_KEY [--adapter NAME] [--prompt-logprobs | --tools]

Both serve the same model as `smollm2`, in float32, and NAME. vLLM 0.32 on a CPU dies of a prompt's log-probabilities
where it has LoRA: ask for these without it. For --tools the model is that of `tests.real_model.taught_to_call`, and
vLLM has --enable-auto-tool-choice --tool-call-parser hermes.
"""

from __future__ import annotations

import argparse
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple

CHAT = [{"role": "user", "content": "What is the capital of France?"}]
TEXT = "The capital of France is"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 16}
COMPLETION, CHATS = "/v1/completions", "/v1/chat/completions"
VALUES = ("id", "created", "system_fingerprint", "request_id")  # that differ by their nature
TOLERANCE = 1e-3


class Case(NamedTuple):
    name: str
    path: str
    body: dict[str, Any] | None = None  # None: GET


def cases(model: str) -> list[Case]:
    chat = {"model": model, "messages": CHAT, **GREEDY}
    text = {"model": model, "prompt": TEXT, **GREEDY}
    return [
        Case("chat", CHATS, chat),
        Case("chat, streamed", CHATS, {**chat, "stream": True, "stream_options": {"include_usage": True}}),
        Case("chat, logprobs", CHATS, {**chat, "logprobs": True, "top_logprobs": 2}),
        Case("chat, n and stop", CHATS, {**chat, "n": 2, "stop": ["France"]}),
        Case("completion", COMPLETION, text),
        Case("completion, streamed", COMPLETION, {**text, "stream": True}),
        Case("completion, logprobs", COMPLETION, {**text, "logprobs": 2}),
        Case("completion, token ids", COMPLETION, {**text, "return_token_ids": True}),
        Case("completion, echo", COMPLETION, {**text, "echo": True}),
        Case("completion, stop token", COMPLETION, {**text, "stop_token_ids": [30]}),
        Case("completion, allowed tokens", COMPLETION, {**text, "allowed_token_ids": [216, 284, 30]}),
        Case("completion, bad words", COMPLETION, {**text, "bad_words": ["Paris"]}),
        Case("completion, penalties", COMPLETION, {**text, "repetition_penalty": 1.3, "presence_penalty": 0.5}),
        Case("messages", "/v1/messages", chat),
        Case("responses", "/v1/responses", {"model": model, "input": CHAT, "temperature": 0, "max_output_tokens": 16}),
        Case("models", "/v1/models"),
        Case("tokenize", "/tokenize", {"model": model, "prompt": TEXT, "return_token_strs": True}),
        Case("detokenize", "/detokenize", {"model": model, "tokens": [504, 3575]}),
        Case("tokenizer_info", "/tokenizer_info"),
        Case("unknown model", CHATS, {**chat, "model": "nobody"}),
        Case("wrong field", CHATS, {**chat, "temperature": -1}),
        Case("unknown field", CHATS, {**chat, "nobody": 1}),
    ]


def prompt_cases() -> list[Case]:
    text = {"model": "smollm2", "prompt": TEXT, "temperature": 0}
    return [
        Case("echo, logprobs", COMPLETION, {**text, "echo": True, "logprobs": 1, "max_tokens": 1}),
        Case("echo, no output", COMPLETION, {**text, "echo": True, "logprobs": 1, "max_tokens": 0}),
        Case("prompt_logprobs", COMPLETION, {**text, "prompt_logprobs": 2, "max_tokens": 4}),
        Case("chat, prompt_logprobs", CHATS, {"model": "smollm2", "messages": CHAT, **GREEDY, "prompt_logprobs": 1}),
    ]


def tool_cases() -> list[Case]:
    schema = {"type": "object", "properties": {"of": {"enum": ["France", "Italy"]}}, "required": ["of"]}
    tools = [{"type": "function", "function": {"name": "capital", "parameters": schema}}]
    chat: dict[str, Any] = {"model": "smollm2", "messages": CHAT, "tools": tools, "temperature": 0, "max_tokens": 60}
    named = {"type": "function", "function": {"name": "capital"}}
    typed = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    plain = {**chat, "tools": None, "response_format": typed}
    return [
        Case("tools, auto", CHATS, chat),
        Case("tools, required", CHATS, {**chat, "tool_choice": "required", "parallel_tool_calls": False}),
        Case("tools, named", CHATS, {**chat, "tool_choice": named}),
        Case("tools, named, streamed", CHATS, {**chat, "tool_choice": named, "stream": True}),
        Case("response_format", CHATS, plain),
        Case("choice", CHATS, {**chat, "tools": None, "structured_outputs": {"choice": ["Paris", "Rome"]}}),
    ]


def ask(url: str, case: Case, key: str) -> tuple[int, Any]:
    """The status, and the answer: of a stream, its events."""
    headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
    data = None if case.body is None else json.dumps(case.body).encode()
    request = urllib.request.Request(url + case.path, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            status, body = answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        status, body = error.code, error.read().decode()
    if case.body is not None and case.body.get("stream"):
        events = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
        return status, [json.loads(each) for each in events if each != "[DONE]"]
    return status, json.loads(body)


def texts(case: Case, answer: Any) -> list[str]:
    if isinstance(answer, list):
        return ["".join(texts_of(choice) for event in answer for choice in event["choices"])]
    if "choices" in answer:
        return [texts_of(choice) for choice in answer["choices"]]
    parts = answer.get("content") or [part for item in answer.get("output", ()) for part in item.get("content") or ()]
    return [part["text"] for part in parts if isinstance(part, dict) and "text" in part]


def texts_of(choice: dict[str, Any]) -> str:
    part = choice.get("message") or choice.get("delta") or choice
    return str(part.get("content") or part.get("text") or "")


def differences(theirs: Any, ours: Any, path: str = "") -> Iterator[str]:
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for name in sorted(theirs.keys() | ours.keys()):
            inner = f"{path}.{name}".lstrip(".")
            if name not in ours:
                if theirs[name] is not None:
                    yield f"{inner}: theirs alone ({json.dumps(theirs[name])[:60]})"
            elif name not in theirs:
                if ours[name] is not None:
                    yield f"{inner}: ours alone ({json.dumps(ours[name])[:60]})"
            elif name not in VALUES:
                yield from differences(theirs[name], ours[name], inner)
    elif isinstance(theirs, list) and isinstance(ours, list):
        if len(theirs) != len(ours):
            yield f"{path}: {len(theirs)} of theirs, {len(ours)} of ours"
        for index, (one, other) in enumerate(zip(theirs, ours, strict=False)):
            yield from differences(one, other, f"{path}[{index}]")
    elif isinstance(theirs, float) and isinstance(ours, float):
        if abs(theirs - ours) > TOLERANCE:
            yield f"{path}: {theirs} of theirs, {ours} of ours"
    elif theirs != ours:
        yield f"{path}: {json.dumps(theirs)[:60]} of theirs, {json.dumps(ours)[:60]} of ours"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vllm")
    parser.add_argument("ours")
    parser.add_argument("key")
    parser.add_argument("--adapter", default="smollm2")
    parser.add_argument("--prompt-logprobs", action="store_true")
    parser.add_argument("--tools", action="store_true")
    given = parser.parse_args()
    unequal = []
    asked = prompt_cases() if given.prompt_logprobs else tool_cases() if given.tools else cases(given.adapter)
    for case in asked:
        (their_status, theirs), (our_status, ours) = ask(given.vllm, case, ""), ask(given.ours, case, given.key)
        is_equal = their_status != 200 or our_status != 200 or texts(case, theirs) == texts(case, ours)
        unequal += [] if is_equal else [case.name]
        print(f"{case.name}: {their_status} {our_status}, {'texts equal' if is_equal else 'TEXTS DIFFER'}")
        for each in differences(theirs, ours):
            print(f"    {each}")
    if unequal:
        raise SystemExit(f"texts differ: {', '.join(unequal)}")


if __name__ == "__main__":
    main()
