"""The replica's middleware, with a way around the bucket: tests compare what engines say of directories."""

from typing import Any

from jobs.middleware import ReplicaMiddleware

RAW = "raw:"


class RawPaths(ReplicaMiddleware):
    """Takes a load's `raw:<directory>` as it is."""

    def _local_path(self, asked: dict[str, Any]) -> str:
        path = asked.get("lora_path")
        if isinstance(path, str) and path.startswith(RAW):
            return path.removeprefix(RAW)
        return super()._local_path(asked)
