"""Public prefixes at a router: what an operator declares, as the tokens that prompts begin with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from manylora.v1 import admin_pb2, inference_pb2
from manylora_router.admin import prefix_intake
from manylora_router.text.service import TokenIdsOnlyText
from manylora_shared.coordination import keys
from manylora_shared.coordination.records import PublicPrefixRecord
from manylora_shared.errors import Code, RpcError
from manylora_sim.fake_text import FakeText
from router_fakes import ADMIN, RouterCluster, ids_of, simulate


async def call(cluster: RouterCluster, method: str, **fields: Any) -> Any:
    return await cluster.client.call(ADMIN[method], ADMIN[method].request_type(**fields))


async def refused(cluster: RouterCluster, method: str = "AddPublicPrefix", **fields: Any) -> RpcError:
    with pytest.raises(RpcError) as error:
        await call(cluster, method, **fields)
    return error.value


async def stored(cluster: RouterCluster, name: str) -> PublicPrefixRecord:
    found = await cluster.store.get(keys.public_prefix(name))
    assert found is not None
    return PublicPrefixRecord.from_json(found.value)


def chat(*messages: tuple[str, str]) -> inference_pb2.ChatPrompt:
    return inference_pb2.ChatPrompt(
        messages=[inference_pb2.ChatMessage(role=role, content=content) for role, content in messages]
    )


def test_added_listed_and_removed() -> None:
    async def test(cluster: RouterCluster) -> None:
        added = await call(cluster, "AddPublicPrefix", name="text", text="You are kind.")
        record = await stored(cluster, "text")
        assert record.token_ids == tuple(ids_of("You are kind."))
        assert record.model_digest == cluster.workers[0].record("a:1").model_digest
        assert added.prefix == admin_pb2.PublicPrefixInfo(name="text", tokens=13, created_unix_s=record.created_unix_s)
        await call(cluster, "AddPublicPrefix", name="ids", token_ids=inference_pb2.TokenIds(ids=[7, 8, 9]))
        assert (await stored(cluster, "ids")).token_ids == (7, 8, 9)
        await call(cluster, "AddPublicPrefix", name="chat", chat=chat(("system", "Be brief.")))
        assert (await stored(cluster, "chat")).token_ids == tuple(ids_of("system: Be brief.\nuser: "))
        listed = await call(cluster, "ListPublicPrefixes")
        assert [(p.name, p.tokens) for p in listed.prefixes] == [("chat", 24), ("ids", 3), ("text", 13)]
        assert (await refused(cluster, name="ids", text="another")).code is Code.ALREADY_EXISTS
        assert (await stored(cluster, "ids")).token_ids == (7, 8, 9)
        await call(cluster, "RemovePublicPrefix", name="ids")
        assert [p.name for p in (await call(cluster, "ListPublicPrefixes")).prefixes] == ["chat", "text"]
        for name in ("ids", "", "../x"):
            assert (await refused(cluster, "RemovePublicPrefix", name=name)).code is Code.NOT_FOUND

    simulate(test)


def test_what_is_wrong_is_named_and_nothing_is_stored() -> None:
    async def test(cluster: RouterCluster) -> None:
        limits = cluster.workers[0].record("a:1")
        too_long = inference_pb2.TokenIds(ids=[1] * limits.max_context_tokens)
        wrong: list[tuple[dict[str, Any], list[str]]] = [
            ({}, ["prompt", "name"]),
            ({"name": "x"}, ["prompt"]),
            ({"name": "no/name", "text": "a"}, ["name"]),
            ({"name": "x", "text": ""}, ["prompt.text"]),
            ({"name": "x", "token_ids": inference_pb2.TokenIds(ids=[1, 10**6])}, ["prompt.token_ids[1]"]),
            ({"name": "x", "token_ids": inference_pb2.TokenIds()}, ["prompt.token_ids"]),
            ({"name": "x", "token_ids": too_long}, ["prompt.token_ids"]),
            ({"name": "x", "chat": chat()}, ["prompt.chat.messages"]),
        ]
        for fields, named in wrong:
            error = await refused(cluster, **fields)
            assert (error.code, [v.field for v in error.violations]) == (Code.INVALID_ARGUMENT, named), fields
        assert not any(key.startswith(keys.PUBLIC_PREFIXES) for key in cluster.store_server.keys)

    simulate(test)


def test_a_prefix_is_no_longer_than_the_store_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = PublicPrefixRecord("x", "d" * 64, (10**6,) * prefix_intake.MAX_TOKENS, 1e9 + 0.123456)
    assert len(longest.to_json()) < 1.4 * 2**20

    async def test(cluster: RouterCluster) -> None:
        error = await refused(cluster, name="x", text="four")
        assert [v.description for v in error.violations] == ["must be at most 3 tokens, not 4"]
        await call(cluster, "AddPublicPrefix", name="x", text="few")

    monkeypatch.setattr(prefix_intake, "MAX_TOKENS", 3)
    simulate(test)


class MergingText(FakeText):
    """A tokenizer that makes one token of a text's last two characters, and puts one around each text."""

    async def encode(self, text: str) -> Sequence[int]:
        return [1, *self.ids(text[:-2]), 2] if len(text) > 1 else [1, *self.ids(text)]


def test_only_tokens_that_do_not_depend_on_what_follows_are_taken() -> None:
    async def test(cluster: RouterCluster) -> None:
        await call(cluster, "AddPublicPrefix", name="text", text="abcd")
        assert (await stored(cluster, "text")).token_ids == (1, *ids_of("abc"))

    simulate(test, text=MergingText())


def test_a_router_without_a_tokenizer_takes_token_ids_alone() -> None:
    async def test(cluster: RouterCluster) -> None:
        assert (await refused(cluster, name="x", text="a")).code is Code.FAILED_PRECONDITION
        await call(cluster, "AddPublicPrefix", name="x", token_ids=inference_pb2.TokenIds(ids=[7]))

    simulate(test, text=TokenIdsOnlyText())
