"""Targets and their names, what is hidden, and what the answers of the process that sends mean."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from ddptrain.notify.messages import Message
from ddptrain.notify.sender import Delivery, missing_variables, secret_parts, send

MESSAGE = Message("title", "text", "markdown", "html")


class FakeProcess:
    """Stands for the process that sends: keeps the request, and answers with lines."""

    def __init__(
        self, *lines: object, stderr: bytes = b"", returncode: int = 0, error: Exception | None = None
    ) -> None:
        self.stdout = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        self.stderr, self.returncode, self.error = stderr, returncode, error
        self.request: dict[str, Any] = {}
        self.command: list[str] = []

    def run(self, command: list[str], *, input: bytes, **_: object) -> FakeProcess:  # noqa: A002  # as subprocess.run
        self.command, self.request = command, json.loads(input)
        if self.error:
            raise self.error
        return self


def answer(index: int, problem: str = "", *, service: str = "json", host: str = "") -> dict[str, object]:
    return {"index": index, "service": service, "host": host, "problem": problem, "delivered": not problem}


def use(process: FakeProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", process.run)


def test_missing_variable_is_named_and_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    use(process := FakeProcess(error=AssertionError("started")), monkeypatch)
    found = send(MESSAGE, ["env:A_URL", "env:B_URL"], timeout_s=1, environ={"B_URL": " "})
    assert [each.warning for each in found if each.warning] == [
        "message not delivered to env:A_URL: the environment variable A_URL is not set; it should contain a URL",
        "message not delivered to env:B_URL: the environment variable B_URL is empty; it should contain a URL",
    ]
    assert process.command == []


def test_missing_variables_are_found_before_a_training() -> None:
    urls = ["env:A_URL", "json://host", None, "env:B_URL", "env:A_URL"]
    assert missing_variables(urls, {"B_URL": "json://host"}) == [
        "the environment variable A_URL is not set; it should contain a URL"
    ]


def test_deliveries_follow_the_order_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [answer(1, "refused", service="slack"), answer(0, host="10.0.0.5:80"), answer(0, host="10.0.0.6")]
    use(process := FakeProcess(*lines), monkeypatch)
    found = send(MESSAGE, ["env:NO", "env:TWO", "slack://a"], timeout_s=2, environ={"TWO": "json://x, json://y"})
    assert found == [
        Delivery("env:NO", "the environment variable NO is not set; it should contain a URL"),
        Delivery("env:TWO (json://10.0.0.5:80)"),
        Delivery("env:TWO (json://10.0.0.6)"),
        Delivery("notify.urls[2] (slack)", "refused"),
    ]
    assert process.request["urls"] == [["env:TWO", "json://x, json://y"], ["notify.urls[2]", "slack://a"]]
    assert process.request["timeout_s"] == 2


def test_urls_are_not_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    use(process := FakeProcess(), monkeypatch)
    send(MESSAGE, ["slack://tokentoken"], timeout_s=1)
    assert "tokentoken" not in " ".join(process.command)


@pytest.mark.parametrize(
    ("process", "problem"),
    [
        (
            FakeProcess(returncode=1, stderr=b"Traceback\nImportError: no apprise\n"),
            "ended with 1: ImportError: no apprise",
        ),
        (FakeProcess(returncode=-9), "ended with -9"),
        (FakeProcess({"index": 7}, {"index": 0}, [], "text", answer(5)), "ended with 0"),
        (FakeProcess(error=subprocess.TimeoutExpired("x", 1)), "did not end within 31 s"),
        (FakeProcess(error=OSError(12, "Cannot allocate memory")), "could not be started: [Errno 12] Cannot allocate"),
    ],
)
def test_trouble_with_the_process_is_a_warning(
    process: FakeProcess, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(process, monkeypatch)
    (found,) = send(MESSAGE, ["slack://a"], timeout_s=1)
    assert not found.delivered
    assert problem in found.problem


def test_answers_before_the_deadline_count(monkeypatch: pytest.MonkeyPatch) -> None:
    expired = subprocess.TimeoutExpired("x", 1, output=json.dumps(answer(0)).encode() + b"\n" + b'{"index": 1, "ser')
    use(FakeProcess(error=expired), monkeypatch)
    assert [each.delivered for each in send(MESSAGE, ["json://a", "json://b"], timeout_s=1)] == [True, False]


def test_problem_contains_no_part_of_the_url(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "http://user:pa%40ssword@10.0.0.5:80/tokenA/tokenB?k=valueC"
    problem = f"POST {url} at 10.0.0.5:80 failed: pa@ssword tokenB\x1b[31m\nvalueC"
    use(FakeProcess(answer(0, problem, host="10.0.0.5:80")), monkeypatch)
    (found,) = send(MESSAGE, ["json://user:pa%40ssword@10.0.0.5:80/tokenA/tokenB?k=valueC"], timeout_s=1)
    for secret in ("user", "pa%40ssword", "pa@ssword", "tokenA", "tokenB", "valueC", "\x1b", "\n"):
        assert secret not in found.problem
    assert "10.0.0.5:80" in found.problem


def test_message_contains_no_secret_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    use(process := FakeProcess(answer(0)), monkeypatch)
    secret_text = Message("a sesame b", "c sesame s3://key:secretsecret@host/x d", "`sesame`", "<b>sesame</b>")
    send(secret_text, ["json://a"], timeout_s=1, secrets=["sesame"])
    assert "sesame" not in json.dumps(process.request)
    assert "secretsecret" not in json.dumps(process.request)
    assert process.request["title"].startswith("a ") and process.request["title"].endswith(" b")


def test_parts_of_a_url_are_secret_except_its_scheme() -> None:
    found = secret_parts("tgram://123456:ab%20cdef/chat1?format=text")
    assert {"123456", "ab%20cdef", "ab cdef", "chat1", "tgram://123456:ab%20cdef/chat1?format=text"} <= set(found)
    assert "tgram" not in found
    assert found == sorted(found, key=len, reverse=True)
    assert secret_parts("") == []
