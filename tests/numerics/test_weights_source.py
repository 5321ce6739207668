"""Reading adapter folders: every refusal names what is wrong, and nothing is read by halves."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from manylora_shared.ids import AdapterUid, TenantId, adapter_uid, digest_of
from manylora_shared.stores.adapter_files import adapter_digest
from manylora_worker.weights import source
from manylora_worker.weights.layout import HostAdapter
from manylora_worker.weights.packing import Scratch
from manylora_worker.weights.source import AdapterInvalid, AdapterLimits, read_adapter
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.frozen_heap import frozen_heap
from tests.numerics.conftest import Family, FamilyOf
from tests.numerics.driver import LIMITS

FIRST_KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


class Folder:
    """A copy of a good adapter, to be spoiled."""

    def __init__(self, family: Family, path: Path) -> None:
        self.family = family
        self.path = path
        self.scratch = Scratch()
        shutil.copytree(family.adapters["all-linear"], path)
        self.weights = path / "adapter_model.safetensors"

    def set(self, **fields: Any) -> None:
        config = json.loads((self.path / "adapter_config.json").read_text())
        (self.path / "adapter_config.json").write_text(json.dumps(config | fields))

    def change(self, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
        tensors = load_file(self.weights)
        edit(tensors)
        save_file(tensors, self.weights, metadata={"format": "pt"})  # peft's: only what is edited is another

    def read(self, limits: AdapterLimits = LIMITS, expected_uid: AdapterUid | None = None) -> HostAdapter:
        base = self.family.loaded.adapter_base()
        return read_adapter(self.path, base, limits, uid=expected_uid, scratch=self.scratch)

    def problems(self, **options: Any) -> dict[str, str]:
        """Field -> description of everything that is refused; the adapter must be refused."""
        with pytest.raises(AdapterInvalid) as caught:
            self.read(**options)
        return {v.field: v.description for v in caught.value.violations}


@pytest.fixture(params=["the first of its kind", "one like the last"])
def folder(family_of: FamilyOf, tmp_path: Path, request: pytest.FixtureRequest) -> Folder:
    """As an adapter that nobody has read one like, and as one whose kind the reader knows until it is spoiled."""
    folder = Folder(family_of("llama"), tmp_path / "adapter")
    if request.param == "one like the last":
        folder.read()
    return folder


def test_a_good_adapter_is_read_whole(folder: Folder) -> None:
    adapter = folder.read()
    tensors = load_file(folder.weights)
    assert adapter.size_bytes == sum(t.numel() for t in tensors.values()) * 4
    config = json.loads((folder.path / "adapter_config.json").read_text())
    assert adapter.uid == adapter_digest(config, folder.weights)
    assert folder.read(expected_uid=adapter.uid).uid == adapter.uid


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_accepted(folder: Folder, dtype: torch.dtype) -> None:
    folder.change(lambda t: t.update({k: v.to(dtype) for k, v in t.items()}))
    on_device = folder.read().on(torch.device("cpu"))
    expected = load_file(folder.weights)[FIRST_KEY].float()
    first_site = on_device.sites[folder.family.loaded.sites[0].index]
    assert torch.equal(first_site.a_t.t()[: expected.shape[0]], expected)


def tensors_as_read(folder: Folder) -> dict[str, torch.Tensor]:
    """Every B of the adapter as it lies in the buffer, by its key."""
    adapter, sites = folder.read(), folder.family.loaded.sites
    return {
        f"base_model.model.{sites[placed.site].slots[slot].path}.lora_B.weight": b.of(adapter.buffer).t()
        for placed in adapter.layout
        for slot, _, _, b in placed.slots
    }


def test_other_weights_of_a_known_kind(folder: Folder) -> None:
    folder.change(lambda t: t.update({k: torch.randn_like(v) for k, v in t.items()}))
    config = json.loads((folder.path / "adapter_config.json").read_text())
    expected, scale = load_file(folder.weights), config["lora_alpha"] / config["r"]
    for key, b in tensors_as_read(folder).items():
        assert torch.equal(b, expected[key] * scale)


def test_a_known_kind_is_not_checked_again(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.read()
    monkeypatch.delattr(source, "_check")
    folder.change(lambda t: t.update({k: torch.randn_like(v) for k, v in t.items()}))
    digest = digest_of(folder.read().uid)
    with pytest.raises(NameError):  # not for the copy of a tenant that has had none
        folder.read(expected_uid=adapter_uid(digest, TenantId("acme")))


def test_another_configuration_is_another_kind(folder: Folder) -> None:
    before = tensors_as_read(folder)
    config = json.loads((folder.path / "adapter_config.json").read_text())
    folder.set(lora_alpha=config["lora_alpha"] * 2)
    for key, b in tensors_as_read(folder).items():
        assert torch.equal(b, before[key] * 2)


def test_tensors_at_odd_places(folder: Folder) -> None:
    """The format asks for no alignment of what stands behind the header."""
    before = tensors_as_read(folder)
    content = folder.weights.read_bytes()
    length = int.from_bytes(content[:8], "little")
    folder.weights.write_bytes(
        (length + 1).to_bytes(8, "little") + content[8 : 8 + length] + b" " + content[8 + length :]
    )
    for _ in range(2):
        assert all(torch.equal(b, before[key]) for key, b in tensors_as_read(folder).items())


def test_a_file_that_changes_as_it_is_read(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is as large as before, and other tensors stand at its places."""
    content = folder.weights.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    first, second = (FIRST_KEY.replace("layers.0", f"layers.{i}") for i in (0, 1))
    header[first], header[second] = header[second], header[first]
    swapped = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    take = Scratch.take

    def change(scratch: Scratch, size_bytes: int) -> torch.Tensor:
        folder.weights.write_bytes(content[:8] + swapped + content[8 + length :])
        return take(scratch, size_bytes)

    monkeypatch.setattr(Scratch, "take", change)
    assert folder.problems() == {"adapter_model.safetensors": "changed while it was read"}


