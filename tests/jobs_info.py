"""Jobs as huggingface_hub gives them, for tests of pure functions."""

from typing import Any

from huggingface_hub import JobInfo


def job(job_id: str, role: str = "replica", index: int = 0, stage: str = "RUNNING", **more: Any) -> JobInfo:
    labels = {
        "asyncgrpo-run": "run",
        "asyncgrpo-role": role,
        "asyncgrpo-index": str(index),
        "asyncgrpo-generation": "0",
    }
    return JobInfo(
        **{
            "id": job_id,
            "owner": {"id": "1", "name": "me", "type": "user"},
            "status": {"stage": stage, "message": None},
            "labels": labels | more.pop("labels", {}),
            "flavor": "h200",
        }
        | more
    )
