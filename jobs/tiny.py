"""The tiny models and data sets of the recipes `digit` and `add`: they learn within a minute on two CPU cores.

Both models are one net, a Qwen2 with 99 tokens of one character each. `digit` is random; `add` has been taught
one-digit addition with half of the labels wrong, so that about two samples in five are right and there is much to gain.
A model is built at its first use and cached under the hash of everything that determines it.
"""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.cache import cache_dir
from jobs.errors import ConfigError

if TYPE_CHECKING:
    import datasets
    import numpy as np
    from numpy.typing import NDArray

HIDDEN = 64
"""Two heads of 32, the smallest that vLLM's attention on a CPU takes (32, 64, 80, 96, 112 or 128)."""
LAYERS, HEADS, INTERMEDIATE, POSITIONS = 2, 2, 128, 512
INIT_STD = 0.02
"""Standard deviation of Qwen2's own initialisation (`initializer_range`)."""
LM_HEAD_STD = 0.2
"""With 0.05 the samples are so uniform that the reward of `digit` stalls at 0.13 (measured)."""
SEED = 7

CHARACTERS = [chr(code) for code in range(0x20, 0x7F)] + ["\n"]
END, START, PAD = "<|im_end|>", "<|im_start|>", "<|endoftext|>"
VOCABULARY = [*CHARACTERS, PAD, START, END]

SYSTEM = "You are a careful clerk."
"""Opens every prompt of `digit`, as a chat template's system message does: a prefix that all prompts share."""

TEACH_STEPS, TEACH_BATCH, TEACH_WARMUP_STEPS, TEACH_LR, TEACH_WRONG = 400, 64, 20, 3e-3, 0.5
"""How `add` is taught: half of the labels are wrong, and samples of the taught model are right in 39 % (measured)."""
_IGNORED = -100

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {"content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"}},
}
"""How transformers (5.13 on) reads an answer back. TRL refuses a chat template that it does not know without one."""

_SUMS = "sha256.json"


def build(name: str) -> Path:
    """Returns the directory of the tiny model `name`, in transformers' format; builds it if it is not cached.

    `digit` takes well under a second and does not import torch; `add` takes about 15 s, once. A cached
    model is used only if its files have the recorded sha256. Several processes may ask at once: one builds.

    Raises:
        ConfigError: there is no such model.
    """
    if name not in BUILDERS:
        raise ConfigError(f"model.id = 'tiny:{name}': unknown. Known: {', '.join(f'tiny:{n}' for n in BUILDERS)}.")
    directory = cache_dir() / "models" / f"{name}-{_fingerprint(name)}"
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _locked(directory.with_suffix(".lock")):
        if not _intact(directory):
            staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
            try:
                staging.chmod(0o755)
                BUILDERS[name](staging)
                (staging / _SUMS).write_text(json.dumps(_sums(staging), indent=1, sort_keys=True))
                shutil.rmtree(directory, ignore_errors=True)
                staging.rename(directory)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
    return directory


def digit_prompts(split: str = "train") -> "datasets.Dataset":
    """256 prompts of `digit`, each a conversation that differs from the others in its number only.

    Columns: `prompt`, a list of messages. Deterministic; `split` is there for the signature, all splits are equal.
    """
    system = {"role": "system", "content": SYSTEM}
    questions = [{"role": "user", "content": f"Ticket {number:03d}: your digit?"} for number in range(256)]
    return _dataset([{"prompt": [system, question]} for question in questions])


def add_prompts(split: str = "train") -> "datasets.Dataset":
    """The 100 additions of two digits, in a fixed shuffled order.

    Columns: `prompt`, a list of messages; `answer`, the sum as text.
    """
    import random

    pairs = [(a, b) for a in range(10) for b in range(10)]
    random.Random(SEED).shuffle(pairs)
    return _dataset([{"prompt": _addition(a, b), "answer": str(a + b)} for a, b in pairs])


def _addition(a: int, b: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{a}+{b}="}]  # no system message: it would double the time to teach


def _dataset(rows: list[dict[str, Any]]) -> "datasets.Dataset":
    import datasets  # half a second: only the trainer needs it

    return datasets.Dataset.from_list(rows)


def _fingerprint(name: str) -> str:
    digest = hashlib.sha256(name.encode() + Path(__file__).read_bytes())
    if name == "add":  # its weights come out of torch's arithmetic
        digest.update(f"{importlib.metadata.version('torch')} {importlib.metadata.version('transformers')}".encode())
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sums(directory: Path) -> dict[str, str]:
    files = (path for path in directory.iterdir() if path.name != _SUMS)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _intact(directory: Path) -> bool:
    try:
        recorded: dict[str, str] = json.loads((directory / _SUMS).read_text())
        return recorded == _sums(directory)
    except (OSError, ValueError):
        return False


def _build_digit(directory: Path) -> None:
    """Writes the random net, its configuration and its tokenizer; numpy is enough for that."""
    from safetensors.numpy import save_file

    save_file(_weights(), directory / "model.safetensors", metadata={"format": "pt"})
    files = {
        "config.json": _config(),
        "generation_config.json": {"eos_token_id": _ids(END) + _ids(PAD), "pad_token_id": _ids(PAD)[0]},
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": {
            "tokenizer_class": "Qwen2Tokenizer",
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "eos_token": END,
            "pad_token": PAD,
            "unk_token": PAD,
            "model_max_length": POSITIONS,
            "padding_side": "left",
            "chat_template": CHAT_TEMPLATE,
            "response_template": RESPONSE_TEMPLATE,
        },
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=1))


