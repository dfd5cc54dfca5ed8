r"""Is an answer mathematically equal to the gold one? math-verify decides, in a process of its own.

math-verify limits its time with SIGALRM, which works only in a main thread, while TRL calls rewards in worker threads.
So a child process does it in its main thread, asked through pipes; if it hangs where no signal helps, it is killed.
`python -m jobs.math_check` is that child: a JSON line [gold, answer] in, a JSON line (1.0, 0.0 or null) out.
"""

import functools
import json
import os
import re
import select
import subprocess
import sys
import threading
import time
from typing import Any

from jobs import bundle

STEP_LIMIT_S = 5
"""math-verify's own limit for one parse or comparison; its default."""
DEADLINE_S = 30.0
"""For one question, its start (about 2 s of imports) and several steps at their limit included."""
PARENT_POLL_S = 0.5


class Checker:
    """Scores answers; safe to call from several threads, which take turns. The child starts with the first question."""

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self.deadline_s = deadline_s
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def score(self, gold: str, answer: str | None) -> float | None:
        """1.0 if `answer` equals `gold`, 0.0 if not (or if it is None), None if `gold` cannot be parsed.

        Raises:
            TimeoutError: no result within the deadline.
            RuntimeError: the child ended, for example because math-verify is not installed.
        """
        with self._lock:
            if self._child is not None and self._child.poll() is not None:
                self._end()
            child = self._child = self._child or _start()
            assert child.stdin is not None and child.stdout is not None
            try:
                child.stdin.write(json.dumps([gold, answer]).encode() + b"\n")
                child.stdin.flush()
                readable, _, _ = select.select([child.stdout], [], [], self.deadline_s)
                line = child.stdout.readline() if readable else None
            except BrokenPipeError:
                line = b""
            if line:
                result: float | None = json.loads(line)
                return result
            self._end()
            if line is None:
                raise TimeoutError(f"math-verify took more than {self.deadline_s:g} s for the gold answer {gold!r}")
            raise RuntimeError("the math-verify process ended; its error is above (is math-verify installed?)")

    def close(self) -> None:
        """Ends the child, if there is one."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "jobs.math_check", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(bundle.app_dir())},
    )


def boxed(text: str) -> str | None:
    r"""The content of the last \boxed{} (or \fbox{}) of `text`; None if there is none or if it is not closed."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    begin = text.index("{", start) + 1
    depth = 1
    for index in range(begin, len(text)):
        escaped = text[index - 1] == "\\"
        depth += {"{": 1, "}": -1}.get(text[index], 0) if not escaped else 0
        if depth == 0:
            return text[begin:index].strip()
    return None


def normalized(latex: str) -> str:
    """`latex` without what never changes its value: spacing, sizing of brackets, dollar signs, the last full stop."""
    latex = re.sub(r"\\(left|right|big|Big|displaystyle)(?![a-zA-Z])|\\[!,;: ]|~|\$", "", latex)
    latex = re.sub(r"\\[dt]frac(?![a-zA-Z])", r"\\frac", latex)
    return re.sub(r"\s+", " ", latex).strip().removesuffix(".").strip()


@functools.lru_cache(maxsize=4096)
def _parsed_gold(gold: str) -> tuple[Any, ...]:
    """What math-verify makes of a gold answer; empty if nothing."""
    last = boxed(gold)
    found = _parse(f"${normalized(last)}$") if last is not None else _parse(gold)
    if not found and last is None and not re.search(r"[A-Za-z]{2}", re.sub(r"\\[A-Za-z]+", "", gold)):
        found = _parse(f"${normalized(gold)}$")  # bare LaTeX; a run of words is left alone: it would parse as a product
    return tuple(found)


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    found: list[Any] = parse(text, parsing_timeout=STEP_LIMIT_S)
    return found


def _compare(gold: str, answer: str | None) -> float | None:
    """`Checker.score`, in the child's main thread."""
    from math_verify import verify

    parsed = list(_parsed_gold(gold))
    if not parsed:
        return None
    if answer is None:
        return 0.0
    if normalized(answer) == normalized(boxed(gold) or gold):
        return 1.0
    return float(verify(parsed, _parse(f"${normalized(answer)}$"), timeout_seconds=STEP_LIMIT_S))


def _end_with(parent: int) -> None:
    """Ends this process when its parent has ended while it computes; else the end of its input tells.

    The kernel's signal for that is of no use here: it comes when the thread that started this process ends.
    """
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    os._exit(1)


def _serve(parent: int) -> None:
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    for line in sys.stdin:
        gold, answer = json.loads(line)
        print(json.dumps(_compare(gold, answer)), flush=True)  # noqa: T201


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
