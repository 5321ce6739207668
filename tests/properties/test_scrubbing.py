"""What is taken out of texts, against generated ones: with a right check digit it goes, with a wrong one it stays."""

from __future__ import annotations

import string
import time

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from manylora_router.keeping.scrubbing import _IBAN_CHARS, scrubbed

DIGITS = st.text("0123456789", min_size=12, max_size=18)
WORDS = st.sampled_from(["", "call ", "see (", "It is: ", "名前 ", "\n"])
ENDS = st.sampled_from(["", " now", ", please", ").", "\n", "?"])


def luhn_digit(digits: str) -> int:
    total = sum(sum(divmod(2 * int(d), 10)) if i % 2 == 0 else int(d) for i, d in enumerate(reversed(digits)))
    return -total % 10


def grouped(text: str, size: int, mark: str) -> str:
    return mark.join(text[i : i + size] for i in range(0, len(text), size)) if mark else text


@given(WORDS, DIGITS, st.sampled_from(["", " ", "-"]), ENDS)
def test_a_card_goes_by_its_check_digit(before: str, digits: str, mark: str, after: str) -> None:
    digits = "4" + digits[1:]
    right = grouped(digits + str(luhn_digit(digits)), 4, mark)
    wrong = grouped(digits + str((luhn_digit(digits) + 1) % 10), 4, mark)
    assert scrubbed(f"{before}{right}{after}") == f"{before}[card]{after}"
    assert "[card]" not in scrubbed(f"{before}{wrong}{after}")


def iban_of(country: str, account: str) -> str:
    number = int("".join(str(int(char, 36)) for char in f"{account}{country}00"))
    return f"{country}{98 - number % 97:02d}{account}"


@given(
    WORDS,
    st.sampled_from(sorted(_IBAN_CHARS)),
    st.text(string.digits, min_size=30, max_size=30),
    st.sampled_from(["", " "]),
    st.sampled_from(["", " please", ", thanks", " today is fine"]),
)
def test_an_iban_goes_by_its_check(before: str, country: str, account: str, mark: str, after: str) -> None:
    right = iban_of(country, account[: _IBAN_CHARS[country] - 4])
    wrong = right[:-1] + str((int(right[-1]) + 1) % 10)
    assert scrubbed(f"{before}{grouped(right, 4, mark)}{after}") == f"{before}[iban]{after}"
    assert "[iban]" not in scrubbed(f"{before}{grouped(wrong, 4, mark)}{after}")


@given(WORDS, st.ip_addresses(), ENDS)
def test_addresses_of_both_kinds_go(before: str, address: object, after: str) -> None:
    assume(any(char.isdigit() for char in str(address)))
    assert scrubbed(f"{before}{address}{after}") == f"{before}[ip]{after}"


LOCAL = st.text(string.ascii_letters + string.digits + "._%+-", min_size=1, max_size=30)
HOST = st.text(string.ascii_lowercase + string.digits, min_size=1, max_size=12)


@given(WORDS, LOCAL, HOST, st.sampled_from(["com", "co.uk", "example", "museum"]), ENDS)
def test_addresses_of_mail_go(before: str, local: str, host: str, top: str, after: str) -> None:
    assert scrubbed(f"{before}{local}@{host}.{top}{after}") == f"{before}[email]{after}"


@given(
    WORDS,
    st.sampled_from(["mlk-", "sk-", "ghp_", "hf_", "xoxb-"]),
    st.text(string.hexdigits, min_size=20, max_size=80),
    ENDS,
)
def test_keys_go(before: str, kind: str, rest: str, after: str) -> None:
    assert scrubbed(f"{before}{kind}{rest}{after}") == f"{before}[secret]{after}"


@pytest.mark.parametrize(
    "number",
    [
        "+44 20 7946 0958",
        "+1 (202) 555-0143",
        "+4930123456",
        "0049 30 123456",
        "030 / 1234567",
        "(202) 555-0143",
        "020 7946 0958",
    ],
)
def test_numbers_of_phones_go(number: str) -> None:
    assert scrubbed(f"ring {number}, please") == "ring [phone], please"


@pytest.mark.parametrize(
    "text",
    [
        "the year 2026, on 2026-11-25 at 20:15:30.123",
        "version 1.2.3.4.5 of 3.14159 and 10:20",
        "12345678 items, 0.5 of 1000000",
        "1e10 == 10_000_000_000; a[0:10]",
        "std::vector<int> x; a::b",
        "chapter 12, page 345",
        "300.300.300.300",
        "",
    ],
)
def test_what_is_none_stays(text: str) -> None:
    assert scrubbed(text) == text


def test_names_of_the_tenants_list_go_as_whole_words() -> None:
    names = ("Ann", "Ann Miller", "Straße 7", "a+b")
    assert scrubbed("ANN miller and Ann; Annabel, straße 7, a+b", names) == "[name] and [name]; Annabel, [name], [name]"
    assert scrubbed("Ann") == "Ann"


@given(st.text(max_size=300))
def test_what_was_scrubbed_has_nothing_more_to_scrub(text: str) -> None:
    once = scrubbed(text)
    assert scrubbed(once) == once


def test_a_text_of_beginnings_takes_no_longer_than_another() -> None:
    """Tokens begin where words do: a run that has their mark again and again is looked at once."""
    took = []
    for part in ("xyz", "eyJ"):
        began = time.process_time()
        scrubbed(part * (1 << 17))
        took.append(time.process_time() - began)
    assert took[1] < 2 * took[0] + 0.1, took


@pytest.mark.parametrize(
    ("before", "after"),
    [
        *[("", ""), ("Bearer ", "."), ("token=", "&x"), ("名", " "), ('{"jwt":"', '"')],
        *[("token%3D", ""), (r"\n", ""), (r"\u003d", ""), ("jwt_", " "), ("id-token-", ""), ("x", "")],
    ],
)
def test_tokens_go(before: str, after: str) -> None:
    token = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"
    assert token not in scrubbed(f"{before}{token}{after}")
    assert "[secret]" in scrubbed(f"{before}{token}{after}")


@pytest.mark.parametrize(
    "part",
    ["eyJaaaaaaaa.", "eyJ", "1 ", "+1 2", "a@", "0:", "AB12 ", "sk-", "-----BEGIN PRIVATE KEY-----", "1.", "020 "],
)
def test_no_text_takes_long(part: str) -> None:
    """A quarter of a million characters, which is the most of one text."""
    began = time.process_time()
    scrubbed(part * ((1 << 18) // len(part)), ("Ann",) * 3)
    assert time.process_time() - began < 10
