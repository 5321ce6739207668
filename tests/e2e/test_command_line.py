"""The command line against a running cluster with the demo model: the main job, and every kind of bad input."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from manylora.client import Client, Result, Sampling
from manylora.client.credentials import read_key
from manylora.demo import adapter_folder, skills
from manylora.v1 import admin_pb2, inference_pb2, scheduler_pb2, worker_pb2
from manylora_shared.coordination.peers import PeerSecret, read_secret
from manylora_shared.errors import Code, RpcError
from manylora_shared.tenancy.identity import bearer
from manylora_shared.transport.base import Method, methods_of
from manylora_shared.transport.grpc_transport import GrpcTransport
from safetensors.numpy import load_file, save_file

from tests.e2e.conftest import UpCluster

pytestmark = pytest.mark.e2e

GREEDY = ("--temperature", "0", "--max-tokens", str(skills.MAX_ANSWER_TOKENS))


async def generate(cluster: UpCluster, tenant: str, adapter: str, text: str, *more: str) -> Any:
    arguments = ["generate", "--tenant", tenant, *GREEDY, "--json", *more, skills.prompt(text)]
    out = await cluster.manylora(*arguments, *(["--adapter", adapter] if adapter else []))
    assert out.exit_code == 0, out.stderr
    return out.json


async def test_up_says_where_everything_is(whole: UpCluster) -> None:
    ready = whole.ready
    assert ready["ready"] is True
    assert ready["routers"] == [ready["router"]]
    assert sorted(ready["pids"]) == ["etcd", "router-0", "scheduler", "worker-0", "worker-1"]
    out = await whole.manylora("status", "--json")
    assert out.exit_code == 0
    assert out.json["base_model"] == "manylora-demo-base"
    assert [(w["worker_id"], w["connected"]) for w in out.json["workers"]] == [("worker-0", True), ("worker-1", True)]
    assert (out.json["tenants"], out.json["adapters"]) == (2, 3)


async def test_each_tenant_has_its_own_adapters_answer(whole: UpCluster) -> None:
    answers = await asyncio.gather(
        generate(whole, "acme", "upper", "a1b2c"),
        generate(whole, "acme", "reverse", "a1b2c"),
        generate(whole, "birch", "words", "a1b2c"),
        generate(whole, "birch", "", "a1b2c"),
    )
    assert [a["text"] for a in answers] == ["A1B2C", "c2b1a", "aonebtwoc", "a1b2c"]
    assert [a["finish_reason"] for a in answers] == ["stop"] * 4
    listed = (await whole.manylora("adapter", "list", "--json")).json["adapters"]
    versions = {(a["tenant_id"], a["name"]): a["version"] for a in listed}
    assert [a["adapter_version"] for a in answers] == [
        versions["acme", "upper"],
        versions["acme", "reverse"],
        versions["birch", "words"],
        "",
    ]
    assert answers[0]["usage"]["prompt_tokens"] == len(skills.prompt("a1b2c")) + 1
    assert answers[0]["usage"]["completion_tokens"] == len(answers[0]["token_ids"])
    assert answers[0]["timings"]["total_ms"] >= answers[0]["timings"]["ttft_ms"] > 0


async def test_tenants_of_a_cache_group_find_one_anothers_prefixes(whole: UpCluster) -> None:
    """Of the base model; an adapter's requests do not find them. The answers are the same."""
    prompt = skills.prompt("a1b2c") * 20 + skills.prompt("xy7z")

    async def ask(tenant: str, adapter: str = "") -> Result:
        async with Client(whole.router, tenant=tenant) as client:
            return await client.complete(prompt, adapter=adapter, max_tokens=8, sampling=Sampling(temperature=0))

    async with Client(whole.router) as client:
        before = [(await client.tenants.get(tenant)).policy_yaml for tenant in ("acme", "birch")]
        for policy in before:
            await client.tenants.apply(policy + "prefix_cache: {group: friends}\n")
        answers = [await ask("acme") for _ in range(2)]
        after = await ask("birch")
        assert [answers[0].token_ids, answers[1].token_ids] == [after.token_ids] * 2
        assert after.usage.cached_prompt_tokens == answers[1].usage.cached_prompt_tokens > 100
        assert (await ask("birch", "words")).usage.cached_prompt_tokens == 0
        for policy in before:
            await client.tenants.apply(policy)


