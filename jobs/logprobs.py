"""Log-probabilities of given tokens in plain torch, a part of the rows at a time: for TRL 1.15.0 on a CPU.

That version takes them from a Triton kernel alone, which needs a GPU. This has the kernel's signature.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

LOGITS = 1 << 22
"""Logits at a time: 16 MB in float32. The backward pass computes each part again, so no more than one is ever kept."""
OUTPUTS = frozenset({"log_probs", "entropy"})
"""What TRL's asynchronous GRPO asks for, of five things that the kernel can give."""


class LogProbabilities:
    """Stands for TRL's autograd function, of which `apply` is called."""

    @staticmethod
    def apply(
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = ("log_probs",),
    ) -> tuple[torch.Tensor | None, ...]:
        """Log-probability of each target, and the entropy of its distribution; differentiable.

        Args:
            hidden: (N, H) what goes into the output layer.
            weight: (V, H), and bias: (V), that layer.
            targets: (N) token ids.
            temperature: what logits are divided by, after `logit_scale` and `final_logit_softcapping`.
            chunk_size: tokens of the vocabulary at a time in TRL's kernel; here rows are split instead.
            outputs: what is wanted besides the log-probabilities; "entropy" or nothing.

        Returns: (N) float32 log-probabilities, (N) float32 entropy or None, and None three times, as TRL's kernel.

        Raises:
            NotImplementedError: another output is wanted.
        """
        if unknown := set(outputs) - OUTPUTS:
            raise NotImplementedError(f"without Triton there is no {', '.join(sorted(unknown))}")
        rows = max(1, LOGITS // weight.shape[0])
        parts = [
            checkpoint(
                _part,
                hidden[start : start + rows],
                weight,
                bias,
                targets[start : start + rows],
                temperature,
                final_logit_softcapping,
                logit_scale,
                "entropy" in outputs,
                use_reentrant=False,
                preserve_rng_state=False,
            )
            for start in range(0, max(1, len(hidden)), rows)
        ]
        log_probs, entropy = zip(*parts, strict=True)
        return torch.cat(log_probs), torch.cat(entropy) if "entropy" in outputs else None, None, None, None


def _part(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: float,
    softcap: float | None,
    scale: float,
    with_entropy: bool,
) -> Any:
    logits = F.linear(hidden, weight, bias).float() * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    all_log_probs = (logits / temperature).log_softmax(-1)
    log_probs = all_log_probs.gather(-1, targets[:, None])[:, 0]
    return log_probs, -(all_log_probs.exp() * all_log_probs).sum(-1) if with_entropy else None
