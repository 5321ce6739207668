"""A tenant's patterns: the same keys fit as peft finds, within a core's time; a failure has a field."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st
from manylora_shared.errors import InvalidRequest
from manylora_worker.weights.peft.patterns import FirstOf, Matching
from manylora_worker.weights.peft_config import LoraSettings, ModuleMatcher, Problems, parse_settings

from tests.frozen_heap import frozen_heap

MODULES = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate",
    "mlp.up",
    "mlp.down",
)

part = st.sampled_from(["a", "b", "ab", "q_proj", "0", "1", "10", "x-y", " ", "#", "A", "é", "𝒜", ""])
joint = st.sampled_from([".", ".", ".", r"\.", "", "_"])
key_part = st.one_of(
    part, part, st.sampled_from(["[ab]", "a|b", ".*", r"\d+", "(?i)A", "(a)", "b?", "^", "$", "..", r"\w"])
)


@st.composite
def joined(draw: st.DrawFn, of: st.SearchStrategy[str], by: st.SearchStrategy[str]) -> str:
    parts = draw(st.lists(of, min_size=1, max_size=4))
    return draw(st.sampled_from(["", "", "^"])) * (of is not part) + "".join(
        each + (draw(by) if index < len(parts) - 1 else "") for index, each in enumerate(parts)
    )


paths = joined(part, st.sampled_from([".", ".", "_", "a"]))
keys = st.one_of(joined(key_part, joint), paths.map(lambda path: f"^{path}"), paths, paths.map(regex.escape))


def first_by_turns(keys: Sequence[str], path: str) -> int | None:
    """As peft's get_pattern_key."""
    return next((i for i, key in enumerate(keys) if regex.match(rf"(.*\.)?({key})$", path)), None)


@given(st.lists(keys.filter(lambda key: "(?i)" not in key[1:]), max_size=6, unique=True), st.lists(paths, max_size=4))
def test_the_first_key_that_fits_is_that_of_trying_each(keys: list[str], paths: list[str]) -> None:
    first = FirstOf("rank_pattern", keys, Matching())
    ends = [path[at:] for path in paths for at in range(len(path))]
    for path in [*paths, *ends, *(f"a.{path}" for path in paths), *(key.replace(".", "x") for key in keys)]:
        if "\n" not in path:
            assert first(path) == first_by_turns(keys, path), (keys, path)


@given(key_part | joined(key_part, joint), st.lists(paths, max_size=4))
def test_a_whole_pattern_fits_as_it_did(pattern: str, paths: list[str]) -> None:
    """As re.fullmatch, and as the pattern in a group before the text's end."""
    for path in [*paths, pattern.replace(".", "x")]:
        if "(?i)" not in pattern[1:]:
            wrapped = regex.match(rf"(?:{pattern})\Z", path) is not None
            assert Matching().is_all_of("target_modules", pattern, path) == wrapped == bool(re.fullmatch(pattern, path))


def settings(**fields: Any) -> LoraSettings:
    given: dict[str, Any] = {
        "rank": 4, "alpha": 4.0, "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {},
        "target_modules": ("q_proj",), "exclude_modules": (), "layers_to_transform": None, "layers_pattern": (),
    }  # fmt: skip
    return LoraSettings(**(given | fields))


@pytest.mark.parametrize("form", ["{}", "^{}", "escaped"])
def test_a_rank_and_an_alpha_for_each_module_cost_little(form: str) -> None:
    """As EVA's redistribution writes them, for as many modules as a map may name."""
    names = [f"model.layers.{i}.{module}" for i in range(585) for module in MODULES]
    keys = [regex.escape(name) if form == "escaped" else form.format(name) for name in names]
    ranks, problems = {key: 2 + i % 5 for i, key in enumerate(keys)}, Problems()
    config = {"peft_type": "LORA", "target_modules": ["q_proj"], "rank_pattern": ranks, "alpha_pattern": ranks}
    with frozen_heap():
        before_s = time.thread_time()
        parsed = parse_settings(config, base_names=["m"], max_rank=8, problems=problems)
        assert parsed is not None
        assert not problems.violations
        matcher = ModuleMatcher(parsed)
        assert [matcher.rank_and_scale(name) for name in names] == [(2 + i % 5, 1.0) for i in range(len(names))]
        assert time.thread_time() - before_s < 1.0


