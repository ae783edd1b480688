"""Finds names that code cells use before, or without, defining them."""

import ast
import builtins
import re
import symtable
from collections.abc import Iterable

from tests.notebooks.pages import python

_ALWAYS = {*dir(builtins), "__name__", "__class__", "display", "get_ipython"}
_ON_RANKS = {"rank", "world_size", "torch", "dist"}  # what every %%ranks cell finds


def undefined(sources: Iterable[str], known: Iterable[str] = ()) -> list[str]:
    """Returns the names that the cells load without a definition, first one first.

    At the top of a cell a name must be defined before its use; inside a function, anywhere in these cells.
    known: names that are defined before the first cell
    """
    names = _Names({*_ALWAYS, *known})
    for source in sources:
        if source.startswith("%%ranks"):
            names.defined |= _ON_RANKS | set(re.findall(r"--measure (\w+)", source.partition("\n")[0]))
        names.visit(_tree(source))
    return list(dict.fromkeys(names.missing + [name for name in names.in_functions if name not in names.defined]))


def defined(source: str) -> set[str]:
    """Returns the names that the cell defines."""
    names = _Names(set())
    names.visit(_tree(source))
    return names.defined


def imports(source: str) -> set[str]:
    """Returns the packages that the cell imports, wherever the import stands."""
    found = set()
    for node in ast.walk(_tree(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found


def imports_at_the_top(source: str) -> bool:
    """Whether the cell imports something outside of its functions."""
    return any(isinstance(node, ast.Import | ast.ImportFrom) for node in _tree(source).body)


def _tree(source: str) -> ast.Module:
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    return compile(python(source), "cell", "exec", flags=flags)


class _Names(ast.NodeVisitor):
    """Follows a program as it runs.

    defined: names that have a value by now
    missing: names that were loaded without one
    in_functions: global names that functions load when they're called
    """

    def __init__(self, known: set[str]):
        self.defined = known
        self.missing: list[str] = []
        self.in_functions: list[str] = []

    def visit_Name(self, node):
        if isinstance(node.ctx, ast.Load):
            self.missing += [] if node.id in self.defined else [node.id]
        else:
            self.defined.add(node.id)

    def visit_Assign(self, node):
        self._visit(node.value, *node.targets)

    def visit_AnnAssign(self, node):
        self._visit(node.annotation, node.value, node.target if node.value else None)

    def visit_AugAssign(self, node):
        self._visit(node.value, ast.Name(node.target.id, ast.Load()) if isinstance(node.target, ast.Name) else node.target)

    def visit_NamedExpr(self, node):
        self._visit(node.value, node.target)

    def visit_For(self, node):
        self._visit(node.iter, node.target, *node.body, *node.orelse)

    visit_AsyncFor = visit_For

    def visit_Call(self, node):
        self.generic_visit(node)
        if ast.unparse(node.func).endswith("world.set"):
            self.defined |= {keyword.arg for keyword in node.keywords}

    def visit_Import(self, node):
        self.defined |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}

    visit_ImportFrom = visit_Import

    def visit_ExceptHandler(self, node):
        self.defined |= {node.name} - {None}
        self.generic_visit(node)

    def visit_MatchAs(self, node):
        self.generic_visit(node)
        self.defined |= {node.name} - {None}

    def visit_FunctionDef(self, node):
        self._visit(*node.decorator_list, *_at_definition(node.args), node.returns)
        self.defined.add(node.name)
        self.in_functions += _globals(node)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node):
        self._visit(*_at_definition(node.args))
        self.in_functions += _globals(node)

    def visit_ClassDef(self, node):
        self._visit(*node.decorator_list, *node.bases, *node.keywords)
        self._apart(*node.body)
        self.defined.add(node.name)

    def visit_ListComp(self, node):
        inner = [part for one in node.generators for part in (one.iter, one.target, *one.ifs)]
        self._apart(*inner, *([node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]))

    visit_SetComp = visit_GeneratorExp = visit_DictComp = visit_ListComp

    def _visit(self, *nodes):
        for node in filter(None, nodes):
            self.visit(node)

    def _apart(self, *nodes):
        """Visits nodes with a separate scope: the names they define are gone afterwards."""
        outside, self.defined = self.defined, set(self.defined)
        self._visit(*nodes)
        self.defined = outside


def _at_definition(arguments: ast.arguments) -> list:
    """Returns what is computed when a function is defined: defaults and annotations."""
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    annotations = [one.annotation for one in every if one]
    return [*arguments.defaults, *arguments.kw_defaults, *annotations]


def _globals(node: ast.AST) -> list[str]:
    """Returns the global names that a function uses, also in functions inside it."""
    tables = symtable.symtable(ast.unparse(node), "cell", "exec").get_children()
    found: list[str] = []
    while tables:
        table = tables.pop()
        tables += table.get_children()
        found += sorted(symbol.get_name() for symbol in table.get_symbols() if symbol.is_global())
    return found
