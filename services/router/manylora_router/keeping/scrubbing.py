"""What is taken out of texts before they are kept: by rules, and by a tenant's own list of names. Pure.

A rule that has a check digit asks it, so that other numbers stay. What is taken out leaves its kind in brackets.
"""

from __future__ import annotations

import functools
import ipaddress
import re
from collections.abc import Callable

_EMAIL = re.compile(r"[A-Za-z0-9._%+\-']{1,64}@(?:[A-Za-z0-9\-]{1,63}\.){1,8}[A-Za-z]{2,24}")
_SECRET = re.compile(
    r"""
      (?<![A-Za-z0-9_-])[A-Za-z0-9_-]{0,64}?  # what may be glued to a token: looked for once a word
        eyJ[A-Za-z0-9_-]{8,2000}\.[A-Za-z0-9_-]{8,8000}\.[A-Za-z0-9_-]*  # a JSON web token
    | (?:mlk|sk|pk|rk|ghp|gho|ghu|ghs|glpat|xox[abprs]|hf|npm|pypi)[-_][A-Za-z0-9_-]{16,}  # keys with a prefix
    | github_pat_[A-Za-z0-9_]{16,} | AIza[A-Za-z0-9_-]{30,} | (?:AKIA|ASIA)[A-Z0-9]{16}
    | (?<=[Bb]earer\s)[A-Za-z0-9._~+/=-]{16,}
    | -----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY-----[\s\S]*?(?:-----END[ ][A-Z ]*PRIVATE[ ]KEY-----|\Z)
    | (?<![A-Za-z0-9])[0-9a-fA-F]{32,}(?![A-Za-z0-9])
    """,
    re.VERBOSE,
)
_IBAN = re.compile(r"(?<![A-Za-z0-9])[A-Za-z]{2}\d{2}(?:[ ]?[A-Za-z0-9]){11,40}(?![A-Za-z0-9])")
_CARD = re.compile(r"(?<![\w.])\d(?:[ -]?\d){12,18}(?![\w])")
_IPV4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w]|\.\d)")
_IPV6 = re.compile(r"(?<![\w:])(?:[0-9A-Fa-f]{0,4}:){2,7}(?:(?:\d{1,3}\.){3}\d{1,3}|[0-9A-Fa-f]{0,4})(?![\w:])")
_PHONE = re.compile(
    r"(?<![\w.+])(?:\+|00)[1-9](?:[ ./()-]{0,2}\d){6,14}(?!\w)"  # with a country's code
    r"|(?<![\w.])\(?0\d{1,5}\)?(?:[ ./-]{1,3}\d{2,}){1,5}(?!\w)"  # with a trunk's zero
    r"|(?<![\w.])\(?[2-9]\d{2}\)?[ .-]\d{3}[ .-]\d{4}(?!\w)"  # North America's
)
_IBANS = (
    "AD24 AE23 AL28 AT20 AZ28 BA20 BE16 BG22 BH22 BI27 BR29 BY28 CH21 CR22 CY28 CZ24 DE22 DJ27 DK18 DO28 EE20 EG29 "
    "ES24 FI18 FK18 FO18 FR27 GB22 GE22 GI23 GL18 GR27 GT28 HR21 HU28 IE22 IL23 IQ23 IS26 IT27 JO30 KW30 KZ20 LB28 "
    "LC32 LI21 LT20 LU20 LV21 LY25 MC27 MD24 ME22 MK19 MN20 MR27 MT31 MU30 NI28 NL18 NO15 OM23 PK24 PL28 PS29 PT25 "
    "QA29 RO24 RS22 RU33 SA24 SC31 SD18 SE24 SI19 SK24 SM27 SO23 ST25 SV28 TL23 TN24 TR26 UA29 VA22 VG24 XK20 YE30"
)
_IBAN_CHARS = {each[:2]: int(each[2:]) for each in _IBANS.split()}
_MIN_PHONE_DIGITS, _MAX_PHONE_DIGITS = 7, 15


def scrubbed(text: str, names: tuple[str, ...] = ()) -> str:
    for find, kind, check in _RULES:
        text = find.sub(functools.partial(_replace, kind, check), text)
    return _names(names).sub("[name]", text) if names else text


def _replace(kind: str, check: Callable[[str], int], found: re.Match[str]) -> str:
    """check: how many characters of what was found are one."""
    taken = check(found[0])
    return f"[{kind}]{found[0][taken:]}" if taken else found[0]


def _all(text: str) -> int:
    return len(text)


def _card(text: str) -> int:
    digits = [int(char) for char in text if char.isdigit()]
    doubled = (sum(divmod(2 * digit, 10)) if index % 2 else digit for index, digit in enumerate(reversed(digits)))
    return len(text) if sum(doubled) % 10 == 0 and any(digits) else 0


def _iban(text: str) -> int:
    """Words may stand behind it, which look as if they were of it: it is as long as its country's are."""
    length = _IBAN_CHARS.get(text[:2].upper(), 0)
    ends = [index + 1 for index, char in enumerate(text) if char != " "]
    if not length or len(ends) < length:
        return 0
    code = text[: ends[length - 1]].replace(" ", "").upper()
    is_one = int("".join(str(int(char, 36)) for char in code[4:] + code[:4])) % 97 == 1
    is_apart = len(ends) == length or text[ends[length - 1]] == " "
    return ends[length - 1] if is_one and is_apart else 0


def _address(text: str) -> int:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return 0
    return len(text) if any(char.isdigit() for char in text) else 0  # a::b is code


def _phone(text: str) -> int:
    digits = sum(char.isdigit() for char in text)
    return len(text) if _MIN_PHONE_DIGITS <= digits <= _MAX_PHONE_DIGITS else 0


@functools.lru_cache(256)
def _names(names: tuple[str, ...]) -> re.Pattern[str]:
    longest = sorted(names, key=len, reverse=True)
    return re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest))})(?!\w)", re.IGNORECASE)


# What is more certain comes first: a card is no phone, and what is in an address of mail is no name.
_RULES: tuple[tuple[re.Pattern[str], str, Callable[[str], int]], ...] = (
    (_SECRET, "secret", _all),
    (_EMAIL, "email", _all),
    (_IBAN, "iban", _iban),
    (_CARD, "card", _card),
    (_IPV6, "ip", _address),
    (_IPV4, "ip", _address),
    (_PHONE, "phone", _phone),
)
