"""The limits of the house, as house.py counts it."""

from __future__ import annotations

from pathlib import Path

import pytest
from house import Module, annotated_share, folder_sizes, long_documents, modules, without_test, words_a_line

MAX_FOLDER_MODULES = 14
MAX_README_LINES = 130
MAX_DECISION_LINES = 40
MAX_WORDS_A_LINE = 0.6
MAX_FUNCTION_LINES = 70
MAX_FILE_LINES = 600
MIN_ANNOTATED = 0.98
MAX_UNTESTED = 45


def is_kernels(folder: Path) -> bool:
    return folder.name == "kernels"


@pytest.fixture(scope="module")
def found() -> list[Module]:
    return modules()


def test_folders_are_small(found: list[Module]) -> None:
    """Kernels aside: they are one thing, and their names are those of what they compute."""
    large = {folder.as_posix(): n for folder, n in folder_sizes(found).items() if not is_kernels(folder)}
    assert {folder: n for folder, n in large.items() if n > MAX_FOLDER_MODULES} == {}


def test_functions_and_files_are_short(found: list[Module]) -> None:
    """A kernel's body is one function: Triton's language has no other way to keep values in registers."""
    long_functions = [
        f"{module.path}:{name}"
        for module in found
        if not is_kernels(module.folder)
        for n, name in module.functions
        if n > MAX_FUNCTION_LINES
    ]
    assert long_functions == []
    assert [str(module.path) for module in found if module.lines > MAX_FILE_LINES] == []


def test_code_says_more_than_its_docstrings(found: list[Module]) -> None:
    assert words_a_line(found) <= MAX_WORDS_A_LINE


def test_functions_say_what_they_return(found: list[Module]) -> None:
    assert annotated_share(found) >= MIN_ANNOTATED


def test_documents_are_short() -> None:
    limits = {path: MAX_README_LINES if path.name == "README.md" else MAX_DECISION_LINES for path in long_documents()}
    assert {path: n for path, n in long_documents().items() if n > limits[path]} == {}


def test_modules_have_a_test_of_their_name(found: list[Module]) -> None:
    assert len(without_test(found)) <= MAX_UNTESTED
