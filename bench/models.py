"""A model of Qwen2.5-Math-1.5B's shape with random weights, and prompts and a reward for it.

`python -m bench.models DIR` builds it. Speed, memory and the agreement of trainer and engines are those of the real
model, and no Hub is needed. Its tokens are nearly uniform, so a completion never ends by itself: each has its full
length.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.tiny import CHAT_TEMPLATE, END, PAD, RESPONSE_TEMPLATE, START, byte_level_bpe

if TYPE_CHECKING:
    import datasets
    import torch

SEED = 7
SHAPE: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "attention_dropout": 0.0,
    "eos_token_id": 151643,
    "bos_token_id": 151643,
    "dtype": "bfloat16",
}
"""config.json of Qwen/Qwen2.5-Math-1.5B."""
SMALL = {**SHAPE, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
"""The same with little arithmetic, to try scripts out on a CPU: `python -m bench.models DIR small`."""
WORDS = SHAPE["eos_token_id"]
"""Ids below are ordinary tokens; the three special ones follow, then a few that no text has, as in Qwen's tokenizer."""
SPECIAL = {PAD: WORDS, START: WORDS + 1, END: WORDS + 2}
PROMPT_CHARACTERS = 118
"""A byte is a token here; the chat template makes about 140 tokens of it."""
PROMPTS = 2048


def build(directory: Path, shape: dict[str, Any]) -> None:
    """Writes the model in transformers' format. The same machine writes the same bytes each time."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    files = {
        "config.json": shape,
        "generation_config.json": {"eos_token_id": WORDS, "pad_token_id": WORDS},
        "tokenizer.json": tokenizer(),
        "tokenizer_config.json": {
            "tokenizer_class": "Qwen2Tokenizer",
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "eos_token": PAD,
            "pad_token": PAD,
            "model_max_length": shape["max_position_embeddings"],
            "padding_side": "left",
            "chat_template": CHAT_TEMPLATE,
            "response_template": RESPONSE_TEMPLATE,
        },
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    save_file(dict(weights(shape)), directory / "model.safetensors", metadata={"format": "pt"})


def weights(shape: dict[str, Any]) -> Iterator[tuple[str, "torch.Tensor"]]:
    """Every tensor by name, bfloat16, drawn as transformers initialises it."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    draw = torch.Generator(device).manual_seed(SEED)
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    keys = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]

    def normal(*size: int) -> torch.Tensor:
        drawn = torch.randn(size, generator=draw, device=device) * shape["initializer_range"]
        return drawn.to("cpu", torch.bfloat16)

    yield "model.embed_tokens.weight", normal(shape["vocab_size"], hidden)
    for layer in range(shape["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, size in {"q_proj": hidden, "k_proj": keys, "v_proj": keys}.items():
            yield f"{prefix}self_attn.{name}.weight", normal(size, hidden)
            yield f"{prefix}self_attn.{name}.bias", torch.zeros(size, dtype=torch.bfloat16)
        yield f"{prefix}self_attn.o_proj.weight", normal(hidden, hidden)
        yield f"{prefix}mlp.gate_proj.weight", normal(inner, hidden)
        yield f"{prefix}mlp.up_proj.weight", normal(inner, hidden)
        yield f"{prefix}mlp.down_proj.weight", normal(hidden, inner)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{name}.weight", torch.ones(hidden, dtype=torch.bfloat16)
    yield "model.norm.weight", torch.ones(hidden, dtype=torch.bfloat16)


def tokenizer() -> dict[str, Any]:
    """A byte-level BPE with as many tokens as Qwen's: all bytes, then short words. Without merges a text is its bytes,
    but what is generated is words, and costs as much to turn into text as Qwen's."""
    vocabulary = {character: index for index, character in enumerate(_bytes())}
    for word in _words():
        if len(vocabulary) == WORDS:
            break
        vocabulary[word] = len(vocabulary)
    return byte_level_bpe(vocabulary, SPECIAL)


def _bytes() -> list[str]:
    """The 256 bytes as byte-level BPE spells them: printable Latin-1 as itself, the others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _words() -> Iterator[str]:
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    for space in ("\u0120", ""):
        for a in letters:
            for b in letters:
                yield f"{space}{a}{b}"
                for c in letters:
                    yield f"{space}{a}{b}{c}"
    for a in letters:
        for b in letters:
            for c in letters:
                for d in letters:
                    yield f"\u0120{a}{b}{c}{d}"


def prompts(split: str = "train") -> "datasets.Dataset":
    """Prompts of about 140 tokens that differ from their first word on. Column `prompt`: a list of messages."""
    import datasets

    rows = []
    for number in range(PROMPTS):
        text = f"{number:04d} is a number; " + "say what it makes you think of. " * 4
        rows.append({"prompt": [{"role": "user", "content": text[:PROMPT_CHARACTERS]}]})
    return datasets.Dataset.from_list(rows)


def vowels(completions: list[Any], **_: Any) -> list[float]:
    """A reward that differs between samples: the share of the letter e in the text, times ten."""
    texts = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
    return [10 * text.count("e") / max(1, len(text)) for text in texts]


if __name__ == "__main__":
    build(Path(sys.argv[1]), SMALL if "small" in sys.argv[2:] else SHAPE)
