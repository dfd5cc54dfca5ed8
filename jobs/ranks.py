"""A trainer on several GPUs: one process for each. FSDP2 shards the model among them, as TRL's examples have it, or
each holds all of it (DDP).

The first process is the training child itself. It starts the others as `accelerate launch` would, with the variables
that torch and accelerate read; they end with it, and it with them.
"""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

from jobs import probe
from jobs.recipe import Parallel

FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    # Each process saves and loads its own shards, without gathering; PEFT's files are made apart (jobs.resume).
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    # Every process reads the weights itself: an adapter that is drawn at random is the same in all, from one seed.
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}
"""What `accelerate launch` sets for TRL's own configuration of FSDP2 (trl/accelerate_configs/fsdp2.yaml), two apart."""
LOOPBACK = "127.0.0.1"


def count(environ: Mapping[str, str]) -> int:
    """Processes of the trainer on this machine: one for each GPU, and one without any."""
    return max(1, len(probe.gpus(environ)))


def environment(rank: int, processes: int, port: int, parallel: Parallel = "fsdp2") -> dict[str, str]:
    """What process `rank` of `processes` is started with; they meet at `port` of this machine."""
    return {
        **(FSDP if parallel == "fsdp2" else {}),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
    }


class Ranks:
    """All processes of one trainer, as each of them sees it."""

    def __init__(self, rank: int, processes: int) -> None:
        self.rank, self.processes = rank, processes
        self._others: list[subprocess.Popen[bytes]] = []

    @classmethod
    def join(cls, environ: Mapping[str, str], parallel: Parallel) -> "Ranks":
        """This process's place; the first one starts the others. Call it before torch is imported."""
        if "RANK" in environ:
            return cls(int(environ["RANK"]), int(environ["WORLD_SIZE"]))
        ranks = cls(0, count(environ))
        if ranks.processes > 1:
            with socket.socket() as listener:
                listener.bind((LOOPBACK, 0))
                port = listener.getsockname()[1]
            os.environ.update(environment(0, ranks.processes, port, parallel))
            ranks._start(environ, port, parallel)
        return ranks

    @property
    def first(self) -> bool:
        """Whether this is the process that talks to the server and writes."""
        return self.rank == 0

    def agree(self, wish: bool) -> bool:
        """Whether any process has the wish; all must ask at the same point, for they wait for each other."""
        if self.processes == 1:
            return wish
        import torch

        device = torch.accelerator.current_accelerator() or torch.device("cpu")
        flag = torch.tensor(int(wish), device=device)
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
        return bool(flag.item())

    def _start(self, environ: Mapping[str, str], port: int, parallel: Parallel) -> None:
        for rank in range(1, self.processes):
            place = environment(rank, self.processes, port, parallel)
            own = {**environ, **place, "ASYNCGRPO_PARENT": str(os.getpid())}
            other = subprocess.Popen([sys.executable, "-m", "jobs.train"], env=own, stdin=subprocess.DEVNULL)
            self._others.append(other)
            threading.Thread(target=self._watch, args=(rank, other), daemon=True).start()

    def _watch(self, rank: int, other: subprocess.Popen[Any]) -> None:
        """Without one of its processes a trainer waits for ever; one that ends well leaves the rest to the first."""
        if status := other.wait():
            sys.stderr.write(f"error: process {rank} of the trainer ended with status {status}\n")
            sys.stderr.flush()
            os._exit(1)
