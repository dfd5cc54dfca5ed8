"""Adapters for tests: what PEFT writes for the tiny models, without torch."""

import json
from pathlib import Path
from typing import Any

import numpy
from safetensors.numpy import save_file

from jobs.tiny import HIDDEN, INTERMEDIATE, LAYERS

SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, HIDDEN),
    "self_attn.v_proj": (HIDDEN, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}
"""(outputs, inputs) of each matrix of a layer of the tiny models."""


def write_adapter(directory: Path, seed: int = 0, rank: int = 8, scale: float = 0.3, **config: Any) -> Path:
    """Writes a LoRA adapter over all linear layers, A deviates by 0.3, B by `scale`; 0 leaves the base as it is.

    `config` overrides fields of adapter_config.json.
    """
    directory.mkdir(parents=True, exist_ok=True)
    draw = numpy.random.default_rng(seed)
    tensors = {}
    for layer in range(LAYERS):
        for name, (outputs, inputs) in SHAPES.items():
            module = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{module}.lora_A.weight"] = (draw.standard_normal((rank, inputs)) * 0.3).astype("f4")
            tensors[f"{module}.lora_B.weight"] = (draw.standard_normal((outputs, rank)) * scale).astype("f4")
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny:digit",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_dora": False,
        "use_rslora": False,
        "modules_to_save": None,
        "target_modules": sorted(name.rpartition(".")[2] for name in SHAPES),
        "inference_mode": True,
    }
    (directory / "adapter_config.json").write_text(json.dumps(settings | config))
    return directory
