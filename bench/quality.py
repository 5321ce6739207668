"""Perplexity of a base model on a text, by how its weights, or its keys and values, are kept: on the CPU, loaded and
multiplied as by a worker.

    python -m bench.quality MODEL [--text docs/POLICY.md] [--checkpoint FOLDER ...]

One JSON line a format: float32, bfloat16, and computed in float32, so that what differs is what is kept alone, keys and
values in fp8 (kv-fp8), weights in fp8 and nf4; and each --checkpoint (a quantized one of the same model, say) as it is
shipped. `over_float32` is by how much the perplexity is larger. The text is cut into windows that know nothing of each
other; their first tokens do not count.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from manylora_worker.models.checkpoint import Quantization
from manylora_worker.models.layers.attention import STEP_KEYWORD, AttentionStep
from manylora_worker.models.layers.kv_cache import KvCache
from manylora_worker.models.layers.packed_linear import PackedLinear
from manylora_worker.models.loader import LoadedModel, load_model
from manylora_worker.models.quantized.linear import QuantizedLinear
from manylora_worker.models.torch.inputs import one_chunk
from manylora_worker.models.torch.kv_scales import with_fp8_kv
from transformers import AutoTokenizer

KV_FP8 = "kv-fp8"
Format = tuple[str, str, torch.dtype, Quantization]


def formats(model: str, checkpoints: list[str]) -> list[Format]:
    return [
        ("float32", model, torch.float32, "none"),
        ("bfloat16", model, torch.bfloat16, "none"),
        (KV_FP8, model, torch.float32, "none"),
        ("fp8", model, torch.float32, "fp8"),
        ("nf4", model, torch.float32, "nf4"),
        *((Path(folder).name, folder, torch.float32, "none") for folder in checkpoints),
    ]


def perplexity(how: Format, windows: list[list[int]], threads: int) -> tuple[float, int]:
    """And the bytes of weights, as they are kept."""
    name, folder, dtype, quantization = how
    loaded = load_model(folder, dtype=dtype, quantization=quantization, threads=threads)
    model = loaded.model
    kept = [module for module in model.modules() if isinstance(module, PackedLinear | QuantizedLinear)]
    num_bytes = sum(each.nbytes for each in model.parameters()) + sum(module.weight_bytes for module in kept)
    if name == KV_FP8:
        loaded = with_fp8_kv(loaded)
    else:
        model.set_attn_implementation("eager")
    total = 0.0
    with torch.inference_mode():
        for window in windows:
            ids = torch.tensor([window])
            step = {STEP_KEYWORD: window_step(loaded, len(window))} if name == KV_FP8 else {}
            logits = model(input_ids=ids, use_cache=False, **step).logits[0, :-1].float()
            total += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
    return math.exp(total / sum(len(window) - 1 for window in windows)), num_bytes


def window_step(loaded: LoadedModel, tokens: int) -> AttentionStep:
    """Attends to keys and values as a worker's blocks keep them."""
    kv = loaded.spec.kv
    num_blocks = 1 + kv.state_blocks(tokens, loaded.dtype)
    return one_chunk(KvCache(kv, num_blocks=num_blocks, block_size=tokens, dtype=loaded.dtype, device=loaded.device))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, or a name in the local hub cache")
    parser.add_argument("--text", type=Path, default=Path("docs/POLICY.md"))
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--windows", type=int, default=4, help="at most so many")
    parser.add_argument("--checkpoint", action="append", default=[])
    parser.add_argument("--formats", default="", help="with commas; default: all. float32 is measured in any case")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    text = options.text.read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(options.model)(text, add_special_tokens=False)["input_ids"]
    windows = [ids[at : at + options.window] for at in range(0, len(ids) - options.window + 1, options.window)]
    windows = windows[: options.windows]
    whole: dict[str, Any] = {
        "bench": "quality", "model": Path(options.model).name, "text": options.text.name,
        "text_sha256": hashlib.sha256(text.encode()).hexdigest()[:12], "tokens": sum(map(len, windows)),
        "window": options.window,
    }  # fmt: skip
    least, wanted = 0.0, options.formats.split(",") if options.formats else None
    for how in formats(options.model, options.checkpoint):
        if wanted is not None and how[0] not in (*wanted, "float32"):
            continue
        started = time.monotonic()
        found, num_bytes = perplexity(how, windows, options.threads)
        least = least or found
        line = {"format": how[0], "perplexity": round(found, 4), "over_float32": round(found / least - 1, 5)}
        print(json.dumps(whole | line | {"weight_bytes": num_bytes, "seconds": round(time.monotonic() - started, 1)}))


if __name__ == "__main__":
    main()
