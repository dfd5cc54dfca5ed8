import json
import re
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard

from jobs import model_card, recipe
from jobs.spec import ModelRef, RunSpec

QWEN = "Qwen/Qwen2.5-Math-1.5B"
PEFTS = {
    "peft_type": "LORA",
    "r": 1,
    "lora_alpha": 2,
    "lora_dropout": 0.0,
    "target_modules": ["model.layers.0.self_attn.v_proj", "model.layers.1.self_attn.v_proj", "q_proj"],
    "base_model_name_or_path": "/home/somebody/.cache/of/this/machine",
}
SUMMARY = {"steps": 500, "reward_first": 0.14512, "reward_last": 0.438}


def written(folder: Path, spec: RunSpec, **more: Any) -> ModelCard:
    """The card as the Hub's own client reads it back."""
    (folder / "adapter_config.json").write_text(json.dumps(PEFTS | more))
    (folder / "README.md").write_text("---\nlicense: PEFT's own\n---\n")
    model_card.write(folder, spec, SUMMARY)
    return ModelCard.load(folder / "README.md", ignore_metadata_errors=False)


def row(card: ModelCard, name: str) -> str:
    (found,) = re.findall(rf"^\| {re.escape(name)} \| (.*) \|$", card.text, re.MULTILINE)
    return found


def test_what_the_hub_reads(tmp_path: Path) -> None:
    chosen = recipe.load("sanity", overrides=["dataset.load=sail/Sanity-Test-R1D-1.5B"])
    card = written(tmp_path, RunSpec("first", chosen, ModelRef("hub", QWEN, QWEN)))
    assert card.data.to_dict() == {
        "base_model": QWEN,
        "datasets": ["sail/Sanity-Test-R1D-1.5B"],
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["asyncgrpo", "grpo", "lora", "trl", f"base_model:adapter:{QWEN}"],
    }
    header = (tmp_path / "README.md").read_text().split("---\n")[1]
    assert yaml.safe_load(header) == card.data.to_dict()
    assert json.loads((tmp_path / "adapter_config.json").read_text()) == PEFTS | {"base_model_name_or_path": QWEN}


def test_what_a_reader_is_told(tmp_path: Path) -> None:
    servers = "reward={functions=['jobs.rewards:math', 'https://judge.example/score?key=k'], weights=[1, 0.5]}"
    chosen = recipe.load("sanity", overrides=[servers])
    card = written(tmp_path, RunSpec("first", chosen, ModelRef("hub", QWEN, QWEN)), use_rslora=True)
    assert row(card, "base model") == f"[{QWEN}](https://huggingface.co/{QWEN})"
    assert row(card, "data set") == "`jobs.sanity:problems`, split `train`" and card.data.datasets is None
    assert row(card, "reward") == "1 x `jobs.rewards:math` + 0.5 x `https://judge.example/score`"
    assert (row(card, "optimizer steps"), row(card, "reward, last tenth")) == ("500", "0.438")
    assert row(card, "LoRA") == "r 1, alpha 2, dropout 0, rank-stabilized"
    assert row(card, "adapted modules") == "q_proj, v_proj"
    assert re.search(r"trl 1\.\S+, peft \S+, transformers \S+, torch \S+, vllm \S+, python 3", row(card, "versions"))
    assert row(card, "`learning_rate`") == "4e-05"
    assert f"vllm serve {QWEN} --enable-lora --max-lora-rank 1 --lora-modules first=" in card.text
    assert f"base = '{QWEN}'" in card.text and "No license is set" in card.text


def test_a_model_that_the_hub_does_not_have_is_no_metadata(tmp_path: Path) -> None:
    card = written(tmp_path, RunSpec("first", recipe.load("digit"), ModelRef("bucket", "models/1", "digit")))
    assert card.data.base_model is None and row(card, "base model") == "`tiny:digit`"
    assert json.loads((tmp_path / "adapter_config.json").read_text()) == PEFTS


def test_a_script_is_named_with_the_settings_that_held(tmp_path: Path) -> None:
    chosen = recipe.load(str(Path(__file__).with_name("scripts") / "sevens.toml"))
    card = written(tmp_path, RunSpec("first", chosen, ModelRef("bucket", "models/1", "digit")))
    assert row(card, "script") == "`sevens.py`" and "data set" not in card.text
    assert (row(card, "`learning_rate`"), row(card, "`save_strategy`")) == ("0.003", "steps")
    assert "output_dir" not in card.text
