"""Whatever JSON comes to the HTTP front, the answer is one, and never a failure of the service."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from manylora_router.front.http.api.asked import HARMLESS
from manylora_router.front.http.routes import Routes
from manylora_shared.sampling import PARAMETERS

sys.path.append(str(Path(__file__).parents[1] / "router"))
from router_fakes import RouterCluster, simulate

NAMES = (
    *(row.name for row in PARAMETERS),
    *HARMLESS,
    *("model", "prompt", "messages", "n", "stop", "stop_token_ids", "stream", "stream_options", "logprobs", "echo"),
    *("max_tokens", "max_completion_tokens", "priority", "best_of", "suffix", "tools", "response_format", "tokens"),
    *("return_token_ids", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "lora_name", "lora_path"),
    *("input", "instructions", "max_output_tokens", "text", "metadata", "system", "stop_sequences", "tool_choice"),
    *("chat_template_kwargs", "continue_final_message", "add_generation_prompt"),
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=()), max_size=8)
    | st.sampled_from(["user", "tiny", "text", 10**400, -(2**63), "\ud800", "include_usage"])
)
KEYS = st.sampled_from(["role", "content", "type", "text", "0", "7", "include_usage"]) | st.text(max_size=3)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3))
RIGHT: dict[str, Any] = {
    "prompt": "hi",
    "messages": [{"role": "user", "content": "hi"}],
    "input": "hi",
    "max_tokens": 5,
    "tokens": [107],
    "lora_name": "x",
    "lora_path": "x",
}
NEEDED: dict[str, tuple[str, ...]] = {
    "/v1/completions": ("prompt",),
    "/v1/chat/completions": ("messages",),
    "/v1/responses": ("input",),
    "/v1/messages": ("messages", "max_tokens"),
    "/v1/messages/count_tokens": ("messages",),
    "/tokenize": ("prompt",),
    "/detokenize": ("tokens",),
    "/v1/load_lora_adapter": ("lora_name", "lora_path"),
    "/v1/unload_lora_adapter": ("lora_name",),
}
PATHS = tuple(NEEDED)
DOCUMENTS = st.tuples(
    st.sampled_from(PATHS),
    st.sets(st.sampled_from(sorted(RIGHT))).map(lambda names: {name: RIGHT[name] for name in names}),
    st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4),
)


async def ask(routes: Routes, path: str, body: bytes, key: str) -> list[MutableMapping[str, Any]]:
    sent: list[MutableMapping[str, Any]] = []
    bodies = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> MutableMapping[str, Any]:
        return bodies.pop() if bodies else await asyncio.get_running_loop().create_future()

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    headers = [(b"authorization", b"Bearer " + key.encode()), (b"x-tenant-id", b"acme")]
    scope = {"type": "http", "path": path, "method": "POST", "headers": headers, "client": ("1.2.3.4", 5)}
    await routes(scope, receive, send)
    return sent


async def check(routes: Routes, path: str, document: Any, key: str) -> int:
    body = json.dumps(document).encode()
    first, *rest = await ask(routes, path, body, key)
    assert first["status"] < 500, (path, body, rest)
    assert rest[-1]["more_body"] is False
    if first["status"] != 200:
        error = json.loads(rest[0]["body"])["error"]
        assert {"message", "type"} <= set(error)
        assert error["type"] != "authentication_error"
    return int(first["status"])


async def started(cluster: RouterCluster) -> tuple[Routes, str]:
    key = await cluster.put_key(scopes=("gateway", "operator"))
    await asyncio.sleep(0.1)
    return Routes(cluster.app.door), key


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(DOCUMENTS, min_size=1, max_size=6))
def test_no_document_is_a_failure(documents: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> None:
    async def test(cluster: RouterCluster) -> None:
        routes, key = await started(cluster)
        for path, right, wrong in documents:
            await check(routes, path, {**right, **wrong}, key)
        assert not routes.running

    simulate(test)


ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 10**400, -(2**63), 1e300, "", "x", "\ud800", "\0", "x" * 5000),
    *([], {}, [None], [1], ["\ud800"], [[1]], {"type": "text"}, {"\ud800": 1}, {"0": 1}, {"0": "x"}, [[[]]]),
)


def test_each_field_of_each_route_with_each_odd_value() -> None:
    async def test(cluster: RouterCluster) -> None:
        routes, key = await started(cluster)
        answered = refused = 0
        for path in PATHS:
            for name in NAMES:
                for value in ODD:
                    right = {each: RIGHT[each] for each in NEEDED[path]}
                    is_right = await check(routes, path, {**right, name: value}, key) == 200
                    answered, refused = answered + is_right, refused + (not is_right)
            for name in ("role", "content", "tool_calls", "name", "x"):
                for value in (*ODD, [{"type": "text", "text": "\ud800"}], [{"type": "text", "text": "x", "\ud800": 1}]):
                    await check(routes, path, {"messages": [{"role": "user", "content": "x", name: value}]}, key)
        assert min(answered, refused) > 500

    simulate(test)
