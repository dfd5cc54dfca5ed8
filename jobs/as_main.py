"""Runs a Python file in this process as `python FILE ARGUMENTS` would: it is `__main__`.

So `if __name__ == "__main__"` holds, what it defines can be pickled, and a process that `multiprocessing` spawns
imports the file as its own `__mp_main__`. The standard library's `runpy.run_path` does the same, but puts the file's
module into its place only when it runs it: what is imported before, and looks at `__main__` (dill does), sees another.
"""

import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path


def become(path: Path, text: str, args: Sequence[str]) -> types.ModuleType:
    """Writes the file and makes an empty module of it this process's `__main__`; `run` then fills it.

    Several processes may do so at once: the file is whole for each.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    staged.write_text(text, encoding="utf-8")
    staged.replace(path)
    main = types.ModuleType("__main__")
    main.__file__ = str(path)
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    sys.argv[:] = [str(path), *args]
    sys.path.insert(0, str(path.parent))
    return main


def run(main: types.ModuleType) -> None:
    """Runs the file of `become` to its end; a `sys.exit()` without a failure is one.

    Raises:
        SystemExit: it left with another status, as a number; words instead of one are printed, and count as 1.
    """
    assert main.__file__ is not None
    code = compile(Path(main.__file__).read_bytes(), main.__file__, "exec", dont_inherit=True)
    try:
        exec(code, main.__dict__)
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        if status := end.code if isinstance(end.code, int | None) else 1:
            raise SystemExit(status) from end
