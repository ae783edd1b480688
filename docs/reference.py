"""The library's reference, read from its source: no import, so that the site needs neither torch nor a GPU.

Every package has a page. It begins with the names that the package's stub, __init__.pyi, exports, and goes on with its public
modules. Signatures and types are as written; docstrings are Markdown.
"""

import ast
import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

LIBRARY = Path(__file__).parents[1] / "lib"
PACKAGES = ("timeline", "theory", "measure", "world", "parallel", "kernels", "training", "show", "few_ranks", "given", "grade")
_ARGUMENT = re.compile(r"^(\*{0,2}[A-Za-zΑ-ω_]\w*(?:, \*{0,2}\w+)*):(?= )")
_FENCE = "`" * 12
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Module:
    """A module, parsed. imported: what a name of ours in its annotations stands for, with all dots."""

    name: str
    text: str
    tree: ast.Module = field(init=False)
    imported: dict[str, str] = field(default_factory=dict)

    def __post_init__(self):
        self.tree = ast.parse(self.text)
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("manyranks"):
                self.imported |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.ClassDef) and node in self.tree.body:
                self.imported[node.name] = f"{self.name}.{node.name}"

    def written(self, node: ast.expr | None) -> str:
        """A type as it stands in the source, its names with all dots, so that Sphinx finds where they are explained."""
        if node is None:
            return ""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node = ast.parse(node.value, mode="eval").body
        return ast.unparse(_Dotted(self.imported).visit(node))

    def defines(self, name: str) -> ast.stmt | None:
        """The class, function or assignment of that name."""
        for node in self.tree.body:
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            names = {each.id for target in targets if target for each in ast.walk(target) if isinstance(each, ast.Name)}
            if getattr(node, "name", None) == name or name in names:
                return node
        return None

    def comment(self, node: ast.stmt) -> str:
        """The comment at the end of a statement's line."""
        return self.text.splitlines()[node.end_lineno - 1].encode()[node.end_col_offset :].decode().strip().removeprefix("# ")

    def source(self, node: ast.expr) -> str:
        """An expression as it stands in the source, on one line."""
        return " ".join((ast.get_source_segment(self.text, node) or "").split())


class _Dotted(ast.NodeTransformer):
    def __init__(self, imported: dict[str, str]):
        self.imported = imported

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self.imported.get(node.id, node.id))

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        is_type = isinstance(node.value, str) and node.value.isidentifier()
        return ast.Name(self.imported.get(node.value, node.value)) if is_type else node

    def visit_Subscript(self, node: ast.Subscript) -> ast.Subscript:
        return node if ast.unparse(node.value) == "Literal" else self.generic_visit(node)


def write(folder: Path) -> None:
    """One page for each package, and one that lists them."""
    folder.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        text = "\n\n".join(_page(f"manyranks.{package}"))
        (folder / f"manyranks.{package}.md").write_text(f"{text}\n", encoding="utf-8")
    (folder / "manyranks.md").write_text("\n\n".join(_top()) + "\n", encoding="utf-8")


def _top() -> Iterator[str]:
    yield "# API reference"
    yield from _opened("manyranks")
    rows = [f"| [`{each}`](manyranks.{each}.md) | {_first(f'manyranks.{each}')} |" for each in PACKAGES]
    yield "\n".join(["| | |", "|---|---|", *rows])
    names = {name: home for name, home in sorted(exported("manyranks").items()) if home != f"manyranks.{name}"}
    listed = [f"{{py:obj}}`{name} <{home}.{name}>`" for name, home in names.items() if home.split(".")[-1] in PACKAGES]
    yield f"`import manyranks as mr` has these packages, the names {', '.join(listed)}, and:"
    for name, home in names.items():
        if home.split(".")[-1] not in PACKAGES:
            yield from _entry("manyranks", module(home), name, set())
    yield "\n".join([f"{_FENCE}{{toctree}}", ":hidden:", *(f"manyranks.{package}" for package in PACKAGES), _FENCE])


def _page(package: str) -> Iterator[str]:
    yield f"# `{package.removeprefix('manyranks.')}`"
    yield from _opened(package)
    done: set[str] = set()  # a name is explained once, where it's offered first
    yield from _exports(package, done)
    for name in _modules(package):
        if parts := [*_exports(name, done), *_members(name, done)]:
            yield f"## `{name.rpartition('.')[2]}`"
            yield from _opened(name)
            yield from parts


