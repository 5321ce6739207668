"""HfTextService over tokenizers of the kinds that models have, built here."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from manylora_router.text.detokenizer import Detokenizer
from manylora_router.text.service import HfTextService, TokenIdsOnlyText
from manylora_shared.errors import InvalidRequest, Unready
from manylora_shared.stores.adapter_tokenizer import BroughtTokenizer, brought_by
from manylora_sim.fake_text import FakeText
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SENTENCE = "Hello  wörld, 日本語 🎉 <tool> x"


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)} | {"Ġw": 256, "lo": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("Ġ", "w"), ("l", "o")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_fallback(strips: bool) -> Tokenizer:
    vocab = {"<unk>": 0} | {f"<0x{b:02X}>": b + 1 for b in range(256)}
    for piece in ["\u2581", "H", "e", "l", "o", "\u2581w", "\u2581Hello", "r", "d", ","]:
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        prepend_scheme="first" if strips else "never", split=False, replacement="\u2581"
    )
    steps: list[Any] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
    return tokenizer


def word_piece() -> Tokenizer:
    vocab = {w: i for i, w in enumerate(["[UNK]", "hello", "wor", "##ld", "##s", ",", "again"])}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer


KINDS = {
    "byte_level": byte_level,
    "byte_fallback": lambda: byte_fallback(False),
    "byte_fallback_strip": lambda: byte_fallback(True),
    "word_piece": word_piece,
}


def wrapped(tokenizer: Tokenizer, **more: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    tokenizer.add_special_tokens(["</s>"])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", **more)


def text_of(detokenizer: Detokenizer, ids: list[int]) -> str:
    return "".join([detokenizer.push([i]) for i in ids]) + detokenizer.finish()


@pytest.mark.parametrize("kind", KINDS)
async def test_detokenizer_gives_the_tokenizers_own_decode(kind: str) -> None:
    tokenizer = wrapped(KINDS[kind]())
    service = HfTextService(tokenizer)
    try:
        sentence = "hello worlds , again" if kind == "word_piece" else SENTENCE
        ids = list(await service.encode(sentence))
        decode = tokenizer.backend_tokenizer.decode
        assert text_of(service.detokenizer(), ids) == decode(ids) == sentence
        eos = tokenizer.eos_token_id
        assert text_of(service.detokenizer(), [eos, *ids, eos]) == decode([eos, *ids, eos], skip_special_tokens=True)
        rng = random.Random(0)
        for _ in range(300):
            some = [rng.randrange(len(tokenizer)) for _ in range(rng.randrange(12))]
            expected = decode(some, skip_special_tokens=True)
            if "\ufffd" not in expected:
                assert text_of(service.detokenizer(), some) == expected
                detokenizer = service.detokenizer()
                assert detokenizer.push(some) + detokenizer.finish() == expected
    finally:
        await service.close()


CHAT = "{% for m in messages %}<s>[{{ m.role }}] {{ m.content }}</s>{% endfor %}"


@pytest.mark.parametrize("kind", KINDS)
async def test_prompt_and_answer_are_the_decode_of_all(kind: str) -> None:
    """However prompt and answer share the tokens, also where the prompt ends in special ones or in half a character."""
    tokenizer = wrapped(KINDS[kind](), chat_template=CHAT)
    service, decode = HfTextService(tokenizer), tokenizer.backend_tokenizer.decode
    sentence = "hello worlds , again" if kind == "word_piece" else SENTENCE + "  日本 Hello    world\n  world"
    try:
        ids = list(await service.encode(sentence))
        chat = list(await service.encode_chat([("user", "hello"), ("user", "world")]))
        for some in (ids, chat + ids, [*ids, tokenizer.eos_token_id, *ids], [tokenizer.eos_token_id] * 40 + ids):
            whole = decode(some, skip_special_tokens=True)
            for cut in range(len(some) + 1):
                prompt, answer = some[:cut], some[cut:]
                known = decode(prompt, skip_special_tokens=True)
                if not whole.startswith(known):
                    known = known.rstrip("\ufffd")
                assert known + text_of(service.detokenizer(prompt), answer) == whole, (cut, len(some))
                detokenizer = service.detokenizer(prompt)
                assert known + detokenizer.push(answer) + detokenizer.finish() == whole
    finally:
        await service.close()


async def test_the_first_word_behind_a_prompt_keeps_its_space() -> None:
    service = HfTextService(wrapped(byte_fallback(True)))
    ids = list(await service.encode("Hello world"))
    prompt = list(await service.encode("Hello"))
    assert ids[: len(prompt)] == prompt
    assert text_of(service.detokenizer(prompt), ids[len(prompt) :]) == " world"
    assert text_of(service.detokenizer(), ids) == "Hello world"
    await service.close()


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "byte_fallback_strip"])
async def test_tokens_that_are_no_utf8_hold_up_nothing(kind: str) -> None:
    """A logit bias can force them. They become U+FFFD, at a cost that does not grow, and text goes on."""
    tokenizer = wrapped(KINDS[kind]())
    service = HfTextService(tokenizer)
    try:
        token = tokenizer.backend_tokenizer.token_to_id("ÿ" if kind == "byte_level" else "<0xFF>")
        longest = 0
        decode = service._decode

        def measured(ids: Sequence[int]) -> str:
            nonlocal longest
            longest = max(longest, len(ids))
            return decode(ids)

        service._decode = measured
        text = text_of(service.detokenizer(), [token] * 1000 + [tokenizer.backend_tokenizer.token_to_id("H")])
        assert set(text) == {"\ufffd", "H"}
        assert text.endswith("\ufffdH")
        assert longest <= 17
    finally:
        await service.close()


async def test_chat_template() -> None:
    service = HfTextService(wrapped(byte_level(), chat_template=TEMPLATE))
    try:
        ids = list(await service.encode_chat([("system", "be kind"), ("user", "hi")]))
        assert text_of(service.detokenizer(), ids) == "<|system|>be kind<|user|>hi<|assistant|>"
        with pytest.raises(InvalidRequest, match=r"prompt\.chat.*no robots"):
            await service.encode_chat([("robot", "hi")])
    finally:
        await service.close()


async def test_a_final_message_is_left_open() -> None:
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}</s>\n{% endfor %}"
    tokenizer = wrapped(byte_level(), chat_template=template + "{% if add_generation_prompt %}<|assistant|>{% endif %}")
    service, decode = HfTextService(tokenizer), tokenizer.backend_tokenizer.decode
    turns = [("user", "hi"), ("assistant", "hi"), ("user", "go on")]

    async def text(*more: tuple[str, str], **options: Any) -> str:
        return str(decode(list(await service.encode_chat([*turns, *more], **options)), skip_special_tokens=False))

    before = "<|user|>hi</s>\n<|assistant|>hi</s>\n<|user|>go on</s>\n"
    goes_on = {"add_generation_prompt": False, "continue_final_message": True}
    try:
        assert await text() == before + "<|assistant|>"
        assert await text(add_generation_prompt=False) == before
        for content in ("hi", " hi ", '{"a":', ""):
            assert await text(("assistant", content), **goes_on) == f"{before}<|assistant|>{content.strip()}"
    finally:
        await service.close()


async def test_a_template_that_drops_the_final_message_is_told() -> None:
    service = HfTextService(wrapped(byte_level(), chat_template="{{ messages[0].content }}"))
    turns = [("user", "x" * 5000), ("assistant", "y")]
    with pytest.raises(InvalidRequest, match=r"prompt\.chat: .*does not appear in the chat") as raised:
        await service.encode_chat(turns, add_generation_prompt=False, continue_final_message=True)
    assert len(raised.value.message) < 1000
    await service.close()


async def test_a_message_that_a_template_leaves_out_is_told() -> None:
    some = "{% if m.role == 'user' or loop.first %}<|{{ m.role }}|>{{ m.content | trim }}{% endif %}"
    template = f"{{% for m in messages %}}{some}{{% endfor %}}"
    service = HfTextService(wrapped(byte_level(), chat_template=template))
    for role, name in (("system", "'system'"), ("usr", "'usr'")):
        assert await service.encode_chat([(role, " be kind "), ("user", "hi")])
        assert await service.encode_chat([("user", "hi"), (role, " ")])
        with pytest.raises(InvalidRequest, match=f"leaves out this message of {name}") as raised:
            await service.encode_chat([("user", "hi"), (role, "be kind")])
        assert raised.value.violations[0].field == "prompt.chat.messages[1].role"
    later = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}{{ messages[0].content }}"
    other = HfTextService(wrapped(byte_level(), chat_template=later))
    assert await other.encode_chat([("system", "be"), ("user", "x")])
    for each in (service, other):
        await each.close()


async def test_a_templates_variables() -> None:
    template = "{% if enable_thinking is false %}no{% endif %}{{ budget }}{{ words | join('+') }}{{ eos_token }}"
    tokenizer = wrapped(byte_level(), chat_template=template)
    service, decode = HfTextService(tokenizer), tokenizer.backend_tokenizer.decode
    given = {"enable_thinking": False, "budget": 3, "words": ["a", "b"], "unread": {"x": None}}
    ids = list(await service.encode_chat([("user", "hi")], template_kwargs=given))
    assert decode(ids, skip_special_tokens=False) == "no3a+b</s>"
    await service.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_words_as_they_come_in_a_text(kind: str) -> None:
    service = HfTextService(wrapped(KINDS[kind]()))
    try:
        own, *spaced = await service.encode_words(["world"])
        ids = list(await service.encode("hello world"))
        found = [sequence for sequence in (own, *spaced) if ids[-len(sequence) :] == list(sequence)]
        assert found, "a word in the middle of a text has one of them"
        assert text_of(service.detokenizer(), list(own)) == "world"
        assert len(await service.encode_words([" world", "world"])) == 2 * (1 + len(spaced))
    finally:
        await service.close()


async def test_ids_that_are_no_token_have_no_text() -> None:
    plain = json.loads(byte_level().to_str())
    plain["model"]["vocab"]["far"] = 700
    tokenizer = wrapped(Tokenizer.from_str(json.dumps(plain)))
    service = HfTextService(tokenizer)
    ids = list(await service.encode("Hi"))
    far, gap, beyond = 700, 650, 10**6
    assert text_of(service.detokenizer([gap]), [ids[0], gap, far, beyond, ids[1]]) == "Hfari"
    assert list(service.end_token_ids) == [tokenizer.eos_token_id]
    await service.close()


async def test_stop_strings_of_special_tokens() -> None:
    tokenizer = wrapped(byte_level())
    service = HfTextService(tokenizer)
    end, tool = (tokenizer.convert_tokens_to_ids(token) for token in ("</s>", "<tool>"))
    assert service.stop_tokens(["x", "</s>", "<tool>", "<tool>x", "</s"]) == {end: "</s>", tool: "<tool>"}
    with pytest.raises(InvalidRequest) as raised:
        service.stop_tokens(["</s>", "</s>x", "x", "\n</s>"])
    assert [v.field for v in raised.value.violations] == ["stop[1]", "stop[3]"]
    assert "contains the special token '</s>'" in raised.value.violations[0].description
    await service.close()


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "refuses it: Roles must alternate"),
        ("{{ 1 // (messages | length - 1) }}", "ZeroDivisionError"),
        ("{{ 2.0 ** 5000 }}", "OverflowError"),
        ("{{ {}.popitem() }}", "popitem"),
        ("{{ [1].index(2) }}", "ValueError: 2 is not in list"),
        ("{{ messages[5]['content'] }}", "list object has no element 5"),
        ("{{ tools.first.name }}", "first"),
        ("{{ messages[0].content.encode('ascii') }}", "UnicodeEncodeError"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "RecursionError"),
        ("{% for m in messages %}{{ m.content }", "unexpected"),
    ],
)
async def test_what_a_template_raises_is_the_requests_fault_in_its_words(template: str, words: str) -> None:
    service = HfTextService(wrapped(byte_level(), chat_template=template))
    with pytest.raises(InvalidRequest, match=words) as raised:
        await service.encode_chat([("user", "é")])
    assert raised.value.violations[0].field == "prompt.chat"
    await service.close()


async def test_no_chat_template() -> None:
    service = HfTextService(wrapped(byte_level()))
    with pytest.raises(Unready, match="chat template"):
        await service.encode_chat([("user", "hi")])
    await service.close()


async def test_tokenizing_leaves_the_event_loop_free_and_runs_on_few_threads() -> None:
    service = HfTextService(wrapped(byte_level()), threads=2)
    running, most, lock = 0, 0, threading.Lock()
    release = threading.Event()

    def slow(text: str, add_special_tokens: bool) -> list[int]:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        release.wait(10)
        with lock:
            running -= 1
        return [1]

    service._encode = slow  # type: ignore[method-assign]
    waiting = [asyncio.create_task(service.encode("x")) for _ in range(8)]
    for _ in range(10_000):
        await asyncio.sleep(0.001)
        if running == 2:
            break
    release.set()
    assert await asyncio.gather(*waiting) == [[1]] * 8
    assert most == 2
    await service.close()


def test_loads_from_a_folder(tmp_path: Path) -> None:
    wrapped(byte_level(), chat_template=TEMPLATE).save_pretrained(tmp_path)
    service = HfTextService.load(tmp_path)

    async def use() -> str:
        ids = list(await service.encode(SENTENCE))
        await service.close()
        return text_of(service.detokenizer(), ids)

    assert asyncio.run(use()) == SENTENCE
    with pytest.raises(FileNotFoundError):
        HfTextService.load(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises((OSError, ValueError)):
        HfTextService.load(tmp_path / "empty")


def test_loads_a_sentencepiece_model_alone(tmp_path: Path) -> None:
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()
    pieces = [("<unk>", 2), ("<s>", 3), ("</s>", 3), *[(f"<0x{byte:02X}>", 6) for byte in range(256)]]
    words = ["\u2581", "t", "h", "e", "\u2581t", "he", "\u2581the", "a", "\u2581a", "c", "ca", "cat", "\u2581cat"]
    for rank, (piece, kind) in enumerate([*pieces, *[(word, 1) for word in words]]):
        proto.pieces.add(piece=piece, type=kind, score=-float(rank))
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    trainer.model_type, trainer.byte_fallback, trainer.vocab_size = 2, True, len(proto.pieces)
    trainer.unk_id, trainer.bos_id, trainer.eos_id = 0, 1, 2
    normalizer.name, normalizer.add_dummy_prefix, normalizer.remove_extra_whitespaces = "identity", True, False
    (tmp_path / "tokenizer.model").write_bytes(proto.SerializeToString())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>"}
        )
    )
    service = HfTextService.load(tmp_path)

    async def use() -> None:
        ids = list(await service.encode("the cat"))
        assert len(ids) == 3
        assert text_of(service.detokenizer(), ids) == "the cat"
        assert text_of(service.detokenizer(ids[:2]), [*ids[2:], 2]) == " cat"
        assert list(service.end_token_ids) == [2]
        await service.close()

    asyncio.run(use())


async def test_an_adapters_tokenizer_is_the_base_models_or_is_told(tmp_path: Path) -> None:
    base = wrapped(byte_level(), chat_template=TEMPLATE)
    base.save_pretrained(tmp_path / "base")
    service = HfTextService.load(tmp_path / "base")
    base.save_pretrained(tmp_path / "same")  # as trainers do beside an adapter
    assert await service.differences(brought_by(tmp_path / "same", follows_links=False)) == []
    base.chat_template = "{{ messages[0].content }}[answer]"
    base.add_tokens(["<tool_call>"])
    base.save_pretrained(tmp_path / "other")
    problems = await service.differences(brought_by(tmp_path / "other", follows_links=False))
    assert [v.field for v in problems] == ["chat_template", "added_tokens"]
    assert "<tool_call>" in problems[1].description
    assert "<tool>" not in problems[1].description
    await service.close()
    assert await TokenIdsOnlyText().differences(BroughtTokenizer("x", {"<x>": 1})) == []


async def test_other_services() -> None:
    ids_only = TokenIdsOnlyText()
    for refused in (ids_only.encode("x"), ids_only.encode_chat([("user", "x")])):
        with pytest.raises(Unready):
            await refused
    assert text_of(ids_only.detokenizer(), [1, 2]) == ""
    fake = FakeText()
    assert text_of(fake.detokenizer(), list(await fake.encode("aé"))) == "aé"


@pytest.mark.slow
def test_router_text_needs_no_torch(tmp_path: Path) -> None:
    wrapped(byte_level()).save_pretrained(tmp_path)
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import asyncio, pathlib\n"
        "from manylora_router.text.service import HfTextService\n"
        f"service = HfTextService.load(pathlib.Path({str(tmp_path)!r}))\n"
        "print(len(asyncio.run(service.encode('hello'))))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "4"


async def test_special_tokens_are_kept_by_name() -> None:
    tokenizer = wrapped(byte_level())
    tokenizer.backend_tokenizer.add_special_tokens(["[TOOL_CALLS]"])
    tokenizer = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, eos_token="</s>")
    service = HfTextService(tokenizer)
    try:
        ids = list(await service.encode("a[TOOL_CALLS]b</s>"))
        assert text_of(service.detokenizer(), ids) == "ab"
        assert text_of(service.detokenizer(kept=["[TOOL_CALLS]", "[ARGS]"]), ids) == "a[TOOL_CALLS]b"
        assert text_of(service.detokenizer(kept=["[ARGS]"]), ids) == "ab"
    finally:
        await service.close()


async def test_templates_are_given_tools_and_calls() -> None:
    template = (
        "{{ tools | tojson }}{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments.a }}{% endfor %}{% endfor %}"
    )
    service = HfTextService(wrapped(byte_level(), chat_template={"default": "x", "tool_use": template}))
    assert service.chat_template == f"x\n{template}"
    try:
        tools = [{"type": "function", "function": {"name": "f"}}]
        call = {"function": {"name": "f", "arguments": {"a": 7}}}
        ids = await service.encode_chat([("assistant", "")], tools=tools, more={0: {"tool_calls": [call]}})
        assert await service.decode(ids) == json.dumps(tools) + "assistant:7"
    finally:
        await service.close()


async def test_what_a_tokenizer_is_names_its_special_tokens_and_template() -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="</s>", chat_template=TEMPLATE)
    service = HfTextService(tokenizer)
    info = service.info
    assert (info["eos_token"], info["bos_token"], info["chat_template"]) == ("</s>", None, TEMPLATE)
    assert info["tokenizer_class"]
    await service.close()
    with pytest.raises(Unready):
        _ = TokenIdsOnlyText().info
