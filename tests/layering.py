"""Reads sources without running them and tells where they break the layout of the house (docs/design.md).

::

    __main__, optimizer -> exchange -> policies -> stages -> ops -> csrc
            |                 |                      |
            +---> comm/<x>    +--> comm/communicator <+   (the protocol only)
        prediction: what a policy would take; importable by policies and all above them
    leaves, importable by all: errors, plan, slicing, metrics, compiled, counter_rng, devices, drawing, validation,
    readers, guard, row_sets, memory, pages, rank_words, bitmap, threads
"""

import ast
from collections.abc import Iterator

__all__ = ["broken_imports", "broken_style", "layer_of"]

LEAVES = {
    "errors",
    "plan",
    "slicing",
    "metrics",
    "compiled",
    "counter_rng",
    "devices",
    "drawing",
    "validation",
    "readers",
    "guard",
} | {
    "row_sets",
    "memory",
    "pages",
    "rank_words",
    "bitmap",
    "threads",
}
STAGES = {"residual", "importance", "selection", "agreement", "packing", "wire", "reduction"} | {
    "local_steps",
    "schedule",
    "sampling",
    "routing",
    "sharding",
}
PROTOCOL = "ringprune.comm.communicator"
# What a layer may import of the package, by layer; a layer that is not named here may import everything.
ALLOWED = {
    "leaf": {"leaf", "protocol"},
    "protocol": {"leaf"},
    "comm": {"leaf", "protocol", "comm"},
    "ops": {"leaf", "ops"},
    "stage": {"leaf", "protocol", "ops"},
    "policy": {"leaf", "protocol", "stage", "policy", "prediction"},
    "prediction": {"leaf", "protocol", "stage", "policy", "prediction"},
    "exchange": {"leaf", "protocol", "ops", "stage", "policy", "prediction", "exchange"},
}
# Each of these is imported in one file.
GATES = {
    "horovod": "ringprune.comm.horovod",
    "mpi4py": "ringprune.comm.mpi",
    "numba": "ringprune.compiled",
    "torch.distributed": "ringprune.comm.torch_distributed",
}
MAX_LINES = 400


def layer_of(module: str) -> str:
    """The layer of a module of the package; ``top`` for those above the exchange."""
    if module == PROTOCOL:
        return "protocol"
    first = [*module.split("."), ""][1]
    folders = {name: name for name in ("comm", "ops", "prediction", "exchange")} | {"policies": "policy"}
    names = dict.fromkeys(LEAVES, "leaf") | dict.fromkeys(STAGES, "stage") | folders
    return names.get(first, "top")


def broken_imports(module: str, source: str, modules: set[str]) -> list[str]:
    """Imports of ``module`` that the layout forbids.

    Args:
        module: its dotted name, for example ``ringprune.packing``.
        source: its text.
        modules: names of all modules of the package, to tell a module from a name in one.
    """
    found = set()
    for target in _imports(module, source, modules):
        gate = next((gate for package, gate in GATES.items() if f"{target}.".startswith(f"{package}.")), module)
        if gate != module:
            found.add(f"{module} imports {target}: only {gate} may")
        elif target.startswith("ringprune.") and target != module and not _allowed(module, target):
            found.add(f"{module} ({layer_of(module)}) imports {target} ({layer_of(target)})")
    return sorted(found)


def broken_style(path: str, source: str) -> list[str]:
    """What every file keeps: its length, a docstring, and an annotation for each argument."""
    tree = ast.parse(source)
    found = [] if ast.get_docstring(tree) else [f"{path} has no docstring"]
    lines = len(source.splitlines())
    found += [f"{path} has {lines} lines, more than {MAX_LINES}"] if lines > MAX_LINES else []
    methods = {id(item) for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for item in node.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            bare = ", ".join(argument.arg for argument in _unannotated(node, id(node) in methods))
            found += [f"{path}:{node.lineno} {node.name}: not annotated: {bare}"] if bare else []
    return found


def _allowed(module: str, target: str) -> bool:
    own, other = layer_of(module), layer_of(target)
    if own == "stage" and other == "stage":
        return module.split(".")[1] == target.split(".")[1]  # a stage of several files
    return own not in ALLOWED or other in ALLOWED[own]


def _imports(module: str, source: str, modules: set[str]) -> Iterator[str]:
    """Dotted names of all that ``module`` imports, wherever in the file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = _origin(module, node, modules)
            for alias in node.names:
                name = f"{origin}.{alias.name}"
                yield name if name in modules or name in GATES else origin


def _origin(module: str, node: ast.ImportFrom, modules: set[str]) -> str:
    """The module after ``from``, with leading dots resolved."""
    is_package = any(name.startswith(f"{module}.") for name in modules)
    parts = module.split(".")[: None if is_package else -1]
    parents = parts[: len(parts) - node.level + 1] if node.level else []
    return ".".join([*parents, *([node.module] if node.module else [])])


def _unannotated(node: ast.FunctionDef | ast.AsyncFunctionDef, is_method: bool) -> list[ast.arg]:
    arguments = [*node.args.posonlyargs, *node.args.args]
    static = any(isinstance(item, ast.Name) and item.id == "staticmethod" for item in node.decorator_list)
    named = arguments[1:] if is_method and not static else arguments
    rest = [argument for argument in (node.args.vararg, node.args.kwarg) if argument]
    return [argument for argument in [*named, *node.args.kwonlyargs, *rest] if argument.annotation is None]
