from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from jobs import logprobs
from jobs.logprobs import LogProbabilities

BOTH = ("log_probs", "entropy")


def inputs(rows: int, vocabulary: int, bias: bool, seed: int = 0) -> list[Any]:
    torch.manual_seed(seed)
    hidden, weight = torch.randn(rows, 8), torch.randn(vocabulary, 8)
    return [hidden, weight, torch.randn(vocabulary) if bias else None, torch.randint(vocabulary, (rows,))]


def reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: Any,
    targets: torch.Tensor,
    temperature: float,
    cap: Any,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """From the definitions, all at once, in double precision."""
    logits = hidden.double() @ weight.double().T + (0 if bias is None else bias.double())
    logits = logits * scale
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    probabilities = (logits / temperature).softmax(-1)
    logs = probabilities.log()
    return logs[torch.arange(len(targets)), targets], -(probabilities * logs).sum(-1)


@pytest.mark.parametrize("logits", [1 << 22, 97 * 3, 1], ids=["at once", "three rows", "row by row"])
@pytest.mark.parametrize(
    ("temperature", "cap", "scale", "bias"), [(1.0, None, 1.0, False), (0.7, 5.0, 0.5, True), (2.0, None, 3.0, False)]
)
def test_values_and_gradients_are_those_of_log_softmax_and_gather(
    monkeypatch: pytest.MonkeyPatch, logits: int, temperature: float, cap: float | None, scale: float, bias: bool
) -> None:
    monkeypatch.setattr(logprobs, "LOGITS", logits)
    given = inputs(20, 97, bias)
    ours, theirs = ([x.clone().requires_grad_() if x is not None else x for x in given[:3]] for _ in range(2))
    found = LogProbabilities.apply(*ours, given[3], temperature, 32768, cap, scale, BOTH)
    expected = reference(*theirs, given[3], temperature, cap, scale)
    assert found[2:] == (None, None, None)
    weights = torch.randn(2, 20)
    for mine, other in zip(found[:2], expected, strict=True):
        assert mine is not None
        torch.testing.assert_close(mine, other.float(), atol=1e-5, rtol=1e-5)
    sum((each * weight).sum() for each, weight in zip(found[:2], weights, strict=True)).backward()
    sum((each * weight).sum() for each, weight in zip(expected, weights, strict=True)).backward()
    for mine, other in zip(ours, theirs, strict=True):
        if mine is not None:
            torch.testing.assert_close(mine.grad, other.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("temperature", "cap", "scale"), [(1.0, None, 1.0), (0.7, 5.0, 0.5)])
def test_they_are_those_of_the_trl_that_has_them_in_torch(temperature: float, cap: float | None, scale: float) -> None:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    found = []
    for function in (LogProbabilities, ChunkedLogProbFunction):
        hidden, weight, bias, targets = inputs(20, 97, bias=True)
        hidden.requires_grad_()
        log_probs, entropy, *none = function.apply(hidden, weight, bias, targets, temperature, 32, cap, scale, BOTH)
        assert none == [None, None, None]
        (log_probs.sum() + 2 * entropy.sum()).backward()
        found.append([log_probs, entropy, hidden.grad])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_the_log_probabilities_are_bounded_and_the_entropy_is_left_out_when_nobody_asks() -> None:
    hidden, weight, _, targets = inputs(5, 11, bias=False)
    log_probs, *others = LogProbabilities.apply(hidden * 1e4, weight, None, targets, 1.0, 32768)
    assert others == [None] * 4
    assert log_probs is not None and torch.isfinite(log_probs).all() and (log_probs <= 0).all()


def test_no_row_at_all_still_reaches_the_model() -> None:
    hidden, weight, _, targets = inputs(0, 11, bias=False)
    hidden.requires_grad_()
    log_probs, entropy, *_ = LogProbabilities.apply(hidden, weight, None, targets, 1.0, 32768, outputs=BOTH)
    assert log_probs is not None and entropy is not None and log_probs.shape == entropy.shape == (0,)
    log_probs.sum().backward()
    assert hidden.grad is not None and hidden.grad.shape == (0, 8)


class Largest(TorchDispatchMode):
    """The largest number of elements that any operation put into a tensor."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else [out]:
            if isinstance(each, torch.Tensor):
                self.elements = max(self.elements, each.numel())
        return out


def test_memory_is_bounded_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of all rows would be 512 x 1,000; the weight has 8 x 1,000, which is the largest there may be."""
    monkeypatch.setattr(logprobs, "LOGITS", 6000)
    hidden, weight, _, targets = inputs(512, 1000, bias=False)
    hidden.requires_grad_()
    kept: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    with Largest() as largest:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            log_probs, entropy, *_ = LogProbabilities.apply(hidden, weight, None, targets, 1.0, 32768, outputs=BOTH)
        assert log_probs is not None and entropy is not None
        (log_probs.sum() + entropy.sum()).backward()
    assert largest.elements <= 8000
    assert kept and not {6 * 1000, 2 * 1000} & set(kept), "inputs are kept for the backward pass, logits are not"


def test_what_it_cannot_give_is_named() -> None:
    with pytest.raises(NotImplementedError, match="is_top1, mean_logits"):
        LogProbabilities.apply(*inputs(2, 3, bias=False), 1.0, 32768, outputs=("log_probs", "mean_logits", "is_top1"))
