"""Clients with a venv of their own (conftest.py): litellm, langchain, pydantic-ai and lm-eval."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Served

from tests.real_model import CAPITAL, LEARNED

pytestmark = pytest.mark.clients

TEXT = "The capital of France is"
QUESTIONS: list[tuple[str, list[str], int]] = [
    ("The capital of France is", [" Paris", " London", " Rome"], 0),
    ("The capital of Italy is", [" Madrid", " Rome", " Berlin"], 1),
    ("Two plus two is", [" five", " three", " four"], 2),
    ("The opposite of hot is", [" cold", " warm", " tall"], 0),
    ("Cats like to drink", [" milk", " petrol", " sand"], 0),
    ("The sun rises in the", [" west", " east", " north"], 1),
    ("Water freezes at zero degrees", [" Celsius", " Fahrenheit", " Kelvin"], 0),
    ("A week has", [" eight days", " five days", " seven days"], 2),
]
TASK = """\
task: questions
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


def answer(served: Served, adapter: str) -> str:
    prompt = served.oracle.rendered(CAPITAL, add_generation_prompt=True)
    return served.oracle.text(served.oracle.greedy(prompt, adapter))


def completion(served: Served) -> str:
    return served.oracle.text(served.oracle.greedy(served.oracle.tokenizer(TEXT)["input_ids"], ""))


def test_litellm(served: Served) -> None:
    found = served.script("litellm_client.py")
    for provider in ("openai", "hosted_vllm"):
        assert found[f"{provider}/smollm2"] == [answer(served, "")] * 2
        assert found[f"{provider}/shout"] == [LEARNED["shout"]] * 2
    assert (found["text"], found["unknown"]) == (completion(served), 404)


def test_pydantic_ai(served: Served) -> None:
    found = served.script("pydantic_ai_client.py")
    for answer in (found["tool"], found["format"]):
        assert answer["continent"] in ("Europe", "Asia")
    assert found["asked"] == ["France"]


def test_langchain(served: Served) -> None:
    found = served.script("langchain_client.py")
    assert found["smollm2"] == found["smollm2 batch"] == [answer(served, "")] * 2
    assert found["shout"] == found["shout batch"] == [LEARNED["shout"]] * 2
    assert (found["logprobs"], found["text"]) == (2, completion(served))


@pytest.mark.parametrize(("backend", "adapter"), [("huggingface", ""), ("remote", ""), ("huggingface", "count")])
def test_lm_eval_scores_as_transformers(served: Served, tmp_path: Path, backend: str, adapter: str) -> None:
    rows = [json.dumps({"question": q, "choices": choices, "label": label}) for q, choices, label in QUESTIONS]
    (tmp_path / "questions.jsonl").write_text("\n".join(rows) + "\n")
    (tmp_path / "questions.yaml").write_text(TASK.format(file=tmp_path / "questions.jsonl"))
    model = f"model={adapter or 'smollm2'},base_url={served.url}/v1/completions,num_concurrent=2,max_retries=1"
    served.run(
        "-m", "lm_eval", "run", "--model", "local-completions", "--tasks", "questions", "--batch_size", "4",
        "--model_args", f"{model},tokenizer_backend={backend},tokenizer={served.folder}",
        "--include_path", tmp_path, "--output_path", tmp_path / "out", "--log_samples",
    )  # fmt: skip
    [results] = (tmp_path / "out").rglob("results_*.json")
    [samples] = (tmp_path / "out").rglob("samples_*.jsonl")
    told: dict[str, list[float]] = {}
    for line in samples.read_text().splitlines():
        sample: Any = json.loads(line)
        told[sample["doc"]["question"]] = [float(response[0][0]) for response in sample["resps"]]
    expected = {q: [scored(served, q, choice, adapter) for choice in choices] for q, choices, _ in QUESTIONS}
    for question, values in expected.items():
        assert told[question] == pytest.approx(values, abs=2e-3)
    right = [max(range(3), key=expected[q].__getitem__) == label for q, _, label in QUESTIONS]
    assert json.loads(results.read_text())["results"]["questions"]["acc,none"] == pytest.approx(sum(right) / len(right))


def scored(served: Served, question: str, choice: str, adapter: str) -> float:
    encode = served.oracle.tokenizer
    whole, context = encode(question + choice)["input_ids"], encode(question)["input_ids"]
    rows = torch.log_softmax(served.oracle.logits(whole, adapter), -1)
    return sum(float(rows[i - 1, whole[i]]) for i in range(len(context), len(whole)))