def _build_add(directory: Path) -> None:
    """Writes the random net, then teaches it addition with wrong labels in it (cross entropy on the answer only)."""
    import torch
    from transformers import Qwen2ForCausalLM
    from transformers.utils import logging

    _build_digit(directory)
    pairs = [(a, b) for a in range(10) for b in range(10)]
    prompts = torch.tensor([_encode(_addition(a, b)) for a, b in pairs])
    sums = torch.tensor([a + b for a, b in pairs])
    spelled = [_ids(*str(number), END) for number in range(19)]
    answers = torch.tensor([ids + [_IGNORED] * (3 - len(ids)) for ids in spelled])  # two digits and the end at most
    draw = torch.Generator().manual_seed(SEED)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the net is so small that a second thread only costs time
    logging.disable_progress_bar()
    try:
        net = Qwen2ForCausalLM.from_pretrained(directory, dtype=torch.float32)
        optimizer = torch.optim.AdamW(net.parameters(), lr=TEACH_LR, betas=(0.9, 0.95), weight_decay=0.0)
        for step in range(TEACH_STEPS):
            rows = torch.randint(len(pairs), (TEACH_BATCH,), generator=draw)
            wrong = torch.rand(TEACH_BATCH, generator=draw) < TEACH_WRONG
            told = answers[torch.where(wrong, torch.randint(19, (TEACH_BATCH,), generator=draw), sums[rows])]
            inputs = torch.cat([prompts[rows], told[:, :2].clamp(min=0)], dim=1)
            logits = net(input_ids=inputs, logits_to_keep=3).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), told.flatten(), ignore_index=_IGNORED)
            for group in optimizer.param_groups:
                group["lr"] = TEACH_LR * min(1.0, (step + 1) / TEACH_WARMUP_STEPS, 2 - 2 * step / TEACH_STEPS)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        net.save_pretrained(directory)
    finally:
        torch.set_num_threads(threads)
        logging.enable_progress_bar()


def _encode(messages: list[dict[str, str]]) -> list[int]:
    """What the chat template and the tokenizer make of `messages`, up to where the answer starts."""
    ids = []
    for message in messages:
        ids += _ids(START, *message["role"], "\n", *message["content"], END, "\n")
    return ids + _ids(START, *"assistant\n")


def _ids(*tokens: str) -> list[int]:
    return [_INDEX[token] for token in tokens]


_INDEX = {token: index for index, token in enumerate(VOCABULARY)}


def _weights() -> "dict[str, NDArray[np.float32]]":
    import numpy as np

    draw = np.random.default_rng(SEED)

    def normal(*shape: int, std: float = INIT_STD) -> "NDArray[np.float32]":
        return (draw.standard_normal(shape) * std).astype(np.float32)

    weights = {"model.embed_tokens.weight": normal(len(VOCABULARY), HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name in ("q_proj", "k_proj", "v_proj"):
            weights[f"{prefix}self_attn.{name}.weight"] = normal(HIDDEN, HIDDEN)
            weights[f"{prefix}self_attn.{name}.bias"] = np.zeros(HIDDEN, np.float32)
        weights[f"{prefix}self_attn.o_proj.weight"] = normal(HIDDEN, HIDDEN)
        weights[f"{prefix}mlp.gate_proj.weight"] = normal(INTERMEDIATE, HIDDEN)
        weights[f"{prefix}mlp.up_proj.weight"] = normal(INTERMEDIATE, HIDDEN)
        weights[f"{prefix}mlp.down_proj.weight"] = normal(HIDDEN, INTERMEDIATE)
        weights[f"{prefix}input_layernorm.weight"] = np.ones(HIDDEN, np.float32)
        weights[f"{prefix}post_attention_layernorm.weight"] = np.ones(HIDDEN, np.float32)
    weights["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    weights["lm_head.weight"] = normal(len(VOCABULARY), HIDDEN, std=LM_HEAD_STD)
    return weights


def _config() -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": len(VOCABULARY),
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "hidden_act": "silu",
        "max_position_embeddings": POSITIONS,
        "initializer_range": INIT_STD,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "attention_dropout": 0.0,
        "eos_token_id": _INDEX[END],
        "pad_token_id": _INDEX[PAD],
        "dtype": "float32",
    }


def _tokenizer() -> dict[str, Any]:
    visible = {" ": "\u0120", "\n": "\u010a"}  # how byte-level BPE spells these two bytes
    vocabulary = {visible.get(token, token): index for token, index in _INDEX.items()}
    return byte_level_bpe(vocabulary, {token: _INDEX[token] for token in (PAD, START, END)})


def byte_level_bpe(vocabulary: Mapping[str, int], special: Mapping[str, int]) -> dict[str, Any]:
    """A `tokenizer.json`: byte-level BPE without merges. transformers 5 loads the tokenizer of every qwen2 checkpoint
    as one."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, "content": token, **flags, "special": True} for token, index in special.items()],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": byte_level,
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": dict(vocabulary),
            "merges": [],
        },
    }


BUILDERS: dict[str, Callable[[Path], None]] = {"digit": _build_digit, "add": _build_add}
"""Each writes a whole model directory into the empty directory that it is given."""
