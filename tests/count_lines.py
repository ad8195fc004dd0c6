"""Count lines of code and classes by folder: without blank lines, comments and docstrings.

python -m tests.count_lines              the five folders of the product
python -m tests.count_lines tests        other folders
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
PRODUCT: Final = ("proto", "engine_core", "worker", "api_server", "deploy")
_NO_CODE: Final = (
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
)
_DOCUMENTED: Final = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def count(source: str) -> tuple[int, int, int]:
    """Return the lines of code, those of docstrings, and the classes of a file.

    A docstring is any string that is a statement by itself: of an attribute, too.
    """
    tree = ast.parse(source)
    docstrings: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED):
            for part in node.body:
                match part:
                    case ast.Expr(value=ast.Constant(value=str())):
                        docstrings.update(range(part.lineno, (part.end_lineno or 0) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    classes = sum(isinstance(node, ast.ClassDef) for node in ast.walk(tree))
    return len(lines - docstrings), len(docstrings), classes


def main(folders: Sequence[str]) -> None:
    totals: dict[str, Counter[str]] = {}
    for folder in folders or PRODUCT:
        for path in sorted((ROOT / folder).rglob("*.py")):
            code, docstrings, classes = count(path.read_text())
            found = {"code": code, "docstrings": docstrings, "classes": classes, "files": 1}
            parts = path.relative_to(ROOT).parts
            for name in {"all", folder, "/".join(parts[:-1][:2])}:
                totals.setdefault(name, Counter()).update(found)
    for name, counts in sorted(totals.items(), key=lambda each: (each[0] == "all", each[0])):
        print(f"{name:32}", *(f"{number:8,} {what}" for what, number in counts.items()))


if __name__ == "__main__":
    main(sys.argv[1:])
