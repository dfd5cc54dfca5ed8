import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jobs import tiny
from jobs.bundle import app_dir
from jobs.errors import ConfigError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ASYNCGRPO_CACHE", str(tmp_path))
    return tmp_path


def build_in_a_process(cache: Path, code: str = "") -> str:
    program = f"import sys; from jobs import tiny; print(tiny.build('digit')); {code}"
    environ = {"PYTHONPATH": str(app_dir()), "ASYNCGRPO_CACHE": str(cache)}
    return subprocess.run(
        [sys.executable, "-c", program], env=environ, check=True, capture_output=True, text=True
    ).stdout


def test_digit_is_built_without_torch(cache: Path) -> None:
    told = build_in_a_process(cache, "print('torch' in sys.modules or 'transformers' in sys.modules)")
    assert told.splitlines()[1] == "False"


def test_several_processes_build_one_model(cache: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        built = set(pool.map(lambda _: build_in_a_process(cache).strip(), range(4)))
    assert len(built) == 1
    left = [path.name for path in (cache / "models").iterdir()]
    assert sorted(left) == sorted([Path(built.pop()).name, next(name for name in left if name.endswith(".lock"))])


def test_a_cached_model_is_used_as_long_as_it_is_intact() -> None:
    directory = tiny.build("digit")
    weights = directory / "model.safetensors"
    before, written = weights.read_bytes(), weights.stat().st_mtime_ns
    assert tiny.build("digit") == directory
    assert weights.stat().st_mtime_ns == written
    weights.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    assert tiny.build("digit") == directory
    assert weights.read_bytes() == before


@pytest.mark.parametrize("missing", ["config.json", "sha256.json"])
def test_a_torn_model_is_built_again(missing: str) -> None:
    directory = tiny.build("digit")
    content = (directory / missing).read_text()
    (directory / missing).unlink()
    tiny.build("digit")
    assert (directory / missing).read_text() == content


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tiny:digits.*tiny:digit, tiny:add"):
        tiny.build("digits")


def test_transformers_reads_the_model_as_it_was_meant() -> None:
    from transformers import AutoConfig, AutoTokenizer

    directory = tiny.build("digit")
    config = AutoConfig.from_pretrained(directory)
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (64, 2, 99)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    for row in [*list(tiny.digit_prompts())[:3], *list(tiny.add_prompts())[:3]]:
        ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        assert ids == tiny._encode(row["prompt"])
        answer = tokenizer.encode("77 7") + [tokenizer.eos_token_id]
        assert tokenizer.parse_response(answer, prefix=ids) == {"role": "assistant", "content": "77 7"}


def test_the_net_has_the_norms_that_learning_needs() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(tiny.build("digit")).requires_grad_(False)
    assert float(net.lm_head.weight.std()) == pytest.approx(0.2, rel=0.05)
    assert float(net.model.embed_tokens.weight.std()) == pytest.approx(0.02, rel=0.05)
    prompt = torch.tensor([tiny._encode(tiny.digit_prompts()[0]["prompt"])])
    chance = net(prompt).logits[0, -1].softmax(-1)
    assert float(chance.max()) < 0.5  # it says nearly anything at first
    assert json.loads((tiny.build("digit") / "generation_config.json").read_text())["eos_token_id"] == [98, 96]


def test_add_is_the_same_net_taught(monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.numpy import load_file

    monkeypatch.setattr(tiny, "TEACH_STEPS", 3)
    taught, untaught = (load_file(tiny.build(name) / "model.safetensors") for name in ("add", "digit"))
    assert {name: value.shape for name, value in taught.items()} == {n: v.shape for n, v in untaught.items()}
    assert (taught["lm_head.weight"] != untaught["lm_head.weight"]).any()


def test_prompts_are_what_the_recipes_need() -> None:
    digits, sums = tiny.digit_prompts(), tiny.add_prompts()
    assert len(digits) == 256 and len({str(row["prompt"]) for row in digits}) == 256
    assert len({str(row["prompt"][0]) for row in digits}) == 1  # one system message for all
    assert len(sums) == 100 and len({str(row["prompt"]) for row in sums}) == 100
    assert all(str(eval(row["prompt"][0]["content"].rstrip("="))) == row["answer"] for row in sums)
    assert tiny.add_prompts().to_list() == sums.to_list()
