"""Variable-length attention under the name and signature of FlashAttention-3, from what torch itself has.

TRL takes the kernel `kernels-community/flash-attn3` from the Hub through the `kernels` package. On a CPU that kernel
does not exist, and a machine without the Hub cannot fetch it. This package stands in for it: on a CPU masked
scaled-dot-product attention, on a GPU `torch.nn.attention.varlen` (torch 2.11 on). Only what TRL 1.14 to 1.16 asks for
is here. `kernels` imports this file by its path, so it may import nothing but torch.
"""

from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["flash_attn_varlen_func"]


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    **unsupported: Any,
) -> torch.Tensor:
    """Attention within each of S segments laid end to end.

    Args:
        q: (tokens_q, heads, head_dim).
        k, v: (tokens_k, kv_heads, head_dim); `heads` is a multiple of `kv_heads`.
        cu_seqlens_q, cu_seqlens_k: (S + 1) offsets of the segments, starting at 0.
        max_seqlen_q, max_seqlen_k: the longest segment.
        softmax_scale: default 1 / sqrt(head_dim).
        causal: query i of a segment sees the keys up to i + (its keys - its queries): aligned bottom-right.
        window_size: how many keys to the left and to the right of that diagonal are seen; -1 is no limit.

    Returns: (tokens_q, heads, head_dim).

    Raises:
        NotImplementedError: an argument of FlashAttention-3 that changes the result and is not listed above.
    """
    wanted = [name for name, value in unsupported.items() if value not in (None, False, 0, 0.0, 1)]
    if wanted:
        raise NotImplementedError(
            f"this stand-in for FlashAttention-3 has no {', '.join(wanted)}; use the Hub's kernel"
        )
    left, right = window_size[0], 0 if causal else window_size[1]
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    if q.is_cuda:
        from torch.nn.attention.varlen import varlen_attn

        out: torch.Tensor = varlen_attn(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            scale=softmax_scale,
            window_size=(left, right),
        )
        return out
    rows_q, real_q = _padded(cu_seqlens_q)
    rows_k, real_k = _padded(cu_seqlens_k)
    mask = _visible(cu_seqlens_q.diff(), cu_seqlens_k.diff(), rows_q.shape[1], rows_k.shape[1], left, right)
    mask = (mask & real_k[:, None, :]) | ~real_q[:, :, None]  # a padded query sees anything: no row without a key
    query, key, value = q[rows_q].transpose(1, 2), k[rows_k].transpose(1, 2), v[rows_k].transpose(1, 2)
    padded = F.scaled_dot_product_attention(query, key, value, mask[:, None], scale=softmax_scale)
    return padded.transpose(1, 2)[real_q]


def _padded(cu_seqlens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(S, longest) indices of each segment's tokens, and where they are real; elsewhere they repeat the last token."""
    lengths = cu_seqlens.diff().long()
    column = torch.arange(int(lengths.max()))
    real = column[None, :] < lengths[:, None]
    return cu_seqlens[:-1, None] + torch.minimum(column[None, :], lengths[:, None] - 1), real


def _visible(
    length_q: torch.Tensor, length_k: torch.Tensor, longest_q: int, longest_k: int, left: int, right: int
) -> torch.Tensor:
    """(S, longest_q, longest_k) mask of what causality and the window allow, aligned bottom-right in each segment."""
    diagonal = torch.arange(longest_q)[None, :, None] + (length_k - length_q)[:, None, None]
    ahead = torch.arange(longest_k)[None, None, :] - diagonal
    mask = torch.ones_like(ahead, dtype=torch.bool)
    if left >= 0:
        mask &= ahead >= -left
    if right >= 0:
        mask &= ahead <= right
    return mask
