"""Generates small wrong changes (mutants) of a source file: one operator, one number, one argument or one statement."""

from __future__ import annotations

import ast
import copy
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
# Where times are compared, no test can tell < from <=.
_MEASURED = re.compile(r"monotonic|perf_counter|time\(|_s\b|deadline|_at\b")
_OPPOSITES = _COMPARISONS | {ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
_FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any"}
# Calls that only print or log, or that only type checkers read.
_SILENT = re.compile(r"(print|echo|warn|warning|log|debug|info|exception|tell|say|cast|TypeVar|NewType)")
_LOGGERS = re.compile(r"_?(log|logger|logging|warnings)")
# Keywords without effect on results: texts, names of threads, hints to the copying of tensors, checks of lengths.
_SILENT_KEYWORDS = {
    "description", "help", "hint", "title", "name", "unit", "flush", "encoding", "non_blocking", "pin_memory",
    "strict", "slots", "frozen", "caption", "thread_name_prefix", "ensure_ascii", "indent",
}  # fmt: skip
_TEXT_FUNCTIONS = {"__repr__", "__str__"}
# Constants that decide how often or in which pieces something is done, and not what comes of it.
_PACES = re.compile(r"_?([A-Z]+_)?(POLL|TICK)_S|_?([A-Z]+_)*CHUNK_BYTES")


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change of `path`: the bytes from `start` to `end` become `text`. `lines` are those of the changed code."""

    path: str
    function: str  # the class and function around it; "" at the top of the module
    operator: str
    lines: tuple[int, int]
    start: int
    end: int
    text: str

    def apply(self, source: bytes) -> bytes:
        """The changed source."""
        return source[: self.start] + self.text.encode() + source[self.end :]

    def before(self, source: bytes) -> str:
        """The code that changes, in one line."""
        return " ".join(source[self.start : self.end].decode().split())

    @property
    def after(self) -> str:
        """What stands in its place, in one line."""
        return " ".join(self.text.split())


def choose(root: Path, seed: int, count: int, only: Sequence[str] = ()) -> list[Mutant]:
    """`count` mutants of the package, or of the files at or below `only`; the same ones for the same seed.

    A file has a share of them by its number of lines, so each room has one, too.
    """
    draw = random.Random(seed)
    paths = files(root, only or ["ddptrain"])
    lines = [(root / path).read_bytes().count(b"\n") for path in paths]
    shuffled: dict[str, list[Mutant]] = {}
    chosen: dict[Mutant, None] = {}
    for path in draw.choices(paths, lines, k=20 * count) if any(lines) else ():
        if path not in shuffled:
            shuffled[path] = list(changes_of(root, path))
            draw.shuffle(shuffled[path])
        mutants = shuffled[path]
        while mutants and len(chosen) < count:
            mutant = mutants.pop()
            if _compiles(mutant.apply((root / path).read_bytes())):
                chosen[mutant] = None
                break
    return list(chosen)


def files(root: Path, paths: Sequence[str]) -> list[str]:
    """The Python files at or below some paths, relative to the root."""
    found = [path for start in paths for path in [root / start, *(root / start).rglob("*.py")] if path.is_file()]
    return sorted({str(path.relative_to(root)) for path in found})


def mutants_of(root: Path, path: str) -> list[Mutant]:
    """Every mutant of a file."""
    source = (root / path).read_bytes()
    return [mutant for mutant in changes_of(root, path) if _compiles(mutant.apply(source))]


def changes_of(root: Path, path: str) -> list[Mutant]:
    """The mutants of a file, and some changes that do not compile."""
    source = (root / path).read_bytes()
    finder = _Finder(path, source)
    finder.visit(ast.parse(source))
    return finder.found


def _compiles(source: bytes) -> bool:
    try:
        compile(source, "mutant", "exec")
    except (SyntaxError, ValueError):
        return False
    return True


class _Finder(ast.NodeVisitor):
    """Collects the mutants of a file; passes over annotations, decorators, messages and code for type checkers."""

    def __init__(self, path: str, source: bytes) -> None:
        self.found: list[Mutant] = []
        self._path = path
        self._around: list[str] = []
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def visit(self, node: ast.AST) -> None:
        for operator, old, new in _mutations(node):
            self._add(operator, old, new)
        name = [node.name] if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else []
        self._around.extend(name)
        for child in _children(node):
            self.visit(child)
        del self._around[len(self._around) - len(name) :]

    def _add(self, operator: str, node: ast.expr | ast.stmt, changed: ast.AST) -> None:
        text = ast.unparse(changed)
        if isinstance(node, ast.expr) and not isinstance(changed, ast.Constant | ast.Name | ast.Call):
            text = f"({text})"
        lines = (node.lineno, node.end_lineno or node.lineno)
        start, end = self._offset(node.lineno, node.col_offset), self._offset(lines[1], node.end_col_offset or 0)
        self.found.append(Mutant(self._path, ".".join(self._around), operator, lines, start, end, text))

    def _offset(self, line: int, column: int) -> int:
        return self._starts[line - 1] + column


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a node that may be mutated."""
    if _is_silent(node):
        return
    for name, value in ast.iter_fields(node):
        if name in {"annotation", "returns", "decorator_list", "bases", "type_params"}:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child


def _is_silent(node: ast.AST) -> bool:
    match node:
        case ast.Import() | ast.ImportFrom() | ast.JoinedStr() | ast.Assert() | ast.Raise():
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.ClassDef(bases=bases):
            return any(isinstance(base, ast.Name) and base.id == "Protocol" for base in bases)
        case ast.FunctionDef(name=name):
            return name in _TEXT_FUNCTIONS
        case ast.keyword(arg=name):
            return name in _SILENT_KEYWORDS
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.Assign(targets=[ast.Name(id=name)]):
            return _PACES.fullmatch(name) is not None
        case ast.Call():
            return _only_tells(node)
    return False


def _only_tells(call: ast.Call) -> bool:
    """Whether a call only prints, logs or informs type checkers."""
    match call.func:
        case ast.Name(id=name):
            return _SILENT.fullmatch(name.strip("_")) is not None
        case ast.Attribute(value=ast.Name(id=owner), attr=name):
            return _LOGGERS.fullmatch(owner) is not None or name in {"_tell", "_say", "warning"}
    return False


Change = tuple[str, ast.expr | ast.stmt, ast.AST]  # operator, node, what stands in its place


def _mutations(node: ast.AST) -> Iterator[Change]:
    """Each way to change a node."""
    if _is_silent(node) and not isinstance(node, ast.Raise):
        return
    if isinstance(node, ast.IfExp | ast.If | ast.While):
        yield "condition", node.test, _negated(node.test)
    elif isinstance(node, ast.stmt):
        yield from ((operator, node, new) for operator, new in _statements(node))
    elif isinstance(node, ast.expr):
        yield from ((operator, node, new) for operator, new in _expressions(node))


def _expressions(node: ast.expr) -> Iterator[tuple[str, ast.AST]]:
    match node:
        case ast.Compare(ops=[first, *others]):
            known = _OPPOSITES if _MEASURED.search(ast.unparse(node)) else _COMPARISONS
            yield "comparison", _changed(node, ops=[known[type(first)](), *others])
        case ast.BoolOp(op=op):
            yield "and/or", _changed(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "not", operand
        case ast.BinOp(op=op, left=left, right=right):
            if type(op) in _ARITHMETIC and not (_is_text(left) or _is_text(right)):
                yield "arithmetic", _changed(node, op=_ARITHMETIC[type(op)]())
        case ast.Constant(value=value):
            yield from ((operator, ast.Constant(new)) for operator, new in _constants(value))
        case ast.Call():
            yield from _calls(node)


def _constants(value: object) -> Iterator[tuple[str, bool | int | float]]:
    if isinstance(value, bool):
        yield "constant", not value
    elif isinstance(value, int):
        yield "boundary", value + 1
        if value > 0:
            yield "boundary", value - 1
    elif isinstance(value, float):
        yield "constant", 2 * value or 1.0


def _calls(node: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    if name in _FUNCTIONS:
        yield "function", _changed(node, func=ast.Name(_FUNCTIONS[name]))
    if len(node.args) >= 2 and not any(isinstance(argument, ast.Starred) for argument in node.args[:2]):
        first, second, *others = node.args
        if ast.dump(first) != ast.dump(second) and name not in {"isinstance", "issubclass", "getattr", *_FUNCTIONS}:
            yield "swapped arguments", _changed(node, args=[second, first, *others])
    for number, keyword in enumerate(node.keywords):
        if keyword.arg is not None and keyword.arg not in _SILENT_KEYWORDS:
            yield "removed keyword", _changed(node, keywords=node.keywords[:number] + node.keywords[number + 1 :])


def _statements(node: ast.stmt) -> Iterator[tuple[str, ast.AST]]:
    match node:
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield "return value", ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Call() as call) if not _only_tells(call):
            yield "removed statement", ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.AugAssign() | ast.Delete():
            yield "removed statement", ast.Pass()
        case ast.Raise() | ast.Break() | ast.Continue():
            yield "removed statement", ast.Pass()


def _changed(node: ast.AST, **fields: object) -> ast.AST:
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return ast.fix_missing_locations(new)


def _negated(test: ast.expr) -> ast.expr:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return test.operand
    return ast.UnaryOp(ast.Not(), test)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
