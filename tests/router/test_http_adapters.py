"""Adapters, added and removed as vLLM's controllers do."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from http_fakes import Front, http_front
from manylora_shared.stores.adapter_files import CONFIG_NAME, WEIGHTS_NAME
from router_fakes import until
from test_admin_adapters import CONFIG, WEIGHTS

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


async def post(front: Front, path: str, key: str, **body: Any) -> str:
    headers = {"X-Tenant-ID": "acme"}
    async with front.openai(key, default_headers=headers) as client:
        return await client.post(f"{front.url}{path}", cast_to=str, body=body)


async def operator_key(front: Front) -> str:
    key = await front.cluster.put_key(scopes=("operator",))
    await until(lambda: len(front.cluster.app.directory.api_keys) > 2)
    return key


async def test_an_adapter_comes_and_goes() -> None:
    async with http_front() as front, front.openai() as client:
        front.cluster.files.files["staged/lower"] = {CONFIG_NAME: CONFIG, WEIGHTS_NAME: WEIGHTS}
        key = await operator_key(front)
        given = {"lora_name": "lower", "lora_path": "staged/lower"}
        told = await post(front, LOAD, key, **given, load_inplace=False)
        assert told == "Success: LoRA adapter 'lower' added successfully."
        answer = await client.chat.completions.create(model="lower", messages=[{"role": "user", "content": "hi"}])
        assert answer.choices[0].message.content == "hello world"
        with pytest.raises(openai.BadRequestError, match="has already been loaded"):
            await post(front, LOAD, key, **given)
        raw = await client.chat.completions.with_raw_response.create(
            model="lower@1", messages=[{"role": "user", "content": "hi"}], user="me"
        )
        assert raw.headers["x-adapter"] == "lower@1"
        raw = await client.chat.completions.with_raw_response.create(
            model="upper+lower:0.5", messages=[{"role": "user", "content": "hi"}]
        )
        assert raw.headers["x-adapter"] == "upper@1+lower@1:0.5"
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="lower@2", messages=[{"role": "user", "content": "hi"}])
        told = await post(front, UNLOAD, front.key, lora_name="lower")  # its tenant's admin
        assert told == "Success: LoRA adapter 'lower' removed successfully."
        with pytest.raises(openai.NotFoundError) as gone:
            await post(front, UNLOAD, key, lora_name="lower")
        assert gone.value.param == "lora_name"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"lora_path": "x"}, "lora_name"),
        ({"lora_name": "x"}, "lora_path"),
        ({"lora_name": "A B", "lora_path": "x"}, "lora_name"),
        ({"lora_name": "x", "lora_path": "../x"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "x", "load_inplace": True}, "load_inplace"),
    ],
)
async def test_what_is_wrong_is_named(body: dict[str, Any], param: str) -> None:
    async with http_front() as front:
        key = await operator_key(front)
        with pytest.raises(openai.BadRequestError) as refused:
            await post(front, LOAD, key, **body)
        assert refused.value.param == param


async def test_the_stores_paths_are_operators() -> None:
    async with http_front() as front:
        with pytest.raises(openai.PermissionDeniedError):
            await post(front, LOAD, front.key, lora_name="x", lora_path="x")
        with pytest.raises(openai.AuthenticationError):
            await post(front, LOAD, "mlk-nobody", lora_name="x", lora_path="x")
