"""The project's source files as syntax trees, for the tests that read them."""

import ast
import io
import tokenize
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def name(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


@cache
def nodes(file: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree(file)))


@cache
def code_lines(file: Path) -> int:
    """Lines that hold code: without docstrings, comments and blank lines."""
    quiet = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = tokenize.generate_tokens(io.StringIO(file.read_text(encoding="utf-8")).readline)
    lines = {line for one in tokens if one.type not in quiet for line in range(one.start[0], one.end[0] + 1)}
    texts = (node for node in nodes(file) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    return len(lines - {line for text in texts for line in range(text.lineno, (text.end_lineno or 0) + 1)})


def modules_named(nodes: Iterable[ast.AST], file: Path) -> set[str]:
    """Dotted names of all modules that these import statements may load."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(file)}: write imports from the repository root"
            assert node.module
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@cache
def imports(file: Path) -> set[str]:
    """What the file may import, at the top or inside a function."""
    return modules_named(nodes(file), file)
