"""Checks, where only the wheel is installed, that nothing of the packages is missing from it."""

import importlib
import importlib.metadata
import pkgutil
import sys
from pathlib import Path

PACKAGES = ("sparsejax", "pallas_kernels")


def main(repository: Path) -> None:
    """Exits with a message where a file of the repository or an import is missing."""
    files = importlib.metadata.files("sparsejax") or []
    installed = {file.as_posix() for file in files}
    wanted = {
        path.relative_to(repository).as_posix()
        for package in PACKAGES
        for path in (repository / package).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    if missing := sorted(wanted - installed):
        sys.exit(f"not in the wheel: {missing}")
    strays = {file.split("/")[0] for file in installed} - set(PACKAGES)
    if strays := sorted(name for name in strays if not name.endswith(".dist-info")):
        sys.exit(f"in the wheel but of neither package: {strays}")
    count = 0
    for package in map(importlib.import_module, PACKAGES):
        if not Path(str(package.__file__)).is_relative_to(sys.prefix):
            sys.exit(f"{package.__name__} was imported from {package.__file__}, not from the wheel")
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            importlib.import_module(module.name)
            count += 1
    print(f"{len(wanted)} files in the wheel, {count} modules imported from {sys.prefix}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