def test_names_of_many_shapes_have_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manylora_worker.weights.peft.patterns.PATTERN_BUDGET_S", 0.2)
    keys = {"".join("." if i >> bit & 1 else "a" for bit in range(12)): 2 for i in range(4096)}
    before_s = time.thread_time()
    matcher = ModuleMatcher(settings(rank_pattern=keys))
    with pytest.raises(InvalidRequest, match="rank_pattern: its patterns take too long"):
        [matcher.rank_and_scale("bbbbbbbbbbbb") for _ in range(100_000)]
    assert time.thread_time() - before_s < 1.0


@pytest.mark.parametrize("field", ["target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"])
def test_a_budget_is_shared_and_told_by_the_field(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    monkeypatch.setattr("manylora_worker.weights.peft.patterns.PATTERN_BUDGET_S", -1.0)
    matcher = ModuleMatcher(settings(**{field: {"x+": 1} if field.endswith("_pattern") else "x"}))
    with pytest.raises(InvalidRequest, match=f"{field}: its patterns take too long"):
        matcher.is_targeted("x", is_linear=True), matcher.rank_and_scale("x")


def test_what_other_threads_do_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """`regex` counts the time of the whole process, and a wall's clock that of all processes."""
    monkeypatch.setattr("manylora_worker.weights.peft.patterns.PATTERN_BUDGET_S", 0.3)
    is_over = threading.Event()

    def spin() -> None:
        while not is_over.is_set():
            pass

    others = [threading.Thread(target=spin) for _ in range(3)]
    for each in others:
        each.start()
    try:
        matching = Matching()
        time.sleep(0.5)
        assert matching.match("rank_pattern", "(a|b)+$", "ab" * 9) is not None
        before_s = time.thread_time()
        with pytest.raises(InvalidRequest, match="too long"):
            matching.is_all_of("target_modules", r"(\w|\w\w|\.|\w\.)+[789]", "model.layers.self_attn.q_proj" * 3)
        assert time.thread_time() - before_s > 0.2
    finally:
        is_over.set()
        for each in others:
            each.join()


UNUSABLE: list[tuple[str, dict[str, Any], str]] = [
    ("rank_pattern", {"rank_pattern": {"(?x)q_proj # trained": 4}}, "where PEFT puts it"),
    ("alpha_pattern", {"alpha_pattern": {"(?x)q_proj # trained": 4}}, "where PEFT puts it"),
    ("alpha_pattern", {"alpha_pattern": {"q_proj)|(k_proj": 4}}, "is not a pattern"),
    ("rank_pattern", {"rank_pattern": {r"\L<words>": 4}}, "is not a pattern"),
    ("layers_pattern", {"layers_to_transform": [0], "layers_pattern": ["h", "layers|(?P<idx>x)"]}, "group 'idx'"),
    ("layers_pattern", {"layers_to_transform": [0], "layers_pattern": "(?x)layers #"}, "group 'idx'"),
    ("target_modules", {"target_modules": ".*(?R)?q_proj"}, "calls one of its groups"),
    ("exclude_modules", {"exclude_modules": r"(?<x>.*)(?&x)?q_proj"}, "calls one of its groups"),
    ("exclude_modules", {"exclude_modules": r"\\(?0)?q_proj"}, "calls one of its groups"),
    ("rank_pattern", {"rank_pattern": {"(q)(?P>x)?": 4}}, "calls one of its groups"),
    ("rank_pattern", {"rank_pattern": {"(?P<a>(?P&a)|q)y": 4}}, "calls one of its groups"),
    ("rank_pattern", {"rank_pattern": {"(q)(?1)?": 4}}, "calls one of its groups"),
]


@pytest.mark.parametrize(("field", "fields", "says"), UNUSABLE)
def test_what_cannot_be_matched_is_a_problem_of_its_field(field: str, fields: dict[str, Any], says: str) -> None:
    problems = Problems()
    config = {"peft_type": "LORA", "target_modules": ["q_proj"]} | fields
    parse_settings(config, base_names=["m"], max_rank=8, problems=problems)
    assert [v.field for v in problems.violations if says in v.description] == [field], problems.violations


@pytest.mark.parametrize("error", [MemoryError(), RecursionError("deep"), IndexError("no such group")])
def test_whatever_matching_raises_is_a_violation(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    class Compiled:
        def match(self, *_: object, **__: object) -> None:
            raise error

    monkeypatch.setattr("manylora_worker.weights.peft.patterns.regex.compile", lambda _: Compiled())
    with pytest.raises(InvalidRequest) as caught:
        ModuleMatcher(settings(rank_pattern={"q_+": 2})).rank_and_scale("q_proj")
    assert caught.value.violations[0].field == "rank_pattern"
    assert type(error).__name__ in caught.value.violations[0].description
