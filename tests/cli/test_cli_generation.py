"""`generate`: what is sent, what is shown, and how failures are told."""

from __future__ import annotations

from tests.cli.conftest import Manylora
from tests.cli.fake_server import VERSION, FakeRouter


async def test_generate_streams_text_and_sends_what_was_asked(manylora: Manylora, router: FakeRouter) -> None:
    out = await manylora(
        *("generate", "--tenant", "acme", "--adapter", "upper+lower:0.5", "--class", "batch", "--max-tokens", "9"),
        *("--temperature", "0.5", "--seed", "12", "--stop", "a", "--stop", "b c"),
        *("--priority", "-7", "--timeout", "60", "--user", "u-1", "--conversation", "c-2", "one two"),
    )
    assert (out.exit_code, out.stdout, out.stderr) == (0, "ONE TWO\n", "")
    request, metadata = router.requests[0], router.metadata[0]
    assert (request.text, request.max_tokens, list(request.stop)) == ("one two", 9, ["a", "b c"])
    assert (request.sampling.temperature, request.sampling.seed) == (0.5, 12)
    assert not request.sampling.HasField("top_k")
    asked = {k: v for k, v in metadata.items() if k.startswith("x-")}
    assert asked == {
        "x-tenant-id": "acme",
        "x-adapter-id": "upper+lower:0.5",
        "x-request-class": "batch",
        "x-priority": "-7",
        "x-user-id": "u-1",
        "x-conversation-id": "c-2",
    }
    (left_s,) = router.times_left_s
    assert left_s is not None
    assert 50 < left_s < 61  # grpc rounds it up


async def test_generate_json_ends_with_one_object(manylora: Manylora) -> None:
    out = await manylora("generate", "--tenant", "acme", "--json", "one two")
    assert out.exit_code == 0
    assert out.stderr == "ONE TWO\n"
    assert out.json == {
        "request_id": "r-1",
        "text": "ONE TWO",
        "token_ids": [100, 101],
        "finish_reason": "stop",
        "outcome": "completed",
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "cached_prompt_tokens": 0, "resumed": 0},
        "adapter": "upper@1",
        "adapter_version": VERSION,
        "seed": 7,
        "worker_id": "w-1",
        "timings": {
            "queue_ms": 0.5,
            "ttft_ms": 1.5,
            "total_ms": 2.5,
            "adapter_wait_ms": 0.0,
            "prefill_ms": 0.0,
            "decode_ms": 0.0,
        },
    }


async def test_generate_takes_token_ids_and_stdin(manylora: Manylora, router: FakeRouter) -> None:
    out = await manylora("generate", "--tenant", "acme", "--token-ids", "3, 1,2")
    assert (out.exit_code, out.stdout) == (0, "3,1,2\n")
    assert list(router.requests[0].token_ids.ids) == [3, 1, 2]
    out = await manylora("generate", "--tenant", "acme", "-", stdin="from stdin")
    assert (out.exit_code, out.stdout) == (0, "FROM STDIN\n")


async def test_a_refused_request_is_told_on_stderr_and_in_json(manylora: Manylora) -> None:
    message = "sampling.temperature: must be at least 0; max_tokens: must be at most 5"
    out = await manylora("generate", "--tenant", "acme", "two wrongs")
    told = "INVALID_ARGUMENT: 2 errors\n  sampling.temperature: must be at least 0\n  max_tokens: must be at most 5\n"
    assert (out.exit_code, out.stdout, out.stderr) == (1, "", told)
    out = await manylora("generate", "--tenant", "acme", "--json", "two wrongs")
    assert out.exit_code == 1
    assert out.json["error"] == {
        "code": "INVALID_ARGUMENT",
        "reason": "INVALID",
        "message": message,
        "violations": [
            {"field": "sampling.temperature", "description": "must be at least 0"},
            {"field": "max_tokens", "description": "must be at most 5"},
        ],
    }


async def test_a_stream_that_breaks_shows_what_had_come(manylora: Manylora) -> None:
    out = await manylora("generate", "--tenant", "acme", "one die")
    assert (out.exit_code, out.stdout) == (1, "ONE DIE\n")
    assert out.stderr == "UNAVAILABLE: worker w-1 was lost\n"
    out = await manylora("generate", "--tenant", "acme", "one die", "--json")
    assert out.json["error"]["code"] == "UNAVAILABLE"
    assert out.json["partial"]["outcome"] == "worker_lost"
    assert out.json["partial"]["text"] == "ONE DIE"


