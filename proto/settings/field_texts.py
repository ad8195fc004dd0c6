"""The string below each field of a class, which is its description; Python drops these strings."""

import ast
import inspect
from functools import cache
from itertools import pairwise
from types import ModuleType


@cache
def texts_below_fields(module: ModuleType) -> dict[str, dict[str, str]]:
    """Return class → field → the string below it, of the classes in the source of a module."""
    found: dict[str, dict[str, str]] = {}
    for definition in ast.parse(inspect.getsource(module)).body:
        if isinstance(definition, ast.ClassDef):
            texts = found.setdefault(definition.name, {})
            for line, after in pairwise(definition.body):
                match line, after:
                    case (
                        ast.AnnAssign(target=ast.Name(id=field_name)),
                        ast.Expr(value=ast.Constant(value=str() as text)),
                    ):
                        texts[field_name] = " ".join(text.split())
    return found
