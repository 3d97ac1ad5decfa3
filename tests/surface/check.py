"""The rules: every import, override, abstract method, attribute and keyword must exist."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from surface.sources import Found, Function, Plugin, _absolute

Scope = dict[str, Found | None]


@dataclass
class Report:
    """Findings, one line each, and how much was looked at."""

    findings: list[str] = field(default_factory=list)
    imports: int = 0
    overrides: int = 0
    attributes: int = 0
    keywords: int = 0

    def counts(self) -> str:
        return (
            f"{self.imports} imports, {self.overrides} overrides, {self.attributes} attributes, "
            f"{self.keywords} keyword arguments"
        )


def check(plugin: Plugin) -> Report:
    """Look at every module of the plugin."""
    report = Report()
    for module, tree in plugin.own_modules.items():
        _check_imports(plugin, module, tree, report)
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                _check_class(plugin, Found(module, node), report)
        _Uses(plugin, module, report).visit(tree)
    return report


def _check_imports(plugin: Plugin, module: str, tree: ast.Module, report: Report) -> None:
    def missing(nodes: list[ast.ImportFrom]) -> list[str]:
        return [
            f"{module}: {node.module} has no {alias.name}"
            for node in nodes
            for alias in node.names
            if plugin.resolve(_absolute("", node), alias.name) is None
        ]

    ways: list[list[list[ast.ImportFrom]]] = [
        [_imports(node.body), *(_imports(each.body) for each in handlers)]
        for node in ast.walk(tree)
        if isinstance(node, ast.Try) and (handlers := _import_errors(node))
    ]
    tried = {node for way in ways for nodes in way for node in nodes}
    plain = [node for node in _imports(list(ast.walk(tree))) if node not in tried]
    report.imports += sum(len(node.names) for node in [*plain, *tried])
    report.findings += missing(plain)
    for way in ways:
        # One of them must be there in full; where none is, the last is what would be raised.
        if all(missing(nodes) for nodes in way):
            report.findings += missing(way[-1])


def _imports(nodes: Iterable[ast.AST]) -> list[ast.ImportFrom]:
    return [
        node
        for node in nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm")
    ]


def _import_errors(node: ast.Try) -> list[ast.ExceptHandler]:
    return [
        handler
        for handler in node.handlers
        if handler.type is not None and ast.unparse(handler.type) == "ImportError"
    ]


def _check_class(plugin: Plugin, found: Found, report: Report) -> None:
    """Methods against those of vLLM that they stand before, in the order of inheritance."""
    parents, _ = plugin.bases(found)
    if not any(_is_vllm(parent) for parent in parents):
        return
    assert isinstance(found.node, ast.ClassDef)
    line = [found, *parents]
    for index, one in enumerate(line):
        if _is_vllm(one):
            continue
        assert isinstance(one.node, ast.ClassDef)
        for method in (item for item in one.node.body if isinstance(item, Function)):
            theirs = next(
                (
                    member
                    for later in line[index + 1 :]
                    if _is_vllm(later) and (member := plugin.members(later)[0].get(method.name))
                ),
                None,
            )
            if theirs is None or not isinstance(theirs.node, Function):
                continue
            report.overrides += 1
            if method.name != "__init__":
                report.findings += [
                    f"{one.module}: {one.node.name}.{method.name} {problem}"
                    for problem in _differences(method, theirs.node)
                ]
    for name in plugin.abstract(found):
        report.findings.append(f"{found.module}: {found.node.name} has to write {name}")


def _differences(ours: Function, theirs: Function) -> Iterator[str]:
    """Whether what calls theirs can call ours."""
    own = [argument.arg for argument in [*ours.args.posonlyargs, *ours.args.args]]
    their = [argument.arg for argument in [*theirs.args.posonlyargs, *theirs.args.args]]
    if not ours.args.vararg:
        for place, name in enumerate(their):
            if place >= len(own) or own[place].lstrip("_") != name.lstrip("_"):
                yield f"does not take {name}"
        needed = own[len(their) : len(own) - len(ours.args.defaults)]
        yield from (f"needs {name}, which vLLM does not give" for name in needed)
    if not ours.args.kwarg:
        names = {argument.arg for argument in ours.args.kwonlyargs} | set(own)
        for argument in theirs.args.kwonlyargs:
            if argument.arg not in names:
                yield f"does not take {argument.arg}"


def _is_vllm(found: Found) -> bool:
    return found.module.partition(".")[0] == "vllm"


class _Uses(ast.NodeVisitor):
    """Follows attributes and calls from names whose class the annotations say."""

    def __init__(self, plugin: Plugin, module: str, report: Report):
        self._plugin = plugin
        self._module = module
        self._report = report
        self._scope: Scope = {}
        self._self: Found | None = None

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        before, self._self = self._self, Found(self._module, node)
        self.generic_visit(node)
        self._self = before

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        before = dict(self._scope)
        for argument in [*node.args.args, *node.args.kwonlyargs]:
            self._scope[argument.arg] = self._annotated(self._module, argument.annotation)
        if self._self is not None and node.args.args:
            self._scope[node.args.args[0].arg] = self._self
        self.generic_visit(node)
        self._scope = before

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            found = self._plugin.resolve(_absolute("", node), alias.name)
            self._scope[alias.asname or alias.name] = found

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            if isinstance(target, ast.Name):
                self._scope[target.id] = self._instance(node.value)
            elif isinstance(target, ast.Tuple):
                values = node.value.elts if isinstance(node.value, ast.Tuple) else []
                for index, part in enumerate(target.elts):
                    if isinstance(part, ast.Name):
                        value = values[index] if index < len(values) else None
                        self._scope[part.id] = self._instance(value) if value else None

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        if isinstance(node.target, ast.Name):
            self._scope[node.target.id] = self._annotated(self._module, node.annotation)

    def visit_Assert(self, node: ast.Assert) -> None:
        """``assert isinstance(x, C)`` says what x is from here on."""
        self.generic_visit(node)
        self._narrow(node.test)

    def visit_If(self, node: ast.If) -> None:
        """So does ``if not isinstance(x, C): raise``."""
        self.generic_visit(node)
        test = node.test
        if isinstance(test, ast.UnaryOp) and isinstance(node.body[-1], ast.Raise | ast.Return):
            self._narrow(test.operand)

    def _narrow(self, test: ast.expr) -> None:
        if isinstance(test, ast.Call) and ast.unparse(test.func) == "isinstance":
            name, kind = test.args
            if isinstance(name, ast.Name):
                self._scope[name.id] = self._annotated(self._module, kind)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        if ast.unparse(node.value) == "super()":
            self._check_super(node)
            return
        owner = self._instance(node.value)
        if owner is None or not owner.is_class:
            return
        members, complete = self._plugin.members(owner)
        if not (_is_vllm(owner) or self._inherits_vllm(owner)):
            return
        self._report.attributes += 1
        if complete and node.attr not in members and not node.attr.startswith("__"):
            assert isinstance(owner.node, ast.ClassDef)
            self._report.findings.append(
                f"{self._module}:{node.lineno}: {owner.node.name} has no {node.attr}"
            )

    def _check_super(self, node: ast.Attribute) -> None:
        """What a mixin calls next must exist in every vLLM class that it is mixed with."""
        assert self._self is not None
        for parent in self._plugin.mixed_with(self._self):
            if _is_vllm(parent):
                self._report.attributes += 1
                members, complete = self._plugin.members(parent)
                if complete and node.attr not in members:
                    assert isinstance(parent.node, ast.ClassDef)
                    self._report.findings.append(
                        f"{self._module}:{node.lineno}: {parent.node.name} has no {node.attr}"
                    )

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        called = self._definition(node.func)
        if called is None or not _is_vllm(called):
            return
        accepted = self._accepted(called)
        if accepted is None:
            return
        for keyword in node.keywords:
            if keyword.arg is not None:
                self._report.keywords += 1
                if keyword.arg not in accepted:
                    self._report.findings.append(
                        f"{self._module}:{node.lineno}: {ast.unparse(node.func)} takes no "
                        f"{keyword.arg}"
                    )

    def _inherits_vllm(self, owner: Found) -> bool:
        return any(_is_vllm(parent) for parent in self._plugin.bases(owner)[0])

    def _accepted(self, called: Found) -> set[str] | None:
        """Names that a call may use; None where anything goes or nothing is known."""
        node = called.node
        if isinstance(node, ast.ClassDef):
            members, complete = self._plugin.members(called)
            maker = members.get("__init__")
            if maker is None:
                fields = {n for n, m in members.items() if isinstance(m.node, ast.AnnAssign)}
                return fields if complete else None
            node = maker.node
        if not isinstance(node, Function) or node.args.kwarg:
            return None
        return {a.arg for a in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]}

    def _definition(self, node: ast.expr) -> Found | None:
        """The class, function or method that an expression names."""
        if isinstance(node, ast.Name):
            found = self._scope.get(node.id)
            return found or self._plugin.resolve(self._module, node.id)
        if isinstance(node, ast.Attribute):
            if ast.unparse(node.value) == "super()" and self._self is not None:
                for parent in self._plugin.bases(self._self)[0]:
                    if member := self._plugin.members(parent)[0].get(node.attr):
                        return member
                return None
            owner = self._instance(node.value)
            if owner is not None and owner.is_class:
                return self._plugin.members(owner)[0].get(node.attr)
        return None

    def _instance(self, node: ast.expr) -> Found | None:
        """The class whose instance an expression gives, where annotations say so."""
        if isinstance(node, ast.Call):
            called = self._definition(node.func)
            if called is None or called.is_class:
                return called
            return self._annotated(called.module, getattr(called.node, "returns", None))
        found = self._definition(node)
        if isinstance(node, ast.Name) and node.id in self._scope:
            return found  # a parameter or local name: its class is what the scope holds
        if found is None or found.is_class:
            return found
        if isinstance(found.node, Function):
            is_property = any("property" in ast.unparse(d) for d in found.node.decorator_list)
            return self._annotated(found.module, found.node.returns) if is_property else None
        return self._annotated(found.module, getattr(found.node, "annotation", None))

    def _annotated(self, module: str, annotation: ast.expr | None) -> Found | None:
        """The one class that an annotation names."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        if isinstance(annotation, ast.BinOp):
            sides = [
                side
                for side in (annotation.left, annotation.right)
                if ast.unparse(side) not in ("None", "'None'")
            ]
            return self._annotated(module, sides[0]) if len(sides) == 1 else None
        if not isinstance(annotation, ast.Name):
            return None
        found = self._plugin.resolve(module, annotation.id)
        return found if found is not None and found.is_class else None
