"""A function in a comparison: a lambda or `partial` that calls another reads as name and options.

``lambda p: torch.optim.SGD(p, lr=0.1, momentum=m), where m=0.9`` is ``SGD(lr=0.1, momentum=0.9)``. The learning rate of
an optimizer is apart, since most comparisons vary it. Names have their values where these are known: by the defaults of
parameters, or after the source.
"""

from __future__ import annotations

import ast
import dataclasses

_NUM_POSITIONAL = 2  # the parameters, and the learning rate, as torch's optimizers have them
_WHERE = ", where "  # as in training/settings.py


@dataclasses.dataclass(frozen=True)
class OptimizerText:
    """An optimizer as text without its learning rate, and the rate as it was typed; an empty one is unknown."""

    name: str
    rate: str = ""


@dataclasses.dataclass(frozen=True)
class _Source:
    """A function's source, and the values of names in it."""

    node: ast.expr
    values: dict[str, ast.expr]


def read_optimizer(text: str) -> OptimizerText:
    """Return the optimizer that a lambda's source or a `partial` makes. Other texts stay as they are."""
    source = _parse(text)
    call = None if source is None else _find_call(source.node)
    if source is None or call is None or not isinstance(call.func, ast.Name | ast.Attribute):
        return OptimizerText(text)
    options = _read_options(call, source.values)
    if len(call.args) == _NUM_POSITIONAL:
        options["lr"] = _format(call.args[1], source.values)
    rate = options.pop("lr", "")
    return OptimizerText(_format_call(call.func, [], options), rate)


def read_function(text: str) -> str:
    """Return what a lambda's source calls, with its options but without the lambda's own parameters, or its body."""
    source = _parse(text)
    if source is None or not isinstance(source.node, ast.Lambda):
        return text
    body, arguments = source.node.body, source.node.args
    own = {each.arg for each in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]} - {*source.values}
    if not isinstance(body, ast.Call) or not isinstance(body.func, ast.Name | ast.Attribute):
        return _format(body, source.values)
    if isinstance(body.func, ast.Attribute) and any(_is_own(node, own) for node in ast.walk(body.func)):
        return _format(body, source.values)  # a method of what the lambda gets
    if any(keyword.arg is None for keyword in body.keywords):
        return _format(body, source.values)
    others = [_format(each, source.values) for each in body.args if not _is_own(each, own)]
    return _format_call(body.func, others, _read_options(body, source.values))


def _is_own(node: ast.AST, names: set[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def _parse(text: str) -> _Source | None:
    """Return the source in a text; None for a function's name with other signs, or a source that was cut."""
    source, _, where = text.partition(_WHERE)
    try:
        node = ast.parse(source, mode="eval").body
        named = ast.parse(f"dict({where})", mode="eval").body
    except (SyntaxError, ValueError):
        return None
    values = _read_defaults(node.args) if isinstance(node, ast.Lambda) else {}
    keywords = named.keywords if isinstance(named, ast.Call) else []
    return _Source(node, values | {str(each.arg): each.value for each in keywords})


def _find_call(node: ast.expr) -> ast.Call | None:
    """Return the call that makes the optimizer, where all its arguments can be named; None otherwise."""
    if isinstance(node, ast.Lambda) and isinstance(node.body, ast.Call) and _takes_parameters(node.body, node.args):
        call = node.body
    elif isinstance(node, ast.Call) and ast.unparse(node.func) == "partial" and len(node.args) == 1:
        call = ast.Call(node.args[0], [], node.keywords)
    else:
        return None
    return call if all(keyword.arg is not None for keyword in call.keywords) else None


def _takes_parameters(call: ast.Call, arguments: ast.arguments) -> bool:
    """Return whether the call's first argument is the lambda's first, or its parameters: no groups of them."""
    first = [*arguments.posonlyargs, *arguments.args][:1]
    if not first or not 1 <= len(call.args) <= _NUM_POSITIONAL:
        return False
    return ast.unparse(call.args[0]) in (first[0].arg, f"{first[0].arg}.parameters()")


def _read_defaults(arguments: ast.arguments) -> dict[str, ast.expr]:
    positional = [*arguments.posonlyargs, *arguments.args]
    values = dict(zip([each.arg for each in reversed(positional)], reversed(arguments.defaults), strict=False))
    keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return values | {each.arg: value for each, value in keywords if value is not None}


def _read_options(call: ast.Call, values: dict[str, ast.expr]) -> dict[str, str]:
    return {str(keyword.arg): _format(keyword.value, values) for keyword in call.keywords}


def _format_call(function: ast.Name | ast.Attribute, others: list[str], options: dict[str, str]) -> str:
    name = function.id if isinstance(function, ast.Name) else function.attr
    listed = ", ".join([*others, *(f"{option}={value}" for option, value in options.items())])
    return f"{name}({listed})" if listed else name


class _Replacement(ast.NodeTransformer):
    """Put values in place of names."""

    def __init__(self, values: dict[str, ast.expr]) -> None:
        self._values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._values.get(node.id, node)


def _format(node: ast.expr, values: dict[str, ast.expr]) -> str:
    """Return an expression as text, with values in place of their names."""
    return ast.unparse(_Replacement(values).visit(node))
