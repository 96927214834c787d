"""Imports point down only (design.md, "Layers"): read from the source, and tried where the layers above are missing."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ray_diloco

PACKAGE = Path(__file__).resolve().parents[1] / "ray_diloco"
SERVICES = ("config", "data", "checkpoint", "observe", "provenance")
DOORS = ("cli", "api", "advice", "tuning")

# What a layer may know: parts of this package, and packages beside the standard library.
INSIDE = {
    "outer": {"outer", "errors"},
    "rounds": {"rounds", "outer", "errors"},
    "inner": {"inner", "outer", "errors", "config", "data"},
    "planning": {"planning", "inner", "outer", "rounds", "errors", "blocks", "rules"} | set(SERVICES),
    "doctor": {"doctor", "planning", "inner", "outer", "errors", "blocks", "rules"} | set(SERVICES),
    "simulate": {"simulate", "rounds", "outer", "errors", "config", "observe", "blocks", "rules"},
}
OUTSIDE = {"outer": {"torch", "numpy", "xxhash", "numba"}, "rounds": set()}
# Files, clocks and processes: the mathematics and the protocol get them through their callers.
WORLD = {"os", "pathlib", "shutil", "tempfile", "subprocess", "socket", "time", "datetime", "threading"}


def modules_of(layer: str) -> list[Path]:
    return sorted((PACKAGE / layer).rglob("*.py"))


def imports_of(path: Path) -> Iterator[str]:
    """Full names of the modules that a file imports, anywhere in it; a relative import keeps its dots."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            # `from ray_diloco import cli` imports a module, `from ray_diloco.errors import DilocoError` a name of one.
            yield from (f"{base}.{alias.name}" for alias in node.names) if base == PACKAGE.name else (base,)


def inside_of(path: Path) -> set[str]:
    """Parts of this package that a file imports: `outer`, `errors`, …."""
    return {name.split(".")[1] for name in imports_of(path) if name.startswith(f"{PACKAGE.name}.")}


def outside_of(path: Path) -> set[str]:
    """Other packages that a file imports, the standard library excluded."""
    tops = {name.split(".")[0] for name in imports_of(path)}
    return tops - {PACKAGE.name} - sys.stdlib_module_names


@pytest.mark.parametrize("layer", INSIDE)
def test_a_layer_imports_only_the_parts_of_the_package_below_it(layer: str) -> None:
    above = {str(p.relative_to(PACKAGE)): inside_of(p) - INSIDE[layer] for p in modules_of(layer)}
    assert {path: names for path, names in above.items() if names} == {}


@pytest.mark.parametrize("layer", OUTSIDE)
def test_the_mathematics_and_the_protocol_need_almost_no_other_package(layer: str) -> None:
    foreign = {str(p.relative_to(PACKAGE)): outside_of(p) - OUTSIDE[layer] for p in modules_of(layer)}
    assert {path: names for path, names in foreign.items() if names} == {}


@pytest.mark.parametrize("layer", ["outer", "rounds"])
def test_the_mathematics_and_the_protocol_know_no_files_clocks_or_processes(layer: str) -> None:
    known = {str(p.relative_to(PACKAGE)): {n.split(".")[0] for n in imports_of(p)} & WORLD for p in modules_of(layer)}
    assert {path: names for path, names in known.items() if names} == {}


@pytest.mark.parametrize("layer", ["outer", "rounds", "inner", "simulate", "planning", "doctor", *SERVICES])
def test_nothing_below_the_cluster_imports_ray(layer: str) -> None:
    assert [str(p.relative_to(PACKAGE)) for p in modules_of(layer) if "ray" in outside_of(p)] == []


@pytest.mark.parametrize("layer", SERVICES)
def test_a_service_knows_neither_training_nor_the_protocol_nor_the_cluster(layer: str) -> None:
    too_high = {"inner", "rounds", "cluster", "simulate", "evaluation", "export", "generation", "sweep", *DOORS}
    known = {str(p.relative_to(PACKAGE)): inside_of(p) & too_high for p in modules_of(layer)}
    assert {path: names for path, names in known.items() if names} == {}


def test_nobody_imports_the_doors_but_the_doors() -> None:
    rooms = [p for p in PACKAGE.rglob("*.py") if p.parent != PACKAGE]
    assert [str(p.relative_to(PACKAGE)) for p in rooms if inside_of(p) & set(DOORS)] == []


def test_imports_are_absolute_so_that_these_tests_can_read_them() -> None:
    assert [str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py") if any(n[0] == "." for n in imports_of(p))] == []


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_mathematics_and_the_protocol_import_where_ray_deepspeed_and_transformers_are_missing() -> None:
    names = [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        for layer in ("outer", "rounds")
        for path in modules_of(layer)
    ]
    run_python(f"""
import importlib, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {{"ray", "deepspeed", "transformers", "datasets", "omegaconf", "wandb"}}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
for name in {names!r}:
    importlib.import_module(name)
""")


def test_importing_the_package_costs_neither_torch_nor_ray() -> None:
    loaded = run_python("import sys, ray_diloco; print(*sys.modules)").split()
    assert {"torch", "ray", "numpy", "deepspeed", "transformers"}.isdisjoint(loaded)


def test_a_driver_starts_without_torch() -> None:
    loaded = run_python("import sys, ray_diloco.cluster.driver; print(*sys.modules)").split()
    assert {"torch", "deepspeed", "transformers"}.isdisjoint(loaded)


def test_errors_that_processes_send_one_another_cost_no_torch() -> None:
    # An actor's error is loaded where its answer is received; whatever its module imports holds up all answers there.
    for layer in ("data", "inner", "outer"):
        for path in modules_of(layer):
            classes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]
            bases = {ast.unparse(base) for node in classes for base in node.bases}
            assert not [base for base in bases if base.endswith("Error")], path
    assert "torch" not in run_python("import sys, ray_diloco.errors; print(*sys.modules)").split()


def test_no_module_takes_the_name_of_a_function_of_the_package() -> None:
    # `import ray_diloco.x` sets the attribute `x` of the package, and would hide a function of that name from then on.
    assert {path.stem for path in PACKAGE.iterdir()} & set(ray_diloco.__all__) == set()
