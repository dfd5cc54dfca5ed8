"""The flavors of machine a Job can ask for, with the prices of `GET /api/jobs/hardware`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MICRO_USD = 1_000_000
MINUTES_PER_HOUR = 60


@dataclass(frozen=True)
class Accelerator:
    """The GPUs of one flavor: model name, how many, and memory of all of them together in GB."""

    model: str
    quantity: int
    vram_gb: int


@dataclass(frozen=True)
class Flavor:
    """One kind of machine. `usd_per_hour` is what the Hub bills while a Job is starting or running."""

    name: str
    pretty_name: str
    cpus: int
    memory_gb: int
    disk_gb: int
    usd_per_hour: float
    accelerator: Accelerator | None = None

    @property
    def gpus(self) -> int:
        """How many GPUs a Job of this flavor holds."""
        return self.accelerator.quantity if self.accelerator else 0

    def to_json(self) -> dict[str, Any]:
        """One element of the hardware list, in the words of `huggingface_hub.JobHardwareInfo`."""
        per_minute = self.usd_per_hour / MINUTES_PER_HOUR
        answer: dict[str, Any] = {
            "name": self.name,
            "prettyName": self.pretty_name,
            "cpu": f"{self.cpus} vCPU",
            "ram": f"{self.memory_gb} GB",
            "ephemeralStorage": f"{self.disk_gb} GB",
            "accelerator": None,
            "unitCostMicroUSD": round(per_minute * MICRO_USD),
            "unitCostUSD": round(per_minute, 6),
            "unitLabel": "minute",
        }
        if self.accelerator:
            answer["accelerator"] = {
                "type": "gpu",
                "model": self.accelerator.model,
                "quantity": str(self.accelerator.quantity),
                "vram": f"{self.accelerator.vram_gb} GB",
                "manufacturer": "Nvidia",
            }
        return answer


def _cpu(name: str, pretty_name: str, cpus: int, memory_gb: int, disk_gb: int, usd_per_hour: float) -> Flavor:
    return Flavor(name, pretty_name, cpus, memory_gb, disk_gb, usd_per_hour)


def _gpu(
    name: str, pretty_name: str, model: str, gpus: int, vram_gb: int, cpus: int, memory_gb: int, usd_per_hour: float
) -> Flavor:
    disk_gb = 50 if usd_per_hour < 1 else 1000
    return Flavor(name, pretty_name, cpus, memory_gb, disk_gb, usd_per_hour, Accelerator(model, gpus, vram_gb * gpus))


# Names: huggingface_hub.JobHardware. Prices of cpu-basic, t4-small, l4x1, a10g-small, a100-large and h200*: the Hub's
# list of 2026-08. The others only keep their order and ratio; an estimate reads them from the Hub that it talks to.
FLAVORS: dict[str, Flavor] = {
    flavor.name: flavor
    for flavor in (
        _cpu("cpu-basic", "CPU Basic", 2, 16, 50, 0.01),
        _cpu("cpu-upgrade", "CPU Upgrade", 8, 32, 50, 0.03),
        _cpu("cpu-performance", "CPU Performance", 32, 256, 100, 1.90),
        _cpu("cpu-xl", "CPU XL", 16, 124, 1000, 1.00),
        _gpu("t4-small", "Nvidia T4 - small", "T4", 1, 16, 4, 15, 0.40),
        _gpu("t4-medium", "Nvidia T4 - medium", "T4", 1, 16, 8, 30, 0.60),
        _gpu("l4x1", "1x Nvidia L4", "L4", 1, 24, 8, 30, 0.80),
        _gpu("l4x4", "4x Nvidia L4", "L4", 4, 24, 48, 186, 3.80),
        _gpu("l40sx1", "1x Nvidia L40S", "L40S", 1, 48, 8, 62, 1.80),
        _gpu("l40sx4", "4x Nvidia L40S", "L40S", 4, 48, 48, 382, 8.30),
        _gpu("l40sx8", "8x Nvidia L40S", "L40S", 8, 48, 192, 1534, 23.50),
        _gpu("a10g-small", "Nvidia A10G - small", "A10G", 1, 24, 4, 15, 1.00),
        _gpu("a10g-large", "Nvidia A10G - large", "A10G", 1, 24, 12, 46, 1.50),
        _gpu("a10g-largex2", "2x Nvidia A10G - large", "A10G", 2, 24, 24, 92, 3.00),
        _gpu("a10g-largex4", "4x Nvidia A10G - large", "A10G", 4, 24, 48, 184, 5.00),
        _gpu("a100-large", "Nvidia A100 - large", "A100", 1, 80, 12, 142, 2.50),
        _gpu("a100x4", "4x Nvidia A100", "A100", 4, 80, 48, 568, 10.00),
        _gpu("a100x8", "8x Nvidia A100", "A100", 8, 80, 96, 1136, 20.00),
        _gpu("h200", "1x Nvidia H200", "H200", 1, 141, 23, 256, 5.00),
        _gpu("h200x2", "2x Nvidia H200", "H200", 2, 141, 46, 512, 10.00),
        _gpu("h200x4", "4x Nvidia H200", "H200", 4, 141, 92, 1024, 20.00),
        _gpu("h200x8", "8x Nvidia H200", "H200", 8, 141, 184, 2048, 40.00),
        _gpu("rtx-pro-6000", "1x Nvidia RTX PRO 6000", "RTX PRO 6000", 1, 96, 22, 256, 2.60),
        _gpu("rtx-pro-6000x2", "2x Nvidia RTX PRO 6000", "RTX PRO 6000", 2, 96, 44, 512, 5.20),
        _gpu("rtx-pro-6000x4", "4x Nvidia RTX PRO 6000", "RTX PRO 6000", 4, 96, 88, 1024, 10.40),
        _gpu("rtx-pro-6000x8", "8x Nvidia RTX PRO 6000", "RTX PRO 6000", 8, 96, 176, 2048, 20.80),
    )
}