async def test_text_token_ids_stop_strings_and_seeds(whole: UpCluster) -> None:
    out = await whole.manylora("generate", "--tenant", "acme", "--adapter", "upper", *GREEDY, skills.prompt("xy7z"))
    assert (out.exit_code, out.stdout) == (0, "XY7Z\n")
    stopped = await generate(whole, "birch", "words", "ab3cd", "--stop", "three")
    assert (stopped["text"], stopped["finish_reason"]) == ("ab", "stop")
    cut = await generate(whole, "birch", "words", "ab3cd", "--max-tokens", "3")
    assert (cut["text"], cut["finish_reason"], len(cut["token_ids"])) == ("abt", "length", 3)
    out = await whole.manylora(
        *("generate", "--tenant", "acme", "--adapter", "upper", *GREEDY, "--json"),
        *("--token-ids", ",".join(map(str, await _token_ids(whole, skills.prompt("xy7z"))))),
    )
    assert out.json["text"] == "XY7Z"
    hot = ("generate", "--tenant", "acme", "--temperature", "2", "--max-tokens", "40", "--json", "?")
    first, second, other = [(await whole.manylora(*hot, "--seed", s)).json["token_ids"] for s in ("5", "5", "6")]
    assert first == second
    assert first != other


async def test_no_answer_is_shorter_than_min_tokens_or_has_a_bad_word(whole: UpCluster) -> None:
    plain = await generate(whole, "acme", "upper", "xy7z")
    assert (plain["text"], plain["finish_reason"]) == ("XY7Z", "stop")
    stops = ("--stop", "7", "--max-tokens", "24")
    assert (await generate(whole, "acme", "upper", "xy7z", *stops))["text"] == "XY"
    least = await generate(whole, "acme", "upper", "xy7z", *stops, "--min-tokens", "12")
    assert least["text"].startswith("XY7Z")
    assert len(least["token_ids"]) >= 12
    assert (await generate(whole, "acme", "upper", "xy7z", "--min-tokens", "2"))["text"] == "XY7Z"
    for words in (("Y7",), ("X",), ("XY7Z", "Y7Z")):
        given = [option for word in words for option in ("--bad-words", word)]
        answer = await generate(whole, "acme", "upper", "xy7z", "--max-tokens", "12", *given)
        assert answer["text"] != "XY7Z"
        assert not any(word in answer["text"] for word in words)
    assert (await generate(whole, "acme", "upper", "xy7z", "--bad-words", "Q"))["text"] == "XY7Z"


async def test_a_chat_is_rendered_with_the_models_template(whole: UpCluster) -> None:
    async with Client(whole.router, tenant="acme") as client:
        result = await client.complete(
            [{"role": "user", "content": "q1w2"}], adapter="reverse", sampling=Sampling(temperature=0.0)
        )
    assert result.text == "2w1q"


async def test_an_unknown_adapter_looks_like_another_tenants(whole: UpCluster) -> None:
    foreign = await _refused(whole, "generate", "--tenant", "birch", "--adapter", "upper", "x")
    absent = await _refused(whole, "generate", "--tenant", "birch", "--adapter", "nosuch", "x")
    assert foreign["code"] == absent["code"] == "NOT_FOUND"
    assert foreign["message"].replace("upper", "nosuch") == absent["message"]


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (("--tenant", "nobody", "x"), "NOT_FOUND", "nobody"),
        (("--tenant", "No Body", "x"), "NOT_FOUND", "No Body"),
        (("--tenant", "acme", "--raw", ""), "INVALID_ARGUMENT", "text"),
        (("--tenant", "acme", "--token-ids", ""), "INVALID_ARGUMENT", "token_ids"),
        (("--tenant", "acme", "--token-ids", "1,259"), "INVALID_ARGUMENT", "token_ids"),
        (("--tenant", "acme", "--raw", "x" * 3000), "INVALID_ARGUMENT", "text"),
        (("--tenant", "acme", "x", "--temperature", "-1"), "INVALID_ARGUMENT", "sampling.temperature"),
        (("--tenant", "acme", "x", "--temperature", "nan"), "INVALID_ARGUMENT", "sampling.temperature"),
        (("--tenant", "acme", "x", "--max-tokens", "100000"), "INVALID_ARGUMENT", "max_tokens"),
        (("--tenant", "acme", "x", "--stop", ""), "INVALID_ARGUMENT", "stop"),
    ],
)
async def test_bad_requests_name_what_is_wrong(
    whole: UpCluster, arguments: tuple[str, ...], code: str, named: str
) -> None:
    error = await _refused(whole, "generate", *arguments)
    assert error["code"] == code
    assert named in error["message"]
    if code == "INVALID_ARGUMENT":
        assert any(named in v["field"] for v in error["violations"])


