"""Python files of the user's own that a recipe names, as `mine:brevity` does: they travel in it to the trainer."""

import ast
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jobs.errors import ConfigError


def take(values: Mapping[str, Any], folders: Iterable[Path]) -> dict[str, str]:
    """The text of each file `<module>.py` in one of `folders` that a recipe's rewards or data set name, by module.

    A module that is in none of them is installed where the trainer runs, or it is found missing there.

    Raises:
        ConfigError: a file that cannot be read, is no Python, or lacks the function.
    """
    found: dict[str, str] = {}
    for where, name in _named(values):
        module, _, function = name.partition(":")
        path = next((path for folder in folders if (path := folder / f"{module}.py").is_file()), None)
        if path is None or not module.isidentifier():
            continue
        try:
            text = path.read_text(encoding="utf-8")
            defined = _defined(ast.parse(text))
        except SyntaxError as error:
            raise ConfigError(
                f"{where} = {name!r}: {path} is no Python in line {error.lineno}: {error.msg}."
            ) from error
        except (OSError, ValueError) as error:
            raise ConfigError(f"{where} = {name!r}: {path} cannot be read: {error}") from error
        if function not in defined:
            known = ", ".join(sorted(each for each in defined if not each.startswith("_"))) or "nothing"
            raise ConfigError(f"{where} = {name!r}: {path} has no {function}. It has: {known}.")
        found[module] = text
    return found


def install(modules: Mapping[str, str], folder: Path) -> None:
    """Writes the files and lets this process, and those that it spawns, import them. Several may do so at once."""
    if not modules:
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in modules.items():
        staged = folder / f".{name}.{os.getpid()}"
        staged.write_text(text, encoding="utf-8")
        staged.replace(folder / f"{name}.py")
    sys.path.insert(0, str(folder))


@contextlib.contextmanager
def installed(modules: Mapping[str, str]) -> Iterator[None]:
    """The same for as long as the block runs."""
    with tempfile.TemporaryDirectory() as folder:
        before = list(sys.path)
        install(modules, Path(folder))
        try:
            yield
        finally:
            sys.path[:] = before
            for name in modules:
                sys.modules.pop(name, None)


def _named(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Settings that may say `module:function`, and what they say; the types are checked elsewhere."""
    for section, field in (("reward", "functions"), ("dataset", "load")):
        said = (values.get(section) or {}).get(field) if isinstance(values.get(section), Mapping) else None
        for index, each in enumerate(said if isinstance(said, list) else [said]):
            if isinstance(each, str):
                yield (f"{section}.{field}[{index}]" if isinstance(said, list) else f"{section}.{field}"), each


def _defined(tree: ast.Module) -> set[str]:
    """Names that a module has at its top level, as far as can be told without running it."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
    return names
