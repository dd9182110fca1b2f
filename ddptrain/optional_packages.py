"""Packages of extras: whether one is installed, and the pip command if it is not."""

from __future__ import annotations

import importlib.util
import re
import shlex

from ddptrain.errors import UsageError

PACKAGE = "ddptrain"


def require(package: str, extra: str, otherwise: str) -> None:
    """Raise UsageError with the pip command if a package of an extra is not installed."""
    if importlib.util.find_spec(package) is None:
        raise UsageError(f"this needs {package}: {install_command(extra)}, or {otherwise}")


def install_command(extra: str) -> str:
    """Return the pip command that installs the packages of an extra.

    It names the packages, not the extra, because ddptrain may be installed from a checkout.
    """
    import importlib.metadata  # 20 ms, for a message

    try:
        required = importlib.metadata.requires(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:  # the package is only on the import path
        required = []
    chosen = re.compile(rf"extra\s*==\s*['\"]{re.escape(extra)}['\"]")
    split = [text.partition(";") for text in required]
    packages = [name.strip() for name, _, marker in split if chosen.search(marker)]
    return f"pip install {shlex.join(packages or [f'{PACKAGE}[{extra}]'])}"