@pytest.mark.parametrize("shift", [1 << 20, -(1 << 20)])
def test_tensors_that_lie_elsewhere_than_in_the_file(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shift: int
) -> None:
    """The library finds a sound file, and another stands there when its header is read: nothing beyond it is read."""
    shutil.copy(folder.weights, tmp_path / "sound")
    monkeypatch.setattr(source, "safe_open", lambda path, framework: safe_open(tmp_path / "sound", framework))
    content = folder.weights.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header[FIRST_KEY]["data_offsets"] = [place + shift for place in header[FIRST_KEY]["data_offsets"]]
    moved = json.dumps(header, separators=(",", ":")).encode()
    folder.weights.write_bytes(len(moved).to_bytes(8, "little") + moved + content[8 + length :])
    assert folder.problems() == {"adapter_model.safetensors": "changed while it was read"}


CONFIG_REFUSALS: list[tuple[str, Any]] = [
    ("peft_type", "ADALORA"),
    ("task_type", "SEQ_CLS"),
    ("base_model_name_or_path", "someone/else"),
    ("base_model_name_or_path", 7),
    ("bias", "some"),
    ("bias", 3),
    ("use_dora", True),
    ("use_dora", "yes"),
    ("modules_to_save", ["lm_head"]),
    ("trainable_token_indices", [1, 2]),
    ("target_parameters", ["model.layers.0.mlp.weight"]),
    ("layer_replication", [[0, 2]]),
    ("alora_invocation_tokens", [5]),
    ("use_qalora", True),
    ("lora_bias", True),
    ("init_lora_weights", "pissa"),
    ("kasa_config", {"beta": 1.0}),
    ("something_new", True),
    ("r", 0),
    ("r", -4),
    ("r", "8"),
    ("r", True),
    ("r", 65),
    ("rank_pattern", {"q_proj": 65}),
    ("rank_pattern", [1]),
    ("rank_pattern", {"(": 3}),
    ("lora_alpha", "16"),
    ("lora_alpha", 1e300),
    ("alpha_pattern", {"q_proj": None}),
    ("use_rslora", "yes"),
    ("target_modules", None),
    ("target_modules", 5),
    ("target_modules", "("),
    ("target_modules", ["nothing_like_it"]),
    ("target_modules", ["q_proj"]),
    ("target_modules", ["q_proj", "lm_head"]),
    ("target_modules", ["q_proj", "embed_tokens"]),
    ("target_modules", ["q_proj", "mlp"]),
    ("target_modules", ".*"),
    ("exclude_modules", {"a": 1}),
    ("layers_to_transform", ["0"]),
    ("layers_pattern", "layers"),
]


