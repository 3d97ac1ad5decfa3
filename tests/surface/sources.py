"""Names, classes and members of a package, told from its syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property

Function = ast.FunctionDef | ast.AsyncFunctionDef
# Bases from elsewhere that bring no members of their own, or none that our code would use.
_BARE = {
    "object", "ABC", "Enum", "IntEnum", "Generic", "Protocol", "NamedTuple", "Struct",
    "Exception", "RuntimeError", "ValueError", "str", "int", "OrderedEnum",
}  # fmt: skip


@dataclass(frozen=True)
class Found:
    """A definition: a class, a function, or an annotated or assigned name; with its module."""

    module: str
    node: ast.AST

    @property
    def is_class(self) -> bool:
        return isinstance(self.node, ast.ClassDef)


class Sources:
    """The modules below one top package, from ``{"vllm/config/__init__.py": bytes}``."""

    def __init__(self, files: Mapping[str, bytes | None]):
        self._files = {path: data for path, data in files.items() if data is not None}
        self.tree = cache(self._tree)
        self.bindings = cache(self._bindings)
        self.resolve = cache(self._resolve)
        self.members = cache(self._members)

    def _tree(self, path: str) -> ast.Module:
        return ast.parse(self._files[path])

    def _path(self, module: str) -> str | None:
        stem = module.replace(".", "/")
        return next((p for p in (f"{stem}.py", f"{stem}/__init__.py") if p in self._files), None)

    def has_module(self, module: str) -> bool:
        return self._path(module) is not None

    def _bindings(self, module: str) -> dict[str, ast.AST | tuple[str, str]]:
        """Names of a module: definitions, or (module, name) of what is imported."""
        path = self._path(module)
        if path is None:
            return {}
        package = module if path.endswith("__init__.py") else module.rpartition(".")[0]
        names: dict[str, ast.AST | tuple[str, str]] = {}
        for node in _top_level(self.tree(path).body):
            if isinstance(node, ast.ClassDef | Function):
                names[node.name] = node
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    full = alias.name if alias.asname else alias.name.partition(".")[0]
                    names[alias.asname or full] = (full, "")
            elif isinstance(node, ast.ImportFrom):
                source = _absolute(package, node)
                for alias in node.names:
                    if alias.name == "*":
                        names |= {n: (source, n) for n in self.bindings(source)}
                    else:
                        names.setdefault(alias.asname or alias.name, (source, alias.name))
            elif isinstance(node, ast.AnnAssign | ast.Assign):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if isinstance(target, ast.Name):
                        names[target.id] = node
                        names |= _lazy(package, target.id, node.value)
        return names

    def _resolve(self, module: str, name: str) -> Found | None:
        """The definition behind a name of a module, through re-exports; None when there is none."""
        bound = self.bindings(module).get(name)
        if bound is None or bound == (module, name):  # a package that imports its own module
            whole = f"{module}.{name}"
            return Found(whole, ast.Module([], [])) if self.has_module(whole) else None
        if not isinstance(bound, tuple):
            return Found(module, bound)
        source, original = bound
        if not original:
            return Found(source, ast.Module([], []))
        if not self.has_module(source):
            return None if source.partition(".")[0] == "vllm" else Found(source, ast.Pass())
        return self.resolve(source, original)

    def bases(self, found: Found) -> tuple[list[Found], bool]:
        """Classes that a class inherits from, nearest first; False when one cannot be read."""
        assert isinstance(found.node, ast.ClassDef)
        known, complete = [], True
        for base in found.node.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            name = base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
            parent = self.resolve(found.module, name) if isinstance(base, ast.Name) else None
            if parent is not None and parent.is_class:
                further, whole = self.bases(parent)
                known += [parent, *further]
                complete = complete and whole
            elif name not in _BARE:
                complete = False
        return known, complete

    def _members(self, found: Found) -> tuple[dict[str, Found], bool]:
        """Members of a class and its bases by name, and whether these are all."""
        parents, complete = self.bases(found)
        members: dict[str, Found] = {}
        for one in (found, *parents):
            assert isinstance(one.node, ast.ClassDef)
            for name, node in _own_members(one.node):
                members.setdefault(name, Found(one.module, node))
        return members, complete and "__getattr__" not in members

    def abstract(self, found: Found) -> list[str]:
        """Methods that a class inherits and that nobody has written yet."""
        members, _ = self.members(found)
        return [
            name
            for name, member in members.items()
            if isinstance(member.node, Function)
            and any("abstractmethod" in ast.unparse(one) for one in member.node.decorator_list)
        ]


class Plugin(Sources):
    """Our own package over vLLM's: names resolve in both."""

    def __init__(self, own: Mapping[str, bytes], vllm: Mapping[str, bytes | None]):
        super().__init__({**vllm, **own})
        self.own = sorted(own)

    def mixed_with(self, mixin: Found) -> list[Found]:
        """The nearest class behind a class of ours: in itself, and wherever it is mixed in."""
        parents, _ = self.bases(mixin)
        found = parents[:1]
        for module, tree in self.own_modules.items():
            for node in (item for item in tree.body if isinstance(item, ast.ClassDef)):
                line, _ = self.bases(Found(module, node))
                if mixin in line:
                    found += line[line.index(mixin) + 1 :][:1]
        return found

    @cached_property
    def own_modules(self) -> dict[str, ast.Module]:
        return {
            path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): self.tree(path)
            for path in self.own
        }


def _absolute(package: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    parts = parts[: len(parts) - node.level + 1]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, through conditions: the last binding of a name counts."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from _top_level(node.orelse)
            yield from _top_level(node.body)
        elif isinstance(node, ast.Try):
            for part in (node.body, *(handler.body for handler in node.handlers), node.orelse):
                yield from _top_level(part)


def _lazy(package: str, name: str, value: ast.expr | None) -> dict[str, tuple[str, str]]:
    """vLLM's table of names that a package imports when they are asked for."""
    if name != "MODULE_ATTRS" or not isinstance(value, ast.Dict):
        return {}
    found = {}
    for key, entry in zip(value.keys, value.values, strict=True):
        if isinstance(key, ast.Constant) and isinstance(entry, ast.Constant):
            module, _, attribute = str(entry.value).partition(":")
            found[str(key.value)] = (package + module, attribute)
    return found


def _own_members(node: ast.ClassDef) -> Iterator[tuple[str, ast.AST]]:
    """Methods and annotated or assigned names first, then what methods set on ``self``."""
    for item in _top_level(node.body):
        if isinstance(item, Function):
            yield item.name, item
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            yield item.target.id, item
        elif isinstance(item, ast.Assign):
            yield from ((t.id, item) for t in item.targets if isinstance(t, ast.Name))
    for method in (item for item in node.body if isinstance(item, Function)):
        hints = {a.arg: a.annotation for a in [*method.args.args, *method.args.kwonlyargs]}
        for item in ast.walk(method):
            targets = item.targets if isinstance(item, ast.Assign) else []
            if isinstance(item, ast.AnnAssign):
                targets = [item.target]
            for target in targets:
                for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if isinstance(part, ast.Attribute) and ast.unparse(part.value) == "self":
                        yield part.attr, _with_hint(item, hints)


def _with_hint(node: ast.AST, hints: Mapping[str, ast.expr | None]) -> ast.AST:
    """``self.x = x`` has the type of the argument ``x``."""
    value = getattr(node, "value", None)
    if isinstance(node, ast.Assign) and isinstance(value, ast.Name) and hints.get(value.id):
        return ast.AnnAssign(node.targets[0], hints[value.id], value, 0)  # type: ignore[arg-type]
    return node
