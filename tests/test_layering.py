"""The arrow experiments -> sparsejax -> pallas_kernels -> jax, read from the imports of every file.

The rules are functions from source text to a list of complaints, so that the tests below can show
each of them failing on a bad snippet before they judge the real tree.
"""

import ast
import re
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAX_LINES = 400
TRITON = "jax.experimental.pallas.triton"
TRITON_DOOR = "pallas_kernels._triton"
# What kernels may import besides the standard library, and what each layer must not know.
KERNEL_IMPORTS = {"jax", "jaxlib", "jaxtyping", "numpy"}
FORBIDDEN = {
    "pallas_kernels": {"sparsejax", "experiments", "tests"},
    "sparsejax": {"experiments", "tests"},
    "experiments": {"tests"},
}
# Tests of the repository itself, of notebooks, and of all kernels at once, mirror no single module.
OF_NO_SINGLE_MODULE = {
    "tests/test_layering.py",
    "tests/test_docs.py",
    "tests/experiments/test_notebooks.py",
    "tests/pallas_kernels/test_gpu.py",
    "tests/pallas_kernels/test_lowering.py",
}


class Import(NamedTuple):
    """`target` is a dotted name; `eager` means that it runs when the file is imported."""

    target: str
    line: int
    eager: bool


def module_name(path: str) -> str:
    """pkg/sub/mod.py -> pkg.sub.mod, pkg/__init__.py -> pkg."""
    return path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def imports(source: str, path: str) -> list[Import]:
    """Every import of the file, wherever it stands; `from a import b` has the target a.b."""
    package = module_name(path).split(".")
    if not path.endswith("__init__.py"):
        package = package[:-1]
    found: list[Import] = []

    def visit(node: ast.AST, eager: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, node.lineno, eager) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            found.extend(
                Import(f"{origin}.{alias.name}", node.lineno, eager) for alias in node.names
            )
        elif isinstance(node, ast.Attribute) and node.attr == "triton":
            # pl.triton, after `from jax.experimental import pallas as pl`.
            if ast.unparse(node.value) in ("pl", "pallas", "jax.experimental.pallas"):
                found.append(Import(TRITON, node.lineno, eager))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("import_module", "__import__")
        ):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    found.append(Import(argument.value, node.lineno, eager))
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.iter_child_nodes(node):
            visit(child, eager and not function and not typing_only)

    visit(ast.parse(source), True)
    return found