@pytest.mark.parametrize(("name", "value"), CONFIG_REFUSALS, ids=[f"{n}={v}"[:40] for n, v in CONFIG_REFUSALS])
def test_config_refusals_name_the_field(folder: Folder, name: str, value: Any) -> None:
    if name != "target_modules":
        folder.set(target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
        folder.read()
    folder.set(**{name: value})
    problems = folder.problems()
    named = [field for field in problems if field == name or field.startswith(f"{name}[")]
    # what is targeted may also show as tensors that are not
    assert named or (name == "target_modules" and value == ["q_proj"] and len(problems) == 18), problems


def test_harmless_fields_are_accepted(folder: Folder) -> None:
    folder.set(
        lora_dropout=0.1, fan_in_fan_out=True, inference_mode=True, revision=None, something_new=None, another=False,
        init_lora_weights="gaussian", base_model_name_or_path=None, task_type=None, peft_version="9.9.9",
    )  # fmt: skip
    folder.read()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"r": NaN}', "[" * 100_000, "\xff"])
def test_unreadable_config(folder: Folder, text: str) -> None:
    (folder.path / "adapter_config.json").write_bytes(text.encode("latin-1"))
    assert set(folder.problems()) == {"adapter_config.json"}


def test_alpha_that_is_too_large(folder: Folder) -> None:
    config = (folder.path / "adapter_config.json").read_text()
    (folder.path / "adapter_config.json").write_text(config.replace('"lora_alpha": 16', '"lora_alpha": 1e31'))
    assert "lora_alpha" in folder.problems()


def test_missing_files(folder: Folder) -> None:
    folder.weights.unlink()
    (folder.path / "adapter_config.json").unlink()
    assert folder.problems() == {"adapter_config.json": "missing", "adapter_model.safetensors": "missing"}


def test_pickle_instead_of_safetensors(folder: Folder) -> None:
    torch.save(load_file(folder.weights), folder.path / "adapter_model.bin")
    folder.weights.unlink()
    assert "pickle" in folder.problems()["adapter_model.safetensors"]


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_symlinked_file(folder: Folder, name: str, tmp_path: Path) -> None:
    (folder.path / name).rename(tmp_path / "elsewhere")
    (folder.path / name).symlink_to(tmp_path / "elsewhere")
    assert folder.problems() == {name: "is a symlink"}


def test_a_symlinked_folder_a_file_and_nothing(folder: Folder, tmp_path: Path) -> None:
    real = folder.path
    (tmp_path / "link").symlink_to(real)
    for path, description in (("link", "is a symlink"), ("absent", "is not a folder")):
        folder.path = tmp_path / path
        assert folder.problems() == {"path": description}


def test_a_pipe_is_not_opened(folder: Folder) -> None:
    folder.weights.unlink()
    os.mkfifo(folder.weights)
    assert folder.problems() == {"adapter_model.safetensors": "is not a plain file"}


@pytest.mark.parametrize(
    "data", [b"", b"\x10", b"\xff" * 64, (8).to_bytes(8, "little") + b"{}xxxxxx", b"\x80\x02}q\x00."]
)
def test_garbage_weights(folder: Folder, data: bytes) -> None:
    folder.weights.write_bytes(data)
    assert set(folder.problems()) == {"adapter_model.safetensors"}


def test_truncated_weights(folder: Folder) -> None:
    folder.weights.write_bytes(folder.weights.read_bytes()[:-4])
    assert set(folder.problems()) == {"adapter_model.safetensors"}


def test_oversized_header_and_file(folder: Folder) -> None:
    assert "limit" in folder.problems(limits=AdapterLimits(64, max_file_bytes=100))["adapter_model.safetensors"]
    folder.weights.write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    assert "header" in folder.problems()["adapter_model.safetensors"]


