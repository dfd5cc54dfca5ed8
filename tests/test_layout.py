"""What holds for the sources as a whole."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names


def test_jobs_never_imports_the_emulator() -> None:
    modules = list((ROOT / "jobs").rglob("*.py"))
    assert len(modules) > 50
    assert [path.name for path in modules if imported(path) & {"emulator", "tests"}] == []


def test_the_map_names_every_module() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`([a-z_]+)`", text))
    present = {path.stem for package in ("jobs", "emulator") for path in (ROOT / package).glob("*.py")} - {"__init__"}
    assert present - named == set()


def test_every_module_says_in_its_first_line_what_it_is_for() -> None:
    for package in ("jobs", "emulator"):
        for path in (ROOT / package).glob("*.py"):
            first = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
            assert len(first) > 15, path.name
