"""The pip command to show if a package of an extra is missing."""

from __future__ import annotations

import re
import shlex

PACKAGE = "ddptrain"


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