def empty_tensors(number: int, name: str = "t{}", shape: str = "[0]") -> bytes:
    entries = (f'"{name.format(i)}":{{"dtype":"F32","shape":{shape},"data_offsets":[0,0]}}' for i in range(number))
    header = ("{" + ",".join(entries) + "}").encode()
    return len(header).to_bytes(8, "little") + header


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (empty_tensors(270_000), "its header has 1"),
        (empty_tensors(30_000), "names 29999 tensors; the limit is 4096"),
        (empty_tensors(4096), "is not a LoRA A or B matrix"),
        (empty_tensors(4000, name="n" * 330 + "{}"), "is not a LoRA A or B matrix"),
        (empty_tensors(1, shape="[" + "0," * 900_000 + "0]"), "more values than those of 4096 tensors"),
        (empty_tensors(1, shape="[" + "0," * 28_000 + "0]"), "is not a LoRA A or B matrix"),
        (empty_tensors(1, name="n" * 1_900_000), "is not a LoRA A or B matrix"),
        (empty_tensors(1, shape="[" * 600_000 + "]" * 600_000), "is not a readable safetensors file"),
    ],
    ids=["15 MB", "many", "as many as may be", "long names", "longer shape", "long shape", "long name", "deep"],
)
def test_headers_that_would_cost_much(folder: Folder, content: bytes, says: str) -> None:
    folder.weights.write_bytes(content)
    with frozen_heap():
        before_s = time.thread_time()
        problems = folder.problems()
        assert time.thread_time() - before_s < 0.2
    assert any(says in description for description in problems.values()), problems
    assert sum(len(field) + len(description) for field, description in problems.items()) < 32 * 1000


def test_wrong_shape(folder: Folder) -> None:
    folder.change(lambda t: t.update({FIRST_KEY: t[FIRST_KEY][:, 1:].contiguous()}))
    assert folder.problems() == {FIRST_KEY: "has shape [8, 63], but [8, 64] fits its rank and the base model"}


def test_rank_differs_from_config(folder: Folder) -> None:
    folder.set(rank_pattern={"layers.0.self_attn.q_proj": 3})
    assert set(folder.problems()) == {FIRST_KEY, FIRST_KEY.replace("lora_A", "lora_B")}


def test_missing_partner(folder: Folder) -> None:
    folder.change(lambda t: t.pop(FIRST_KEY))
    assert folder.problems() == {FIRST_KEY: "missing: its partner is there"}


def test_a_copy_of_the_base_models_own_layer_is_told_with_what_to_do(folder: Folder) -> None:
    """What save_pretrained writes by itself beside LoRA on lm_head."""
    key = "base_model.model.lm_head.base_layer.weight"
    folder.change(lambda t: t.update({key: torch.zeros(4, 4)}))
    assert "save_embedding_layers=False" in folder.problems()[key]


def test_module_without_weights(folder: Folder) -> None:
    folder.change(lambda t: [t.pop(k) for k in list(t) if "layers.0.self_attn.q_proj" in k])
    assert "layers.0.self_attn.q_proj" in folder.problems()["target_modules"]


@pytest.mark.parametrize(
    "key",
    [
        "base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.embed_tokens.lora_A.weight",
        "base_model.model.model.embed_tokens.lora_embedding_A",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector",
        "base_model.model.model.norm.weight",
        "model.layers.0.self_attn.q_proj.lora_A.weight",
        "x",
    ],
)
def test_a_tensor_that_cannot_be_used(folder: Folder, key: str) -> None:
    folder.change(lambda t: t.update({key: torch.ones(8, 64)}))
    assert key in folder.problems()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite(folder: Folder, value: float) -> None:
    folder.change(lambda t: t[FIRST_KEY].view(-1)[5:6].fill_(value))
    assert set(folder.problems()) == {FIRST_KEY}


def test_integer_weights(folder: Folder) -> None:
    folder.change(lambda t: t.update({FIRST_KEY: t[FIRST_KEY].int()}))
    assert "I32" in folder.problems()[FIRST_KEY]


def test_content_that_was_not_registered(folder: Folder) -> None:
    assert "digest" in folder.problems(expected_uid=AdapterUid("0" * 64))["adapter_model.safetensors"]


def test_all_problems_at_once_and_bounded(folder: Folder) -> None:
    folder.set(r=0, bias="some", base_model_name_or_path="other")
    folder.change(lambda t: t.update({f"stray-{i}": torch.ones(1) for i in range(100)}))
    with pytest.raises(AdapterInvalid) as caught:
        folder.read()
    violations = caught.value.violations
    assert {"r", "bias", "base_model_name_or_path"} <= {v.field for v in violations}
    assert len(violations) == source.MAX_REPORTED
    assert "more problems" in violations[-1].description


def test_a_pattern_that_explodes_is_cut_off(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manylora_worker.weights.peft.patterns.PATTERN_BUDGET_S", 0.05)
    folder.set(target_modules=r"(\w|\w\w|\.|\w\.)+[789]")
    assert "too long" in folder.problems()["target_modules"]