def _modules(package: str) -> list[str]:
    """The public modules and packages inside a package: those its stub exports, or all, if it exports nothing."""
    homes = exported(package)
    found = [path.stem for path in _folder(package).iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    names = [f"{package}.{name}" for name in sorted(found) if not name.startswith("_")]
    return [name for name in names if not homes or homes.get(name.rpartition(".")[2]) == name]


def _opened(name: str) -> Iterator[str]:
    yield f"{_FENCE}{{py:module}} {name}\n{_FENCE}"
    yield _text(_docstring(module(name).tree))


def _exports(package: str, done: set[str]) -> Iterator[str]:
    """Yields the names that a package offers as its own; a module offers only the names it has."""
    for name, home in sorted(exported(package).items()):
        if home != f"{package}.{name}":  # not a module
            yield from _entry(package, module(home), name, done)


def _members(name: str, done: set[str]) -> Iterator[str]:
    for node in module(name).tree.body:
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
            yield from _entry(name, module(name), node.name, done)


@cache
def exported(package: str) -> dict[str, str]:
    """The names of a package -> the module that has each, or the module itself."""
    if not _folder(package).is_dir():
        return {}
    stub, init = _folder(package) / "__init__.pyi", _folder(package) / "__init__.py"
    homes: dict[str, str] = {}
    for node in ast.parse((stub if stub.exists() else init).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and (stub.exists() or f"{node.module}.".startswith(f"{package}.")):
            home = f"{package}.{node.module}" if node.level and node.module else node.module or package
            homes |= {alias.name: home if node.module else f"{package}.{alias.name}" for alias in node.names}
    return homes


@cache
def module(name: str) -> Module:
    """A module of the library, or a package's __init__, parsed."""
    path = _folder(name) / "__init__.py" if _folder(name).is_dir() else _folder(name).with_suffix(".py")
    return Module(name, path.read_text(encoding="utf-8"))


def _folder(name: str) -> Path:
    return LIBRARY.joinpath(*name.split("."))


def _entry(place: str, home: Module, name: str, done: set[str]) -> Iterator[str]:
    """Says here what a name is: its home is another module if a package hands on what its modules have."""
    while (node := home.defines(name)) is None and name in home.imported:
        home = module(home.imported[name].rpartition(".")[0])
    if f"{home.name}.{name}" in done:
        return
    done.add(f"{home.name}.{name}")
    options = f":canonical: {home.name}.{name}\n" if place != home.name else ""
    if isinstance(node, ast.ClassDef):
        parts = _text(_docstring(node)), *_of_class(home, node)
        yield _directive("class", f"{name}{_made_with(home, node)}", *parts, options=options, fence=_FENCE)
    elif isinstance(node, Function):
        yield _directive("function", f"{name}{_signature(home, node)}", _text(_docstring(node)), options=options)
    else:
        value = home.source(node.value) if getattr(node, "value", None) else ""
        options += f":value: {value}\n" if 0 < len(value) < 80 else ""
        yield _directive("data", name, home.comment(node) if node else "", options=options)


def _of_class(home: Module, node: ast.ClassDef) -> Iterator[str]:
    """A class's fields, as far as a comment says more than the signature, and its methods."""
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and (said := home.comment(each)) and not ast.unparse(each.target).startswith("_"):
            options = f":type: {home.written(each.annotation)}\n"
            yield _directive("attribute", ast.unparse(each.target), _text(said), options=options)
        elif isinstance(each, Function) and not each.name.startswith("_"):
            words = {ast.unparse(mark) for mark in each.decorator_list}
            if words & {"property", "cached_property", "functools.cached_property"}:
                kind, after, options = "property", "", f":type: {home.written(each.returns)}\n" if each.returns else ""
            else:
                kind, after = "method", _signature(home, each)
                options = "".join(f":{word}:\n" for word in ("classmethod", "staticmethod") if word in words)
            if not any(word.endswith((".setter", ".deleter")) for word in words):
                yield _directive(kind, f"{each.name}{after}", _text(_docstring(each)), options=options)


def _made_with(home: Module, node: ast.ClassDef) -> str:
    """Returns a class's signature: from __init__, or the fields of a dataclass or a named tuple."""
    if init := next((each for each in node.body if getattr(each, "name", "") == "__init__"), None):
        return _signature(home, init)
    bases = {ast.unparse(base) for base in node.bases}
    if "NamedTuple" not in bases and not any("dataclass" in ast.unparse(mark) for mark in node.decorator_list):
        return ""
    fields = [each for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)]
    return f"({', '.join(_field(home, each) for each in fields)})"


def _field(home: Module, node: ast.AnnAssign) -> str:
    value = node.value
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":  # of a dataclass: most say what its repr leaves out
        value = next((each.value for each in value.keywords if each.arg == "default"), None)
    return f"{node.target.id}: {home.written(node.annotation)}{f' = {home.source(value)}' if value else ''}"


def _signature(home: Module, node: Function) -> str:
    arguments = deepcopy(node.args)
    for each in (each for each in ast.walk(arguments) if isinstance(each, ast.arg) and each.annotation):
        each.annotation = ast.Name(home.written(each.annotation))
    arguments.defaults = [ast.Name(home.source(each)) for each in arguments.defaults]
    arguments.kw_defaults = [each and ast.Name(home.source(each)) for each in arguments.kw_defaults]
    first = arguments.posonlyargs or arguments.args
    if first and first[0].arg in ("self", "cls"):
        first.pop(0)
    returned = f" -> {home.written(node.returns)}" if node.returns and node.name != "__init__" else ""
    return f"({ast.unparse(arguments)}){returned}"


def _directive(kind: str, head: str, *parts: str, options: str = "", fence: str = _FENCE[:-4]) -> str:
    body = "\n\n".join(part for part in parts if part)
    return f"{fence}{{py:{kind}}} {head}\n{options}\n{body}\n{fence}"


def _docstring(node: ast.AST) -> str:
    return ast.get_docstring(node) or ""


def _first(name: str) -> str:
    return _docstring(module(name).tree).split("\n\n")[0].replace("\n", " ")


def _text(docstring: str) -> str:
    """A docstring as Markdown: a line that explains an argument begins an item, and < is no tag."""
    lines: list[str] = []
    inside = False  # an item, which goes on in lines that begin no sentence
    for line in docstring.splitlines():
        if not line.startswith("    "):  # code
            line = re.sub(r"<(?=[a-zA-Z/!])", r"\\<", line)
        if found := _ARGUMENT.match(line):
            lines += [] if inside else [""]
            line, inside = f"- `{found[1]}`:{line[found.end() :]}", True
        elif inside and line and not (line[0].isupper() or line[0] == "."):
            line = f"  {line.strip()}"
        elif inside:
            lines.append("")
            inside = False
        lines.append(line)
    return "\n".join(lines).strip()
