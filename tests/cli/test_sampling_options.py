"""An option of `generate` for each sampling parameter."""

from __future__ import annotations

from manylora_shared.sampling import PARAMETERS, Sampling

from tests.cli.conftest import Manylora
from tests.cli.fake_server import FakeRouter


async def test_generate_has_an_option_for_each_sampling_parameter(manylora: Manylora, router: FakeRouter) -> None:
    out = await manylora(
        *(
            "generate",
            "--tenant",
            "acme",
            "--temperature",
            "0.5",
            "--top-k",
            "3",
            "--top-p",
            "0.25",
            "--min-p",
            "0.125",
        ),
        *("--repetition-penalty", "1.5", "--presence-penalty", "-0.5", "--frequency-penalty", "0.75", "--seed", "0"),
        *("--top-logprobs", "0", "--logit-bias", "3=-1.5", "--logit-bias", "7=2", "--min-tokens", "4"),
        *("--bad-words", "no", "--bad-words", " never", "one two"),
    )
    assert out.exit_code == 0, out.stderr
    assert Sampling.of_message(router.requests[0].sampling) == Sampling(
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.75,
        seed=0,
        top_logprobs=0,
        logit_bias={3: -1.5, 7: 2.0},
        min_tokens=4,
        bad_words=("no", " never"),
    )
    options = (await manylora("generate", "--help")).stdout
    assert all(f"--{row.name.replace('_', '-')}" in options for row in PARAMETERS)


async def test_generate_refuses_a_bias_that_is_none(manylora: Manylora) -> None:
    out = await manylora("generate", "--tenant", "acme", "--logit-bias", "3:4", "one two")
    assert (out.exit_code, out.stdout) == (2, "")
    assert "--logit-bias: '3:4' is not TOKEN_ID=BIAS" in out.stderr
