import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from peft import LoraConfig
from safetensors.numpy import save_file

from jobs.errors import ConfigError
from jobs.manifest import Manifest, build, check_config
from jobs.names import WireName
from tests.adapters import write_adapter

NAME = WireName("run", 2, 7)
MODULE = "base_model.model.model.layers.{}.mlp.up_proj"


def test_a_manifest_says_what_the_files_are(tmp_path: Path) -> None:
    manifest = build(write_adapter(tmp_path), NAME, "tiny", max_rank=8, step=70)
    assert (manifest.wire_name, manifest.rank, manifest.alpha, manifest.step) == ("run.2.v7", 8, 16.0, 70)
    assert manifest.size == sum(path.stat().st_size for path in tmp_path.iterdir())
    signed = manifest.sign("key")
    read = Manifest.from_json(signed.to_json())
    assert read == signed and read.verify_signature("key") and not read.verify_signature("other")
    read.verify_files(tmp_path)


def test_a_changed_manifest_or_file_is_noticed(tmp_path: Path) -> None:
    signed = build(write_adapter(tmp_path), NAME, "tiny").sign("key")
    for change in ({"version": 8}, {"run": "other"}, {"base_model": "x"}, {"rank": 16}, {"files": {}}):
        assert not dataclasses.replace(signed, **change).verify_signature("key")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"adapter_config\.json is not what its manifest says"):
        signed.verify_files(tmp_path)


def test_alpha_is_the_rank_where_the_configuration_names_none(tmp_path: Path) -> None:
    assert build(write_adapter(tmp_path, lora_alpha=None), NAME, "tiny").alpha == 8


def test_the_digest_is_of_the_content_alone(tmp_path: Path) -> None:
    one = build(write_adapter(tmp_path / "a"), NAME, "tiny")
    same = build(write_adapter(tmp_path / "b"), WireName("run", 2, 8), "tiny")
    other = build(write_adapter(tmp_path / "c", scale=0.02), NAME, "tiny")
    assert one.digest == same.digest != other.digest


def test_strength_bounds_how_far_the_adapter_moves_a_weight(tmp_path: Path) -> None:
    zero = build(write_adapter(tmp_path / "zero", scale=0.0), NAME, "tiny")
    assert zero.zero and zero.strength == 0
    trained = build(write_adapter(tmp_path / "one", scale=0.01), NAME, "tiny")
    from safetensors.numpy import load_file

    tensors = load_file(tmp_path / "one" / "adapter_model.safetensors")
    name = MODULE.format(1)
    moved = 2.0 * np.linalg.norm(tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"], 2)
    assert not trained.zero and trained.strength >= moved
    rs = build(write_adapter(tmp_path / "rs", scale=0.01, use_rslora=True), NAME, "tiny")
    assert rs.strength == pytest.approx(trained.strength * math.sqrt(8))


@pytest.mark.parametrize("bits", ["f2", "f4", "f8", "bf16"])
def test_strength_in_every_dtype_with_and_without_numpy(
    tmp_path: Path, bits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from safetensors.torch import save_file as save_torch

    dtype = {"f2": torch.float16, "f4": torch.float32, "f8": torch.float64, "bf16": torch.bfloat16}[bits]
    write_adapter(tmp_path)
    name = MODULE.format(0)
    weights = {
        f"{name}.lora_A.weight": torch.full((8, 4), 0.5, dtype=dtype),
        f"{name}.lora_B.weight": torch.ones(4, 8, dtype=dtype),
    }
    save_torch(weights, tmp_path / "adapter_model.safetensors")
    expected = 2 * math.sqrt(32 * 0.25) * math.sqrt(32)
    assert build(tmp_path, NAME, "tiny").strength == pytest.approx(expected)
    monkeypatch.setitem(__import__("sys").modules, "numpy", None)
    assert build(tmp_path, NAME, "tiny").strength == pytest.approx(expected)


def test_a06_what_adapter_sync_cannot_carry_is_refused_by_field(tmp_path: Path) -> None:
    refused = {
        "modules_to_save": ["lm_head"],
        "use_dora": True,
        "bias": "all",
        "target_modules": ["q_proj", "lm_head"],
        "target_parameters": ["mlp.experts.gate_up_proj"],
        "peft_type": "ADALORA",
    }
    for field, value in refused.items():
        with pytest.raises(ConfigError, match=field):
            build(write_adapter(tmp_path / field, **{field: value}), NAME, "tiny")
    build(write_adapter(tmp_path / "rslora", use_rslora=True), NAME, "tiny")
    build(write_adapter(tmp_path / "plain"), NAME, "tiny")


def test_a06_pefts_own_default_configuration_passes() -> None:
    check_config(LoraConfig(r=8, target_modules=["q_proj"]).to_dict(), max_rank=8)


def test_a02_a_rank_over_the_servers_limit_names_both(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rank 12 is greater than max_lora_rank 8.*--max-lora-rank 16"):
        build(write_adapter(tmp_path, rank=12), NAME, "tiny", max_rank=8)
    with pytest.raises(ConfigError, match="rank 32 is greater"):
        build(write_adapter(tmp_path, rank_pattern={"v_proj": 32}), NAME, "tiny", max_rank=8)


def test_a04_broken_adapters_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No adapter found"):
        build(tmp_path, NAME, "tiny")
    write_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{not json")
    with pytest.raises(ConfigError, match="not a JSON object"):
        build(tmp_path, NAME, "tiny")
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(ConfigError, match="not a JSON object"):
        build(tmp_path, NAME, "tiny")
    write_adapter(tmp_path)
    whole = (tmp_path / "adapter_model.safetensors").read_bytes()
    for cut in (whole[:-1], whole[:200], whole[:4], b"", whole[:8] + b"x" * len(whole[8:])):
        (tmp_path / "adapter_model.safetensors").write_bytes(cut)
        with pytest.raises(ConfigError, match=r"adapter_model\.safetensors"):
            build(tmp_path, NAME, "tiny")
    one_sided = {f"{MODULE.format(0)}.lora_A.weight": np.zeros((8, 64), "f4")}
    save_file(one_sided, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match="only one of"):
        build(tmp_path, NAME, "tiny")


def test_an_adapter_with_nan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="NaN"):
        build(write_adapter(tmp_path, scale=float("nan")), NAME, "tiny")


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", json.dumps({"files": {"../x": {"size": 1, "sha256": ""}}}).encode()]
)
def test_what_is_no_manifest(data: bytes) -> None:
    with pytest.raises(ConfigError, match="not an adapter's manifest"):
        Manifest.from_json(data)