def within(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def arrow(source: str, path: str) -> list[str]:
    """Imports against the arrow, and imports of Triton outside of its one file."""
    layer = path.split("/")[0]
    kernel_imports = KERNEL_IMPORTS | set(sys.stdlib_module_names) | {"pallas_kernels"}
    wrong = []
    for target, line, _ in imports(source, path):
        top = target.split(".")[0]
        place = f"{path}:{line} imports {target}"
        if top in FORBIDDEN.get(layer, ()):
            wrong.append(f"{place}: {layer} must not know {top}")
        elif layer == "pallas_kernels" and top not in kernel_imports:
            wrong.append(f"{place}: kernels may import only {sorted(KERNEL_IMPORTS)}")
        if within(target, TRITON) and module_name(path) != TRITON_DOOR:
            wrong.append(f"{place}: only {TRITON_DOOR} may")
        if within(target, TRITON_DOOR) and not (
            path.startswith("pallas_kernels/") and Path(path).name.startswith("pallas_triton")
        ):
            wrong.append(f"{place}: only pallas_triton*.py files of pallas_kernels may")
    return wrong


def undeclared(source: str, path: str, declared: set[str]) -> list[str]:
    """Imports at the top of a file that a plain install would not bring.

    Packages of the extras are imported inside the functions that need them.
    """
    known = declared | set(sys.stdlib_module_names) | set(FORBIDDEN)
    return [
        f"{path}:{line} imports {target}, which [project.dependencies] does not name"
        for target, line, eager in imports(source, path)
        if eager and target.split(".")[0] not in known
    ]


def declared_packages() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[^A-Za-z0-9_.-]", entry)[0] for entry in project["dependencies"]}
    renamed = {"orbax-checkpoint": "orbax", "absl-py": "absl"}
    return {renamed.get(name, name.replace("-", "_")) for name in names}


def cycles(sources: dict[str, str]) -> list[list[str]]:
    """Groups of modules that import each other in a circle when they are loaded."""
    modules = {module_name(path) for path in sources}
    edges: dict[str, set[str]] = {}
    for path, source in sources.items():
        module = module_name(path)
        targets = {target for target, _, eager in imports(source, path) if eager}
        edges[module] = {owner(target, modules) for target in targets} - {module, ""}

    def reachable(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for following in edges[waiting.pop()] - seen:
                seen.add(following)
                waiting.append(following)
        return seen

    reach = {module: reachable(module) for module in modules}
    groups = {
        tuple(sorted({other for other in reach[module] if module in reach[other]}))
        for module in modules
        if module in reach[module]
    }
    return [list(group) for group in sorted(groups)]


def owner(target: str, modules: set[str]) -> str:
    """The module that is loaded for p.a.f: p.a.f itself, else p.a, else p, else none of ours."""
    while target and target not in modules:
        target = target.rpartition(".")[0]
    return target


def too_long(source: str, path: str) -> list[str]:
    lines = len(source.splitlines())
    return [f"{path} has {lines} lines, more than {MAX_LINES}"] if lines > MAX_LINES else []


def mirrors(test_path: str, package_paths: set[str]) -> bool:
    """tests/pkg/test_mod.py or test_mod_aspect.py stands for pkg/mod.py or the folder pkg/mod."""
    *folders, name = test_path.removeprefix("tests/").split("/")
    words = name.removesuffix(".py").removeprefix("test_").split("_")
    folder = "/".join(folders)
    stems = {"_".join(words[:count]) for count in range(1, len(words) + 1)}
    return bool(folder) and any(
        candidate in package_paths
        for stem in stems
        for candidate in (f"{folder}/{stem}.py", f"{folder}/{stem}/__init__.py")
    )


def tree(*folders: str) -> dict[str, str]:
    return {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


LAYERS = tree("pallas_kernels", "sparsejax", "experiments")
TESTS = tree("tests")


def test_the_tree_was_found():
    assert {"pallas_kernels/__init__.py", "sparsejax/__init__.py"} <= set(LAYERS)
    assert "tests/test_layering.py" in TESTS


@pytest.mark.parametrize("path", LAYERS)
def test_imports_follow_the_arrow(path):
    assert arrow(LAYERS[path], path) == []


@pytest.mark.parametrize("path", LAYERS)
def test_a_plain_install_brings_what_is_imported(path):
    assert undeclared(LAYERS[path], path, declared_packages()) == []


@pytest.mark.parametrize("package", ["sparsejax", "pallas_kernels"])
def test_no_import_cycles(package):
    ours = {path: text for path, text in LAYERS.items() if path.startswith(package + "/")}
    assert cycles(ours) == []


def test_files_are_short():
    assert [line for path, text in (LAYERS | TESTS).items() for line in too_long(text, path)] == []


def test_every_test_file_mirrors_a_package_path():
    tests = {path for path in TESTS if Path(path).name.startswith("test_")} - OF_NO_SINGLE_MODULE
    strays = sorted(path for path in tests if not mirrors(path, set(LAYERS)))
    assert strays == []


# The rules themselves, each seen to fail.


@pytest.mark.parametrize(
    ("path", "snippet", "complaint"),
    [
        ("pallas_kernels/a.py", "import flax.linen as nn", "kernels may import only"),
        ("pallas_kernels/a.py", "from sparsejax import config", "must not know sparsejax"),
        ("pallas_kernels/a.py", "def f():\n    import sparsejax.params", "must not know sparsejax"),
        ("pallas_kernels/a.py", "__import__('optax')", "kernels may import only"),
        ("sparsejax/a.py", "from experiments.train import main", "must not know experiments"),
        ("sparsejax/a.py", "import importlib\nimportlib.import_module('tests.x')", "must not know"),
        ("experiments/a.py", "import tests.shared_data", "must not know tests"),
        ("sparsejax/a.py", f"import {TRITON} as plt", "only pallas_kernels._triton may"),
        (
            "pallas_kernels/gated_ffn/pallas_triton.py",
            "from jax.experimental.pallas import triton",
            "only pallas_kernels._triton may",
        ),
        (
            "pallas_kernels/dispatch.py",
            "from jax.experimental import pallas as pl\npl.triton.CompilerParams()",
            "only pallas_kernels._triton may",
        ),
        ("pallas_kernels/dispatch.py", "from . import _triton", "only pallas_triton"),
        ("pallas_kernels/gated_ffn/api.py", "from .._triton import plt", "only pallas_triton"),
        ("sparsejax/a.py", "from pallas_kernels import _triton", "only pallas_triton"),
    ],
)
def test_the_arrow_rule_catches(path, snippet, complaint):
    found = arrow(snippet, path)
    assert found
    assert complaint in found[0]


@pytest.mark.parametrize(
    ("path", "snippet"),
    [
        ("pallas_kernels/_triton.py", "from jax.experimental.pallas import triton"),
        ("pallas_kernels/gated_ffn/pallas_triton_walk.py", "from pallas_kernels import _triton"),
        ("pallas_kernels/a.py", "import functools\nimport jax.numpy as jnp\nimport numpy as np"),
        ("sparsejax/a.py", "from pallas_kernels.gated_ffn import gated_ffn\nimport flax"),
        ("experiments/a.py", "import sparsejax\nimport pallas_kernels"),
    ],
)
def test_the_arrow_rule_lets_pass(path, snippet):
    assert arrow(snippet, path) == []


def test_the_install_rule_looks_at_the_top_of_files_only():
    eager, lazy = "import pyarrow.parquet", "def read():\n    import pyarrow.parquet"
    typing = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import pyarrow"
    assert len(undeclared(eager, "sparsejax/a.py", {"jax"})) == 1
    assert undeclared(lazy, "sparsejax/a.py", {"jax"}) == []
    assert undeclared(typing, "sparsejax/a.py", {"jax"}) == []
    assert {"jax", "orbax", "optax"} <= declared_packages()
    assert "pyarrow" not in declared_packages()


def test_the_cycle_rule():
    a, b, c = "p/a.py", "p/b.py", "p/c.py"
    circle = {a: "from p import b", b: "from p.c import f", c: "import p.a", "p/__init__.py": ""}
    assert cycles(circle) == [["p.a", "p.b", "p.c"]]
    broken_up = circle | {c: "def late():\n    import p.a"}
    assert cycles(broken_up) == []
    # An __init__ that re-exports, and a module that asks the package for one of its names.
    through_init = {"p/__init__.py": "from p.a import f", a: "from p import g"}
    assert cycles(through_init) == [["p", "p.a"]]
    assert cycles({"p/__init__.py": "from p.a import f", a: "from p import b", b: ""}) == []


def test_the_length_rule():
    assert too_long("x = 1\n" * 400, "a.py") == []
    assert too_long("x = 1\n" * 401, "a.py") == ["a.py has 401 lines, more than 400"]


@pytest.mark.parametrize(
    ("test_path", "mirrored"),
    [
        ("tests/sparsejax/test_config.py", True),
        ("tests/sparsejax/test_config_json.py", True),
        ("tests/sparsejax/data/test_pipeline.py", True),
        ("tests/sparsejax/test_data.py", True),
        ("tests/sparsejax/test_pipeline.py", False),
        ("tests/sparsejax/test_conf.py", False),
        ("tests/test_config.py", False),
    ],
)
def test_the_mirror_rule(test_path, mirrored):
    package = {"sparsejax/config.py", "sparsejax/data/__init__.py", "sparsejax/data/pipeline.py"}
    assert mirrors(test_path, package) is mirrored
