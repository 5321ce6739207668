"""POST /tokenize and /detokenize and GET /tokenizer_info, as vLLM has them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from manylora_router.front.http.api import asked
from manylora_router.front.http.api.answers import Door
from manylora_router.front.http.api.prompts import chat_prompt
from manylora_router.front.http.api.tooling import read_tools
from manylora_router.front.http.exchange import Exchange
from manylora_router.guard.admission import Prompt, TextPrompt, TokenPrompt


async def tokenize(exchange: Exchange, door: Door) -> None:
    fields = await door.read(exchange)
    door = await door.at(exchange, fields)
    model = fields.text("model")
    prompt: Prompt
    if fields.raw("messages") is not None:
        prompt = chat_prompt(fields, door.dialect, read_tools(fields, door.dialect))
        fields.only("add_special_tokens", False)
    else:
        prompt = TextPrompt(fields.text("prompt"), fields.flag("add_special_tokens", True))
    wants_texts = fields.flag("return_token_strs")
    fields.close()
    fields.check()
    request = replace(asked.nameless(asked.caller_of(exchange.headers), model, door.names), prompt=prompt)
    tokens, most = await door.intake.tokenize(request)
    answer: dict[str, Any] = {"count": len(tokens), "max_model_len": most, "tokens": list(tokens), "token_strs": None}
    if wants_texts:
        answer["token_strs"] = [door.text.token(token_id) for token_id in tokens]
    await exchange.answer(answer)


async def tokenizer_info(exchange: Exchange, door: Door) -> None:
    await exchange.answer({**door.text.info, "model_max_length": door.max_context_tokens})


async def detokenize(exchange: Exchange, door: Door) -> None:
    fields = await door.read(exchange)
    door = await door.at(exchange, fields)
    model = fields.text("model")
    prompt = TokenPrompt(fields.token_ids("tokens", most=door.longest_context_tokens))
    fields.close()
    fields.check()
    exchange.names = {"prompt": "tokens"}
    request = replace(asked.nameless(asked.caller_of(exchange.headers), model, door.names), prompt=prompt)
    await exchange.answer({"prompt": await door.intake.detokenize(request)})
