"""The training child as tests look into it: `python -m tests.training` is `python -m jobs.train` that also writes, into
its output directory, which tickets of `digit` each batch was made of and what each process held at certain points.

Processes that are told to shard their model by FSDP2 do so on the CPU too; accelerate has it on GPUs alone.
"""

import json
import logging
import re
from collections import deque
from pathlib import Path
from typing import Any

from jobs import train


def build(*args: Any) -> Any:
    import torch
    from transformers import TrainerCallback
    from trl.experimental.async_grpo.async_grpo_trainer import DataCollatorForRollout

    trainer = original(*args)
    output, rank = Path(trainer.args.output_dir), trainer.accelerator.process_index
    compute_loss, tokenizer, made = trainer.compute_loss, trainer.processing_class, deque[list[int]]()
    collate = DataCollatorForRollout.torch_call

    def noted(self: Any, examples: Any) -> Any:
        texts = [
            tokenizer.decode(sample["input_ids"]) for row in examples[0] for sample in getattr(row, "samples", row)
        ]
        made.append([int(re.findall(r"Ticket (\d+)", text)[0]) for text in texts])
        return collate(self, examples)

    def recorded(model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
        if rank == 0:  # which puts the batches together, one ahead of training
            with (output / "tickets.jsonl").open("a") as file:
                file.write(json.dumps({"step": trainer.state.global_step + 1, "tickets": made.popleft()}) + "\n")
        return compute_loss(model, inputs, *more, **named)

    def local(tensor: Any) -> Any:
        return tensor.to_local().clone() if hasattr(tensor, "to_local") else tensor.detach().clone()

    class Held(TrainerCallback):  # type: ignore[misc]
        def dump(self, when: str) -> None:
            model = trainer.accelerator.unwrap_model(trainer.model)
            named = {name: value for name, value in model.named_parameters() if value.requires_grad}
            states = trainer.optimizer.optimizer.state
            held = {name: local(value) for name, value in named.items()}
            for name, value in named.items():
                held |= {f"{name}: {key}": local(each) for key, each in states.get(value, {}).items()}
            held["rate"] = torch.tensor(trainer.lr_scheduler.get_last_lr())
            torch.save(held, output / f"held-{when}-{rank}.pt")

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.dump(f"saved-{state.global_step}")

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.dump(f"begun-{state.global_step}")

    DataCollatorForRollout.torch_call = noted
    trainer.compute_loss = recorded
    callbacks = trainer.callback_handler.callbacks
    trainer.add_callback(Held())
    callbacks.insert(0, callbacks.pop())  # before the journal, whose reader may end this process
    return trainer


def shard_on_cpu() -> None:
    """accelerate leaves FSDP out when it sees a CPU; torch does not."""
    from accelerate.state import AcceleratorState, DistributedType

    init = AcceleratorState.__init__

    def sharded(self: Any, *args: Any, fsdp_plugin: Any = None, **named: Any) -> None:
        init(self, *args, fsdp_plugin=fsdp_plugin, **named)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

    AcceleratorState.__init__ = sharded


original = train.build
if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("trl").setLevel(logging.WARNING)
    train.build = build
    shard_on_cpu()
    train._run_and_leave()