async def test_bad_policies(whole: UpCluster, tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("tenant_id: acme\nclasses:\n  batch: {weight: 0}\n  gold: {weight: 1}\n")
    error = await _refused(whole, "tenant", "apply", str(file))
    assert error["code"] == "INVALID_ARGUMENT"
    assert [v["field"] for v in error["violations"]] == ["classes.batch.weight", "classes.gold"]
    assert "gold" not in (await whole.manylora("tenant", "get", "acme")).stdout


# Each spoils a copy of a good adapter. What the message must name comes with it.
Spoil = Callable[[Path], None]


def _config(**changes: Any) -> Spoil:
    def spoil(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return spoil


def _weights(change: Callable[[dict[str, Any]], None]) -> Spoil:
    def spoil(folder: Path) -> None:
        tensors = load_file(folder / "adapter_model.safetensors")
        change(tensors)
        save_file({name: np.ascontiguousarray(t) for name, t in tensors.items()}, folder / "adapter_model.safetensors")

    return spoil


def _first(tensors: dict[str, Any]) -> str:
    return min(tensors)


def _set_nan(tensors: dict[str, Any]) -> None:
    tensors[_first(tensors)][0, 0] = np.nan


def _cut_shape(tensors: dict[str, Any]) -> None:
    tensors[_first(tensors)] = tensors[_first(tensors)][:, :-1]


def _drop_tensor(tensors: dict[str, Any]) -> None:
    del tensors[_first(tensors)]


def _pickle(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(b"\x80\x02}q\x00.")


def _big_rank(folder: Path) -> None:
    _weights(_widen)(folder)
    _config(r=128)(folder)


def _widen(tensors: dict[str, Any]) -> None:
    for name, tensor in tensors.items():
        tensors[name] = np.concatenate([tensor] * 16, axis=0 if "lora_A" in name else 1)


BAD_ADAPTERS: dict[str, tuple[Spoil, str]] = {
    "no-config": (lambda f: (f / "adapter_config.json").unlink(), "adapter_config.json"),
    "no-weights": (lambda f: (f / "adapter_model.safetensors").unlink(), "adapter_model.safetensors"),
    "not-json": (lambda f: (f / "adapter_config.json").write_bytes(b"{"), "adapter_config.json"),  # type: ignore[func-returns-value]
    "pickle": (_pickle, "adapter_model.safetensors"),
    "wrong-shape": (_weights(_cut_shape), "lora_A"),
    "tensor-missing": (_weights(_drop_tensor), "lora_A"),
    "nan": (_weights(_set_nan), "lora_A"),
    "wrong-base": (_config(base_model_name_or_path="other/model"), "base_model_name_or_path"),
    "rank-too-high": (_big_rank, "r"),
    "bias": (_config(bias="some"), "bias"),
    "modules-to-save": (_config(modules_to_save=["lm_head"]), "modules_to_save"),
    "dora": (_config(use_dora=True), "use_dora"),
    "no-module-matches": (_config(target_modules=["nothing"]), "target_modules"),
}


@pytest.mark.parametrize("case", BAD_ADAPTERS)
async def test_bad_adapters_are_refused_whole(whole: UpCluster, tmp_path: Path, case: str) -> None:
    spoil, named = BAD_ADAPTERS[case]
    folder = tmp_path / "adapter"
    shutil.copytree(adapter_folder("upper"), folder)
    spoil(folder)
    error = await _refused(whole, "adapter", "add", f"bad-{case}", str(folder), "--tenant", "acme")
    assert error["code"] == "INVALID_ARGUMENT", error
    assert any(named in v["field"] or named in v["description"] for v in error["violations"]), error
    await _assert_nothing_is_left(whole)


async def test_callers_links_and_paths_outside_the_store(whole: UpCluster, tmp_path: Path) -> None:
    shutil.copytree(adapter_folder("upper"), tmp_path / "elsewhere")
    folder = tmp_path / "linked"
    folder.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).symlink_to(tmp_path / "elsewhere" / name)
    out = await whole.manylora("adapter", "add", "linked", str(folder), "--tenant", "acme")
    assert out.exit_code == 0, out.stderr
    assert (await whole.manylora("adapter", "remove", "linked", "--tenant", "acme")).exit_code == 0

    team = whole.adapter_store / "team"
    team.mkdir(exist_ok=True)
    (team / "link").symlink_to(tmp_path / "elsewhere")
    try:
        for path in ("../outside", "/etc", str(tmp_path / "elsewhere"), "team/link", "team/nothing", "a\\..\\b", ""):
            error = await _refused(whole, "adapter", "add", "linked", f"store:{path}", "--tenant", "acme")
            assert error["code"] == "INVALID_ARGUMENT", (path, error)
            assert error["violations"], (path, error)
    finally:
        shutil.rmtree(team)
    await _assert_nothing_is_left(whole)


async def test_an_adapter_from_the_store_serves_and_can_be_removed(whole: UpCluster) -> None:
    team = whole.adapter_store / "team"
    shutil.copytree(adapter_folder("json"), team)
    try:
        out = await whole.manylora("adapter", "add", "as-json", "store:team", "--tenant", "birch", "--json")
        assert out.exit_code == 0, out.stderr
        answer = await generate(whole, "birch", "as-json", "ab3")
        assert answer["text"] == '{"value":"ab3"}'
        again = await whole.manylora("adapter", "add", "as-json", "store:team", "--tenant", "birch", "--json")
        assert again.json == out.json
    finally:
        shutil.rmtree(team)
        out = await whole.manylora("adapter", "remove", "as-json", "--tenant", "birch")
    assert out.exit_code == 0
    error = await _refused(whole, "generate", "--tenant", "birch", "--adapter", "as-json", "x")
    assert error["code"] == "NOT_FOUND"


async def test_a_deleted_tenant_takes_its_adapters_along(whole: UpCluster, tmp_path: Path) -> None:
    file = tmp_path / "cedar.yaml"
    file.write_text("tenant_id: cedar\n")
    assert (await whole.manylora("tenant", "apply", str(file))).exit_code == 0
    added = await whole.manylora("adapter", "add", "upper", str(adapter_folder("upper")), "--tenant", "cedar")
    assert added.exit_code == 0
    assert (await generate(whole, "cedar", "upper", "ab3"))["text"] == "AB3"
    out = await whole.manylora("tenant", "delete", "cedar", "--yes", "--json")
    assert out.json == {"tenant_id": "cedar", "removed_adapters": 1}
    assert (await _refused(whole, "generate", "--tenant", "cedar", "x"))["code"] == "NOT_FOUND"
    assert (await generate(whole, "acme", "upper", "ab3"))["text"] == "AB3"  # the same bytes, another tenant's


async def test_garbage_bytes_on_every_rpc(whole: UpCluster) -> None:
    status = (await whole.manylora("status", "--json")).json
    servers = {
        whole.router: (inference_pb2, admin_pb2),
        status["scheduler"]["address"]: (scheduler_pb2,),
        status["workers"][0]["address"]: (worker_pb2,),
    }
    secret = PeerSecret(read_secret(Path(whole.ready["data"]) / "peer.secret"))
    shown = {**bearer(read_key(Path(whole.ready["key_file"]))), **secret.metadata()}
    tried = 0
    for address, modules in servers.items():
        channel = GrpcTransport().connect(address)
        for module in modules:
            for service in module.DESCRIPTOR.services_by_name.values():
                for method in methods_of(service).values():
                    assert await _send_garbage(channel, method, shown) is Code.INVALID_ARGUMENT, method.path
                    tried += 1
        await channel.close()
    assert tried == 42
    assert (await generate(whole, "acme", "upper", "ab3"))["text"] == "AB3"


class _Garbage:
    """Bytes that are no message, in the place of one."""

    def SerializeToString(self) -> bytes:
        return b"\xff\xff\xff\xff garbage"


async def _send_garbage(channel: Any, method: Method, metadata: dict[str, str]) -> Code | None:
    garbage: Any = _Garbage()
    try:
        if not method.client_streaming and not method.server_streaming:
            await channel.call(method, garbage, timeout=5, metadata=metadata)
            return None
        stream = channel.stream(method, None if method.client_streaming else garbage, timeout=5, metadata=metadata)
        if method.client_streaming:
            await stream.write(garbage)
        while await stream.read() is not None:
            pass
    except RpcError as error:
        return error.code
    return None


async def _token_ids(cluster: UpCluster, text: str) -> list[int]:
    """The demo tokenizer's ids, as the model's own library has them."""
    from manylora.demo import BASE_FOLDER
    from tokenizers import Tokenizer

    return list(Tokenizer.from_file(str(BASE_FOLDER / "tokenizer.json")).encode(text).ids)


async def _refused(cluster: UpCluster, *arguments: str) -> Any:
    out = await cluster.manylora(*arguments, "--json")
    assert out.exit_code == 1, (out.stdout, out.stderr)
    error = out.json["error"]
    told = [f"{violation['field']}: {violation['description']}" for violation in error["violations"]]
    if len(told) < 2:
        assert out.stderr.startswith(f"{error['code']}: {error['message']}")
    else:
        assert out.stderr.splitlines()[0].startswith(f"{error['code']}: ")
        assert out.stderr.splitlines()[1:] == [f"  {line}" for line in told]
    return error


async def _assert_nothing_is_left(cluster: UpCluster) -> None:
    """Of a refused adapter: no name, no files; and the good ones go on."""
    async with Client(cluster.router, tenant="acme") as client:
        listed = await client.adapters.list()
        answer = await client.complete(skills.prompt("ab3"), adapter="upper", sampling=Sampling(temperature=0.0))
    assert [(a.tenant_id, a.name) for a in listed] == [("acme", "reverse"), ("acme", "upper"), ("birch", "words")]
    assert answer.text == "AB3"
    incoming = cluster.adapter_store / "incoming"
    assert not incoming.exists() or os.listdir(incoming) == []


async def test_a_tenants_key_is_the_tenant_and_nothing_more(whole: UpCluster) -> None:
    made = (await whole.manylora("key", "create", "--tenant", "acme", "--json")).json
    mine = ("--key", made["key"])
    answer = await whole.manylora("generate", "--adapter", "upper", *GREEDY, "--json", *mine, skills.prompt("ab3"))
    assert answer.json["text"] == "AB3"
    assert (await _refused(whole, "generate", "--tenant", "birch", *mine, "x"))["code"] == "PERMISSION_DENIED"
    assert (await _refused(whole, "tenant", "list", *mine))["code"] == "PERMISSION_DENIED"
    status = (await whole.manylora("status", "--json", *mine)).json
    assert (status["tenants"], status["workers"], status["routers"]) == (1, [], [])
    assert made["key"] not in (await whole.manylora("key", "list", "--json")).stdout
    assert (await whole.manylora("key", "revoke", made["key_id"])).exit_code == 0
    refused = await _refused(whole, "generate", *mine, "x")
    assert (refused["code"], refused["message"]) == (
        "UNAUTHENTICATED",
        "this key was revoked",
    )  # its owner has it whole
    unknown = [f"{made['key'][:-1]}{'0' if made['key'][-1] != '0' else '1'}", "nonsense"]
    told = [await _refused(whole, "generate", "--key", key, "x") for key in unknown]
    assert told[0] == told[1], "whether there is such a key is nobody's to learn"
    assert told[0]["code"] == "UNAUTHENTICATED"
    _assert_keys_are_kept(whole, made["key"])


def _assert_keys_are_kept(cluster: UpCluster, key: str) -> None:
    """The operator's file is its owner's alone, and neither its key nor `key` is in any log or trace."""
    key_file = Path(cluster.ready["key_file"])
    assert key_file.stat().st_mode & 0o777 == 0o600
    kept = [*(key_file.parent / "logs").glob("*.log"), cluster.trace_file, cluster.stderr_path]
    assert len(kept) > 4
    for path in kept:
        for each in (key, read_key(key_file)):
            assert each.rpartition("-")[2] not in path.read_text(), path
