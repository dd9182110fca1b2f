"""Calls to the Kubernetes API, with a time limit and readable errors.

kr8s, the client library of dask-kubernetes, provides the authentication: kubeconfigs, service accounts, credential
plugins. Its object classes, and so the methods of KubeCluster, are not used: they support only the current context,
wait for ever for a pod whose image can't be pulled, and have no time limit for a server that does not answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddptrain.errors import ClusterError, DdptrainError, UsageError
from ddptrain.optional_packages import install_command

if TYPE_CHECKING:
    import httpx
    from kr8s._auth import KubeAuth

DASK = "apis/kubernetes.dask.org/v1"
APPS = "apis/apps/v1"
CORE = "api/v1"
INSTALL_OPERATOR = (
    "helm install --repo https://helm.dask.org --create-namespace -n dask-operator --generate-name "
    "dask-kubernetes-operator"
)
_CALL_S = 15.0
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_MERGE_PATCH = {"Content-Type": "application/merge-patch+json"}


class Kubernetes:
    """A connection to one namespace of an API server."""

    def __init__(self, session: httpx.AsyncClient, namespace: str, auth: KubeAuth) -> None:
        self.session = session
        self.namespace = namespace
        self._auth = auth

    @property
    def context(self) -> str:
        """The kubeconfig's context that is used; "" in a pod that uses its service account."""
        return self._auth.active_context

    def url(self, group: str, path: str) -> str:
        """Return the address of an object, below the server's."""
        return f"/{group}/namespaces/{self.namespace}/{path}"

    @property
    def extensions(self) -> dict[str, str]:
        """Request options for a server whose certificate has another name (tls-server-name in the kubeconfig)."""
        return {"sni_hostname": self._auth.tls_server_name} if self._auth.tls_server_name else {}

    async def get(self, group: str, path: str, **query: str) -> dict[str, Any] | None:
        """Return the object, or None if it does not exist. Raises ClusterError."""
        try:
            return await self._call("GET", group, path, params=query)
        except _NoSuchObject:
            return None

    async def items(self, group: str, plural: str, labels: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return the objects with these labels. Raises ClusterError."""
        selector = ",".join(f"{key}={value}" for key, value in labels.items())
        found = await self._call("GET", group, plural, params={"labelSelector": selector})
        return list(found["items"])

    async def create(self, group: str, plural: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Create an object; returns it as the server has stored it. Raises ClusterError."""
        return await self._call("POST", group, plural, json=body)

    async def patch(self, group: str, path: str, change: Mapping[str, Any]) -> None:
        """Merge a change into an object. Raises ClusterError."""
        await self._call("PATCH", group, path, content=json.dumps(change), headers=_MERGE_PATCH)

    async def delete(self, group: str, path: str) -> None:
        """Delete an object and its dependents; a missing object is no error. Raises ClusterError."""
        with contextlib.suppress(_NoSuchObject):
            await self._call("DELETE", group, path, json={"propagationPolicy": "Background"})

    async def log(self, pod: str, **query: str) -> str:
        """Return the log of a pod; "" if there is none. Raises ClusterError if the server does not answer."""
        answer = await self._request("GET", CORE, f"pods/{pod}/log", params=query)
        return "" if answer.is_error else answer.text

    async def _call(self, method: str, group: str, path: str, **options: Any) -> dict[str, Any]:
        answer = await self._request(method, group, path, **options)
        try:
            body = answer.json()
        except ValueError:
            body = None
        if answer.is_error or not isinstance(body, dict):
            raise _refused(answer, body, path)
        return body

    async def _request(self, method: str, group: str, path: str, **options: Any) -> httpx.Response:
        import httpx

        try:
            return await self.session.request(method, self.url(group, path), extensions=self.extensions, **options)
        except (httpx.HTTPError, OSError) as error:
            raise ClusterError(
                f"the Kubernetes API at {self._auth.server} can't be reached: {_words(error)}; see kubectl cluster-info"
            ) from error


class _NoSuchObject(ClusterError):
    """The kind exists, but no object of that name."""


@contextlib.asynccontextmanager
async def connected(context: str | None, namespace: str | None) -> AsyncIterator[Kubernetes]:
    """The API server of a context (None: the current one, or that of this pod). Raises UsageError, ClusterError."""
    auth_class = _auth_class()
    import httpx

    began = time.time()
    try:
        auth = await auth_class(context=context or None)
        certificates = await auth.ssl_context()
        _discard_temporary_files(auth, began)
        namespace = namespace or _namespace(auth)
    except Exception as error:
        raise _not_configured(error, context) from error
    headers = {"Authorization": f"Bearer {auth.token}"} if auth.token else {}
    async with httpx.AsyncClient(
        base_url=auth.server, headers=headers, verify=certificates, proxy=auth.proxy, timeout=_CALL_S
    ) as session:
        yield Kubernetes(session, namespace, auth)


def _auth_class() -> type[KubeAuth]:
    try:
        import dask_kubernetes
        from kr8s._auth import KubeAuth
    except ImportError as error:
        raise UsageError(
            f"cluster.backend kubernetes needs another package ({error.name}): {install_command('kubernetes')}"
        ) from error
    assert dask_kubernetes is not None
    return KubeAuth


def _namespace(auth: KubeAuth) -> str:
    """Return the namespace of the context or of this pod. The one in `auth` may be that of another context."""
    if auth.active_context:
        return str(auth.kubeconfig.get_context(auth.active_context).get("namespace") or "default")
    try:
        return _NAMESPACE_FILE.read_text().strip()
    except OSError:
        return "default"


def _discard_temporary_files(auth: KubeAuth, began: float) -> None:
    """Delete the temporary files that kr8s has written since `began`: it leaves the keys of a kubeconfig there."""
    for name in (auth.client_key_file, auth.client_cert_file, auth.server_ca_file):
        path = Path(str(name))
        is_temporary = str(path.parent) == tempfile.gettempdir() and path.name.startswith(tempfile.gettempprefix())
        if name is not None and is_temporary and path.exists() and path.stat().st_ctime > began - 1.0:
            path.unlink()


def _not_configured(error: Exception, context: str | None) -> DdptrainError:
    source = os.environ.get("KUBECONFIG", "~/.kube/config")
    if "valid credentials" in str(error):
        missing = [name for name in source.split(":") if not Path(name).expanduser().exists()]
        why = f"{' and '.join(missing)} does not exist" if missing else f"{source} contains no server"
        return ClusterError(
            f"there is no usable kubeconfig ({why}), and this is not a pod of a cluster: set KUBECONFIG"
        )
    if "No such context" in str(error):
        return ClusterError(f'the kubeconfig {source} has no context "{context}": see kubectl config get-contexts')
    return ClusterError(f"the kubeconfig {source} can't be used: {type(error).__name__}: {_words(error)}")


def _refused(answer: httpx.Response, body: Any, path: str) -> ClusterError:
    """Return the error for a refused request."""
    import httpx

    status = body if isinstance(body, dict) else {}
    words = " ".join(str(status.get("message") or answer.text[:200] or answer.reason_phrase).split())
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        return ClusterError(f"Kubernetes does not accept the credentials of the kubeconfig: {words}")
    if answer.status_code == httpx.codes.FORBIDDEN:
        return ClusterError(f"Kubernetes does not allow it: {words}")
    if answer.status_code != httpx.codes.NOT_FOUND:
        return ClusterError(f"Kubernetes refuses {path} ({answer.status_code}): {words}")
    if status:
        return _NoSuchObject(words)
    # Without a Status object the server does not know the kind: the operator is not installed.
    return ClusterError(
        "this Kubernetes has no DaskCluster: the operator of dask-kubernetes is not installed there; "
        f"its administrator installs it with {INSTALL_OPERATOR}"
    )


def _words(error: BaseException) -> str:
    import httpx

    if isinstance(error, httpx.TimeoutException):
        return f"no answer within {_CALL_S:g} s"
    return " ".join(str(error).split()) or type(error).__name__
