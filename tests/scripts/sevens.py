"""A user's script, as one writes it for TRL alone: it knows nothing of asyncgrpo, and hard-codes what TRL needs."""

import argparse

from datasets import Dataset
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer


def sevens(completions, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    return [text.count("7") / len(text) if text else 0.0 for text in texts]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()

    questions = [f"Ticket {number:03d}: your digit?" for number in range(64)]
    dataset = Dataset.from_dict({"question": questions})
    dataset = dataset.map(
        lambda row: {"prompt": [{"role": "user", "content": row["question"]}]}, remove_columns=dataset.column_names
    )
    config = AsyncGRPOConfig(
        output_dir="sevens",
        vllm_server_base_url="http://localhost:8000",
        learning_rate=3e-3,
        per_device_train_batch_size=32,
        token_budget=0,
        max_completion_length=8,
        max_inflight_tasks=32,
        queue_maxsize=8,
        gradient_checkpointing=False,
        max_steps=arguments.steps,
        save_strategy="no",
    )
    trainer = AsyncGRPOTrainer(
        model="someone/sevens",
        args=config,
        train_dataset=dataset,
        reward_funcs=sevens,
    )
    trainer.train()
    print(f"trained {trainer.state.global_step} steps")
    if arguments.save:
        trainer.save_model("mine")


if __name__ == "__main__":
    main()
