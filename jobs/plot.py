"""The reward of a run as a picture."""

from collections.abc import Sequence
from pathlib import Path


def reward_plot(history: Sequence[Sequence[float]], title: str, path: Path) -> Path | None:
    """Draws (step, reward) pairs and their running mean to a PNG; None where matplotlib is not installed or there is
    nothing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    if not history:
        return None
    steps, rewards = zip(*((int(step), float(reward)) for step, reward in history), strict=True)
    width = max(1, len(rewards) // 20)
    means = [
        sum(rewards[max(0, i - width + 1) : i + 1]) / len(rewards[max(0, i - width + 1) : i + 1])
        for i in range(len(rewards))
    ]
    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(steps, rewards, color="#9bb8d3", linewidth=1, label="each step")
    axes.plot(steps, means, color="#1f5a94", linewidth=2, label=f"mean of the last {width}")
    axes.set(title=title, xlabel="step", ylabel="reward", xlim=(1, max(steps[-1], 2)))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path)
    return path
