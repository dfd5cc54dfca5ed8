"""A user's own script in the training child, with the real TRL, against the simulated engine."""

import signal
from collections.abc import Callable
from pathlib import Path

from safetensors.numpy import load_file

from jobs.stop import TERMINATED
from tests.test_train import WAIT_S, Training, cache, engine, train  # noqa: F401 (fixtures)

SEVENS = str(Path(__file__).with_name("scripts") / "sevens.toml")


def steps(number: int) -> str:
    return f"trainer.script_args=['--steps', '{number}']"


def test_a_preempted_script_goes_on_where_it_was(train: Callable[..., Training]) -> None:  # noqa: F811
    first = train(steps(100000), recipe=SEVENS)
    first.wait_for(lambda: len(first.steps()) >= 3)
    first.process.send_signal(signal.SIGTERM)
    assert first.process.wait(WAIT_S) == TERMINATED, first.log.read_text()[-4000:]
    assert "trained" not in first.log.read_text()
    saved = [row for row in first.rows() if row.get("event") == "saved"][-1]
    assert saved["step"] >= first.steps()[-1]["step"]
    (planned,) = [row for row in first.rows() if row.get("event") == "planned"]
    assert planned["max_steps"] == 100000

    last = saved["step"] + 2
    second = train(steps(last), recipe=SEVENS, resume=Path(saved["path"]))
    assert second.process.wait(WAIT_S) == 0, second.log.read_text()[-4000:]
    assert [row["step"] for row in second.steps()] == [last - 1, last]
    assert f"trained {last} steps" in second.log.read_text()
    final = load_file(second.output / "final" / "adapter_model.safetensors")
    assert any(tensor.any() for name, tensor in final.items() if "lora_B" in name)


def test_what_a_script_defines_reaches_a_spawned_rollout_process(
    train: Callable[..., Training],  # noqa: F811
    tmp_path: Path,
) -> None:
    """With a GPU TRL's rollout process is spawned, so it imports the script; on a CPU it is forked."""
    text = Path(SEVENS).with_suffix(".py").read_text()
    spawned = "from jobs import rollout_patches as p\n\np._ForkedRollout = p._SpawnedRollout\nprint(__name__)\n"
    (tmp_path / "spawned.py").write_text(spawned + text)
    both = train(f"trainer.script={tmp_path}/spawned.py", steps(2), recipe=SEVENS)
    assert both.process.wait(WAIT_S) == 0, both.log.read_text()[-4000:]
    lines = both.log.read_text().splitlines()
    assert lines.count("__main__") == lines.count("__mp_main__") == lines.count("trained 2 steps") == 1
    assert "rewards/sevens" in both.steps()[0]


def test_several_processes_run_a_script(train: Callable[..., Training]) -> None:  # noqa: F811
    both = train(steps(2), recipe=SEVENS, gpus="0,1")
    assert both.process.wait(WAIT_S) == 0, both.log.read_text()[-4000:]
    words = both.log.read_text()
    assert words.count("trained 2 steps") == 2
    assert words.count("the script says model = 'someone/sevens'") == 1
    assert (both.output / "final" / "adapter_model.safetensors").exists()


def test_a_script_that_does_not_train_is_an_error(train: Callable[..., Training], tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "idle.py").write_text("import atexit, trl\natexit.register(print, 'at its end')\nprint('done')\n")
    idle = train(f"trainer.script={tmp_path}/idle.py", recipe=SEVENS)
    assert idle.process.wait(WAIT_S) == 2
    error = "error: trainer.script ended without training: it never called train() of an AsyncGRPOTrainer."
    assert set(idle.log.read_text().splitlines()[-3:]) == {"done", "at its end", error}
