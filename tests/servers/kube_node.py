"""What runs pods for `kube_server`, as real processes: a Job's controller, a kubelet and a network.

Each pod has an address of its own in 127.0.0.0/8; its containers' paths are folders, and its commands run here.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import traceback
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.servers.kube_store import Object, Store, merged

GOOD_IMAGE = "registry.test/ddptrain:1"
_POLL_S = 0.05
_PROBE_S = 0.5  # between the probes of a pod that is not ready yet: each takes a process
_ACTIVE = {"active": 1}


@dataclass(slots=True)
class Pod:
    """One pod: its process, and the thread of its life."""

    name: str
    namespace: str
    folder: Path
    address: str
    tries: int = 0
    process: subprocess.Popen[bytes] | None = None
    task: asyncio.Task[None] | None = None
    doomed: asyncio.Event = field(default_factory=asyncio.Event)

    def log(self, number: int) -> Path:
        return self.folder / f"log-{number}"


class Node:
    """Runs the pods of one API server. Images other than GOOD_IMAGE can't be pulled; there is a GPU nowhere."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store = store
        self.folder = folder
        self.pods: dict[str, Pod] = {}
        self.commands: dict[str, list[str]] = {}  # of each pod that was started, as it was run
        self.faults: list[str] = []  # of the node itself: there must be none
        self._count = 1

    def changed(self, plural: str, event: str, thing: Object) -> None:
        if plural == "jobs" and event == "ADDED":
            for index in range(thing["spec"].get("completions", 1)):
                self._make_pod(thing, index)
            self.store.patch("jobs", thing["metadata"]["namespace"], thing["metadata"]["name"], {"status": _ACTIVE})
        elif plural == "pods" and event == "ADDED":
            pod = self._new_pod(thing)
            self._write_names()
            pod.task = asyncio.ensure_future(self._live(pod, thing))
        elif plural == "pods" and thing["metadata"].get("deletionTimestamp") and event == "MODIFIED":
            self.pods[thing["metadata"]["name"]].doomed.set()
            self._write_names()
        elif plural == "services" and event == "ADDED":
            self._write_names()

    def log(self, pod: str, *, previous: bool) -> str | None:
        known = self.pods[pod]
        path = known.log(known.tries - 1 if previous else known.tries)
        return path.read_text(errors="replace") if path.exists() else None

    def address(self, pod: str) -> str:
        return self.pods[pod].address

    async def close(self) -> None:
        for pod in self.pods.values():
            pod.doomed.set()
        await asyncio.gather(*(pod.task for pod in self.pods.values() if pod.task), return_exceptions=True)

    def _make_pod(self, job: Object, index: int) -> None:
        meta = job["metadata"]
        reference = {"apiVersion": "batch/v1", "kind": "Job", "name": meta["name"], "uid": meta["uid"]}
        template = json.loads(json.dumps(job["spec"]["template"]))
        template["spec"]["containers"][0].setdefault("env", []).append(
            {"name": "JOB_COMPLETION_INDEX", "value": str(index)}
        )
        labels = {**template["metadata"]["labels"], "batch.kubernetes.io/job-completion-index": str(index)}
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": f"{meta['name']}-{index}-{uuid.uuid4().hex[:5]}",
                "labels": labels,
                "ownerReferences": [reference],
            },
            "spec": template["spec"],
            "status": {"phase": "Pending"},
        }
        self.store.create("pods", meta["namespace"], pod)

    def _write_names(self) -> None:
        """What a name server would know."""
        names = {}
        for service in self.store.find("services", "", {}):
            meta, selector = service["metadata"], service["spec"]["selector"].items()
            for thing in self.store.find("pods", meta["namespace"], {}):
                if selector <= thing["metadata"]["labels"].items() and not thing["metadata"].get("deletionTimestamp"):
                    names[meta["name"]] = self.pods[thing["metadata"]["name"]].address
        beside = self.folder / "names.new"
        beside.write_text(json.dumps(names))
        beside.rename(self.folder / "names.json")

    def _new_pod(self, thing: Object) -> Pod:
        self._count += 1
        meta = thing["metadata"]
        number = os.getpid()
        address = f"127.{10 + number % 200}.{number // 200 % 250}.{self._count % 250}"
        pod = Pod(meta["name"], meta["namespace"], self.folder / "pods" / meta["name"], address)
        pod.folder.mkdir(parents=True)
        self.pods[pod.name] = pod
        return pod

    async def _live(self, pod: Pod, thing: Object) -> None:
        spec = thing["spec"]
        try:
            if spec.get("nodeSelector") or "nvidia.com/gpu" in str(spec["containers"][0].get("resources")):
                await self._cant(pod, "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.")
            elif spec["containers"][0]["image"] != GOOD_IMAGE:
                await self._cant_pull(pod, spec["containers"][0]["image"])
            else:
                await self._run(pod, thing)
        except Exception:  # nobody waits for this task
            self.faults.append(f"pod {pod.name}: {traceback.format_exc()}")
        finally:
            await self._end(pod, float(spec.get("terminationGracePeriodSeconds", 30)))
            with contextlib.suppress(KeyError):
                self.store.remove("pods", self.store.objects[("pods", pod.namespace, pod.name)])

    async def _cant(self, pod: Pod, message: str) -> None:
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        self._tell(pod, {"phase": "Pending", "conditions": [condition]})
        await pod.doomed.wait()

    async def _cant_pull(self, pod: Pod, image: str) -> None:
        message = f'Back-off pulling image "{image}": rpc error: not found'
        for reason in ("ContainerCreating", "ErrImagePull", "ImagePullBackOff"):
            waiting = {"state": {"waiting": {"reason": reason, "message": message}}, "restartCount": 0}
            self._tell(pod, {"phase": "Pending", "containerStatuses": [waiting]})
            await asyncio.sleep(0.2)
        await pod.doomed.wait()

    async def _run(self, pod: Pod, thing: Object) -> None:
        spec = thing["spec"]
        container = spec["containers"][0]
        mounts = self._mount(pod, spec)
        while not mounts and not pod.doomed.is_set():  # its secret is missing
            await _nap(pod)
            mounts = self._mount(pod, spec)
        while not pod.doomed.is_set():
            self._start(pod, container, mounts)
            probe_at, is_ready = 0.0, False
            while pod.process is not None and pod.process.poll() is None and not pod.doomed.is_set():
                if not is_ready and time.monotonic() >= probe_at:
                    is_ready = await self._probe(pod, container, mounts)
                    probe_at = time.monotonic() + _PROBE_S
                await _nap(pod)
            if pod.doomed.is_set():
                return
            code = pod.process.returncode if pod.process else 1
            state = {"state": {"terminated": {"exitCode": code}}, "restartCount": 0, "ready": False}
            phase = "Failed" if code else "Succeeded"
            self._tell(pod, {"phase": phase, "conditions": [], "containerStatuses": [state]})
            uid = thing["metadata"]["ownerReferences"][0]["uid"]
            if job := next((each for each in self.store.objects.values() if each["metadata"]["uid"] == uid), None):
                self._end_job(job, code)
            await pod.doomed.wait()

    def _end_job(self, job: Object, code: int) -> None:
        """What the controller of a Job does at the end of a pod; it knows rules about exit codes."""
        meta = job["metadata"]
        for rule in job["spec"].get("podFailurePolicy", {}).get("rules", ()):
            codes = rule.get("onExitCodes")
            if (
                code
                and codes
                and (code in codes["values"]) == (codes["operator"] == "In")
                and rule["action"] == "Ignore"
            ):
                self._make_pod(job, 0)
                return
        status: dict[str, Any] = {"active": None}
        if job["spec"].get("completionMode") != "Indexed":
            status["conditions"] = [{"type": "Failed" if code else "Complete", "status": "True"}]
        self.store.patch("jobs", meta["namespace"], meta["name"], {"status": status})

    def _mount(self, pod: Pod, spec: Object) -> dict[str, str]:
        """Paths in the container -> paths here; nothing while a secret is missing."""
        sources: dict[str, Path] = {}
        for volume in spec.get("volumes", ()):
            folder = sources[volume["name"]] = pod.folder / "volumes" / volume["name"]
            folder.mkdir(parents=True, exist_ok=True)
            if "hostPath" in volume:
                sources[volume["name"]] = Path(volume["hostPath"]["path"])
            if "secret" in volume:
                key = ("secrets", pod.namespace, volume["secret"]["secretName"])
                if key not in self.store.objects:
                    return {}
                for name, data in self.store.objects[key]["data"].items():
                    (folder / name).write_bytes(base64.b64decode(data))
        mounts = {}
        for mount in sorted(spec["containers"][0].get("volumeMounts", ()), key=lambda mount: mount["mountPath"]):
            path = mount["mountPath"]
            if "subPath" not in mount:
                mounts[path] = str(sources[mount["name"]])
                continue
            outer = next(
                Path(here) / path[len(there) + 1 :] for there, here in mounts.items() if path.startswith(there)
            )
            outer.unlink(missing_ok=True)
            outer.symlink_to(sources[mount["name"]] / mount["subPath"])
        return mounts or {"/nowhere": "/nowhere"}

    def _start(self, pod: Pod, container: Object, mounts: dict[str, str]) -> None:
        env = {each["name"]: self._resolved(str(each["value"]), pod.namespace) for each in container.get("env", ())}
        args = [re.sub(r"\$\((\w+)\)", lambda found: env[found[1]], argument) for argument in container["args"]]
        args = [self._resolved(_located(argument, mounts), pod.namespace) for argument in args]
        args = [argument.replace("0.0.0.0", pod.address) for argument in args]
        self.commands[pod.name] = args
        names = ("PATH", "LANG", "HOME", "PYTHONPATH", "DDPTRAIN_TESTS")
        own = {name: os.environ[name] for name in names if name in os.environ}
        if (account := self.folder / "account.json").exists():  # what lets kubectl work in a pod
            own |= json.loads(account.read_text())
        own |= dict.fromkeys(("TMPDIR", "XDG_STATE_HOME", "XDG_CACHE_HOME"), str(pod.folder))
        with pod.log(pod.tries).open("wb") as log:
            pod.process = subprocess.Popen(
                [str(Path(sys.executable).with_name(args[0])), *args[1:]],
                env={**own, **env},
                cwd=pod.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _resolved(self, text: str, namespace: str) -> str:
        """Names of services replaced by the addresses of their pods, as the cluster's network does."""
        for (kind, place, name), service in self.store.objects.items():
            pattern = rf"(?<=://){re.escape(name)}(?=:)"
            if kind != "services" or place != namespace or not re.search(pattern, text):
                continue
            wanted = service["spec"]["selector"].items()
            behind = [
                thing["metadata"]["name"]
                for thing in self.store.find("pods", namespace, {})
                if wanted <= thing["metadata"]["labels"].items() and not thing["metadata"].get("deletionTimestamp")
            ]
            text = re.sub(pattern, self.pods[behind[0]].address if behind else "0.0.0.1", text)
        return text

    async def _probe(self, pod: Pod, container: Object, mounts: dict[str, str]) -> bool:
        command = container.get("readinessProbe", {}).get("exec", {}).get("command")
        passed = not command or await _succeeds([*command[:-1], _located(command[-1], mounts)])
        condition = {"type": "Ready", "status": "True" if passed else "False"}
        state = {"state": {"running": {}}, "ready": passed, "restartCount": pod.tries}
        status = {"phase": "Running", "conditions": [condition], "containerStatuses": [state]}
        self._tell(pod, {**status, "podIP": pod.address})
        return passed

    def _tell(self, pod: Pod, status: dict[str, Any]) -> None:
        known = self.store.objects.get(("pods", pod.namespace, pod.name))
        if known is not None and known.get("status") != status:
            self.store.put("pods", merged({**known, "status": None}, {"status": status}), "MODIFIED")

    async def _end(self, pod: Pod, grace_s: float) -> None:
        if pod.process is None:
            return
        pod.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(pod.process.wait, grace_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pod.process.pid, signal.SIGKILL)  # the container is gone, and all that ran in it
        pod.process.wait()


async def _succeeds(command: list[str]) -> bool:
    return await (await asyncio.create_subprocess_exec(*command)).wait() == 0


async def _nap(pod: Pod) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(pod.doomed.wait(), _POLL_S)


def _located(argument: str, mounts: dict[str, str]) -> str:
    for there, here in mounts.items():
        if argument == there or argument.startswith(f"{there}/"):
            return here + argument[len(there) :]
    return argument
