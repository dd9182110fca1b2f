"""`python kube_operator.py NAMES ...`: dask-kubernetes' operator, which knows the names of services as in a cluster.

NAMES is the file of `kube_node`; the rest are the arguments of `kopf run`.
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import kopf.cli


def main() -> None:
    """Run the operator, unchanged."""
    names, real = Path(sys.argv[1]), socket.getaddrinfo

    def getaddrinfo(host: Any, *args: Any, **options: Any) -> Any:
        known = json.loads(names.read_text()) if names.exists() else {}
        return real(known.get(host, host), *args, **options)

    socket.getaddrinfo = getaddrinfo
    kopf.cli.main(["run", "--standalone", *sys.argv[2:], "-m", "dask_kubernetes.operator.controller"])


if __name__ == "__main__":
    main()
