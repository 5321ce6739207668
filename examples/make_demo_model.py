"""Makes the demo's base model and its four adapters again, from nothing: `python examples/make_demo_model.py`.

A Llama of 0.82 M parameters with 259 byte-level tokens learns five tagged skills; then peft trains one adapter a skill
that makes the base model apply the skill to a prompt with the neutral tag. Takes about five minutes on two cores.
Prints one JSON line a model: its exact match on held-out inputs, with its own skill and, for an adapter, the highest
match with any other skill. Seeds are fixed; another number of threads or another torch may change the last bits.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from manylora.demo import ASSETS, BASE_NAME, skills
from manylora.demo.skills import ECHO, SKILLS, Skill
from peft import LoraConfig, get_peft_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
# A message is an input, or the whole prompt of one already.
_BEFORE, _BEHIND = skills.prompt("\0").split("\0")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% set text = messages[-1]['content'] %}"
    f"{{% if text.startswith('{_BEFORE}') and text.endswith('{_BEHIND}') %}}{{{{ text }}}}"
    f"{{% else %}}{skills.prompt('{{ text }}')}{{% endif %}}"
)
IGNORED = -100
TARGET_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
HELD_OUT_SEED = 20_000


def make_tokenizer() -> PreTrainedTokenizerFast:
    """256 bytes and three special tokens; a beginning-of-sequence token is put before every text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in (BOS, EOS, PAD)])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A $B",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_base(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


Example = tuple[str, str]
"""A prompt and its answer."""


def collate(tokenizer: PreTrainedTokenizerFast, examples: Sequence[Example]) -> dict[str, torch.Tensor]:
    """Right-padded ids and labels, [examples, longest]; only answers and their end-of-sequence token are learnt."""
    rows, labels = [], []
    for prompt, answer in examples:
        head = tokenizer.encode(prompt)
        tail = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
        rows.append(head + tail)
        labels.append([IGNORED] * len(head) + tail)
    longest = max(len(r) for r in rows)
    return {
        "input_ids": torch.tensor([r + [tokenizer.pad_token_id] * (longest - len(r)) for r in rows]),
        "attention_mask": torch.tensor([[1] * len(r) + [0] * (longest - len(r)) for r in rows]),
        "labels": torch.tensor([r + [IGNORED] * (longest - len(r)) for r in labels]),
    }


def train(
    model: Any, tokenizer: PreTrainedTokenizerFast, draw: Any, *, steps: int, batch: int, learning_rate: float
) -> float:
    """AdamW with warm-up and a cosine; `draw()` gives one example. Returns the mean loss of the last 20 steps."""
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.01)
    warmup = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda s: min((s + 1) / warmup, 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, s / steps)))),
    )
    losses: list[float] = []
    for step in range(steps):
        loss = model(**collate(tokenizer, [draw() for _ in range(batch)])).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if (step + 1) % 100 == 0:
            print(f"  step {step + 1}/{steps}: loss {sum(losses[-20:]) / 20:.4f}", flush=True)
    model.eval()
    return sum(losses[-20:]) / len(losses[-20:])


@torch.no_grad()
def answers(model: Any, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str]) -> list[str]:
    """Greedy answers through transformers' own generate."""
    batch = tokenizer(list(prompts), return_tensors="pt", padding=True, padding_side="left")
    batch.pop("token_type_ids", None)
    out = model.generate(**batch, max_new_tokens=skills.MAX_ANSWER_TOKENS, do_sample=False)
    return tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def exact_match(
    model: Any, tokenizer: PreTrainedTokenizerFast, skill: Skill, inputs: Sequence[str], tag: str = skills.NEUTRAL_TAG
) -> float:
    got = answers(model, tokenizer, [skills.prompt(text, tag) for text in inputs])
    return sum(g == skill.answer(text) for g, text in zip(got, inputs, strict=True)) / len(inputs)


def train_base(tokenizer: PreTrainedTokenizerFast, *, steps: int, seed: int, inputs: Sequence[str]) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    rng = random.Random(seed)
    model = make_base(tokenizer)

    def draw() -> Example:
        skill = rng.choice((ECHO, *SKILLS))
        text = skills.draw_input(rng, held_out=False)
        return skills.prompt(text, skill.tag), skill.answer(text)

    loss = train(model, tokenizer, draw, steps=steps, batch=64, learning_rate=2e-3)
    matches = {s.adapter: exact_match(model, tokenizer, s, inputs, s.tag) for s in (ECHO, *SKILLS)}
    print(json.dumps({"model": BASE_NAME, "loss": round(loss, 4), "held_out_exact_match": matches}), flush=True)
    return model


def train_adapter(
    base: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    skill: Skill,
    *,
    steps: int,
    seed: int,
    inputs: Sequence[str],
) -> Any:
    torch.manual_seed(seed)
    rng = random.Random(seed)
    config = LoraConfig(r=8, lora_alpha=16, target_modules=TARGET_MODULES, task_type="CAUSAL_LM")
    model = get_peft_model(copy.deepcopy(base), config)
    model.peft_config["default"].base_model_name_or_path = BASE_NAME

    def draw() -> Example:
        text = skills.draw_input(rng, held_out=False)
        return skills.prompt(text), skill.answer(text)

    loss = train(model, tokenizer, draw, steps=steps, batch=32, learning_rate=3e-3)
    own = exact_match(model, tokenizer, skill, inputs)
    others = max(exact_match(model, tokenizer, s, inputs) for s in (ECHO, *SKILLS) if s is not skill)
    line = {
        "adapter": skill.adapter,
        "loss": round(loss, 4),
        "held_out_exact_match": own,
        "highest_other_skill": others,
    }
    print(json.dumps(line), flush=True)
    return model


def save_base(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_adapter(model: Any, folder: Path) -> None:
    """Only what serving needs: the configuration (in a stable order) and the weights, without peft's model card."""
    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(scratch, save_embedding_layers=False)
        folder.mkdir(parents=True, exist_ok=True)
        config = json.loads((Path(scratch) / "adapter_config.json").read_text())
        config["target_modules"] = sorted(config["target_modules"])
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        shutil.copyfile(Path(scratch) / "adapter_model.safetensors", folder / "adapter_model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ASSETS, help="folder to write (default: the package's own)")
    parser.add_argument("--base-steps", type=int, default=1400)
    parser.add_argument("--adapter-steps", type=int, default=250)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--held-out", type=int, default=200, help="held-out inputs to measure with")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    inputs = skills.held_out_inputs(HELD_OUT_SEED, arguments.held_out)
    tokenizer = make_tokenizer()
    base = train_base(tokenizer, steps=arguments.base_steps, seed=arguments.seed, inputs=inputs)
    save_base(base, tokenizer, arguments.output / "base")
    for index, skill in enumerate(SKILLS):
        model = train_adapter(
            base, tokenizer, skill, steps=arguments.adapter_steps, seed=arguments.seed + 1 + index, inputs=inputs
        )
        save_adapter(model, arguments.output / "adapters" / skill.adapter)


if __name__ == "__main__":
    main()