async def test_a_name_that_cannot_be_sent_is_refused_here(manylora: Manylora) -> None:
    out = await manylora("generate", "--tenant", "a\nb", "--adapter", "ä", "--json", "x")
    assert out.exit_code == 1
    assert [v["field"] for v in out.json["error"]["violations"]] == ["x-tenant-id", "x-adapter-id"]


async def test_a_prompt_is_a_chat_message_where_there_is_a_template(manylora: Manylora, router: FakeRouter) -> None:
    router.has_chat_template = True
    out = await manylora("generate", "--tenant", "acme", "one two")
    assert (out.exit_code, out.stdout, router.chats) == (0, "ONE TWO\n", [[("user", "one two")]])
    out = await manylora("generate", "--tenant", "acme", "--system", "be kind", "hi")
    assert (out.exit_code, router.chats[1:]) == (0, [[("system", "be kind"), ("user", "hi")]])
    out = await manylora("generate", "--tenant", "acme", "--raw", "hi")
    assert (out.exit_code, len(router.chats), router.requests[-1].text) == (0, 2, "hi")
    for arguments in (("--system", "s", "--raw", "hi"), ("--system", "s", "--token-ids", "1")):
        assert (await manylora("generate", *arguments)).exit_code == 2


async def test_an_answer_that_begins_as_it_is_told(manylora: Manylora, router: FakeRouter) -> None:
    router.has_chat_template = True
    thinks_not = ("--template-kwarg", "enable_thinking=false", "--template-kwarg", "mode=brief")
    out = await manylora("generate", "--tenant", "acme", "--prefill", "{", *thinks_not, "hi")
    assert (out.exit_code, router.chats) == (0, [[("user", "hi"), ("assistant", "{")]])
    chat = router.requests[0].chat
    assert (chat.continue_final_message, chat.HasField("add_generation_prompt")) == (True, False)
    assert dict(chat.chat_template_kwargs) == {"enable_thinking": False, "mode": "brief"}
    for arguments in (("--prefill", "s", "--raw", "hi"), ("--template-kwarg", "a=1", "--token-ids", "1")):
        assert (await manylora("generate", *arguments)).exit_code == 2
    out = await manylora("generate", "--template-kwarg", "a", "hi")
    assert (out.exit_code, out.stderr) == (2, "Error: --template-kwarg: 'a' is not NAME=JSON\n")


async def test_choices_are_shown_one_after_the_other(manylora: Manylora, router: FakeRouter) -> None:
    out = await manylora("generate", "--tenant", "acme", "--n", "2", "one two")
    assert (out.exit_code, router.requests[0].n) == (0, 2)
    assert (out.stdout, out.stderr) == ("--- choice 1\nONE TWO\n--- choice 2\none two\n", "")
    out = await manylora("generate", "--tenant", "acme", "--n", "2", "--json", "one two")
    assert [choice["text"] for choice in out.json["choices"]] == ["ONE TWO", "one two"]
    out = await manylora("generate", "--tenant", "acme", "--n", "2", "one die")
    assert (out.exit_code, out.stdout) == (1, "--- choice 1\nONE DIE\n--- choice 2\none die\n")


async def test_a_system_message_needs_a_template(manylora: Manylora, router: FakeRouter) -> None:
    out = await manylora("generate", "--tenant", "acme", "--system", "be kind", "hi")
    assert (out.exit_code, router.requests) == (1, [])
    assert out.stderr.startswith("FAILED_PRECONDITION: prompt.chat: ")


async def test_an_empty_answer_is_told(manylora: Manylora) -> None:
    out = await manylora("generate", "--tenant", "acme", " ")
    assert (out.exit_code, out.stdout, out.stderr) == (0, "", "(the model ended at once)\n")


async def test_feedback_is_sent_and_says_what_it_was_for(manylora: Manylora, router: FakeRouter) -> None:
    out = await manylora("feedback", "r1", "--thumb", "up", "--tenant", "acme")
    assert (out.exit_code, out.stdout) == (0, "1 for up@2 counts\n")
    out = await manylora("feedback", "late", "--score", "0.25")
    assert out.stdout == "0.25 for up@2 does not count: an earlier score of this answer stands\n"
    assert (await manylora("feedback", "r1", "--score", "0", "--json")).json == {"adapter": "up@2", "counted": True}
    assert router.scores == [("acme", "r1", 1.0), ("", "late", 0.25), ("", "r1", 0.0)]
    assert (await manylora("feedback", "gone", "--thumb", "down")).exit_code == 1
    for wrong in ([], ["--score", "1", "--thumb", "up"], ["--score", "1.5"]):
        assert (await manylora("feedback", "r1", *wrong)).exit_code == 2
