"""Messages and heartbeats with real servers: Apprise to HTTP and SMTP, silent servers, and a check server."""

from __future__ import annotations

import email
import email.policy
import json
import logging
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from aiosmtpd.controller import Controller
from aiosmtpd.handlers import Message as MessageHandler

from ddptrain.notify.heartbeat import BODY_BYTES, Heartbeat
from ddptrain.notify.sender import Delivery, Message, send
from tests.servers.notify_servers import CheckServer, SilentServer, WebServer, serving
from tests.servers.ports import free_ports
from tests.support.command import PATIENCE_S, wait_until

MESSAGE = Message(
    "petnames: retraining failed: rank 1: ValueError: no_names in *data*",
    "**petnames**: the retraining failed.\n\n- root cause: `rank 1: ValueError: no_names in *data*`\n- host: `vm`",
    "failure",
)
SECRET = "s3cr3t-t0ken-0123456789"


@pytest.fixture
def web() -> Iterator[WebServer]:
    with serving(server := WebServer()):
        yield server


@pytest.fixture
def check() -> Iterator[CheckServer]:
    with serving(server := CheckServer()):
        yield server


class Mailbox(MessageHandler):
    """Keeps the messages that an SMTP server got."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[email.message.EmailMessage] = []

    def prepare_message(self, session: object, envelope: object) -> email.message.EmailMessage:
        content = envelope.content  # type: ignore[attr-defined]
        return email.message_from_bytes(content, policy=email.policy.default)

    def handle_message(self, message: email.message.EmailMessage) -> None:  # type: ignore[override]
        self.messages.append(message)


def test_webhook_gets_the_message_and_other_targets_do_not_matter(web: WebServer) -> None:
    urls = [f"json://user:{SECRET}@{web.address}/hooks/{SECRET}?format=text", "env:NO_URL", "json://127.0.0.1:1/x"]
    found = send(MESSAGE, urls, timeout_s=PATIENCE_S, retries=0)
    assert found[0] == Delivery("notify.urls[0] (json)")
    assert found[1].problem == "the environment variable NO_URL is not set; it should contain a URL"
    assert "Connection refused" in found[2].problem
    (request,) = web.requests
    assert request.path == f"/hooks/{SECRET}"
    body = json.loads(request.body)
    assert body["title"] == "petnames: retraining failed: rank 1: ValueError: no_names in *data*"
    assert body["message"] == MESSAGE.body
    assert body["type"] == "failure"


def test_server_that_is_unavailable_for_a_moment_gets_the_message(web: WebServer) -> None:
    web.statuses = [503]
    assert send(MESSAGE, [f"json://{web.address}/"], timeout_s=PATIENCE_S, retries=1) == [
        Delivery("notify.urls[0] (json)")
    ]
    assert len(web.requests) == 2


def test_mail_server_gets_the_message_as_html_with_names_as_they_are() -> None:
    mailbox = Mailbox()
    (port,) = free_ports(1)  # aiosmtpd connects to the port that it was given
    controller = Controller(mailbox, hostname="127.0.0.1", port=port)
    controller.start()
    try:
        url = f"mailto://127.0.0.1:{port}/?from=alerts@example.com&to=ops@example.com"
        (found,) = send(MESSAGE, [url], timeout_s=PATIENCE_S)
    finally:
        controller.stop()
    assert found.delivered, found.problem
    (message,) = mailbox.messages
    assert message["Subject"] == "petnames: retraining failed: rank 1: ValueError: no_names in *data*"
    assert "ops@example.com" in message["To"] and "alerts@example.com" in message["From"]
    html = message.get_body(("html",)).get_content()  # type: ignore[union-attr]
    assert "<p><strong>petnames</strong>: the retraining failed.</p>" in html
    assert "<li>root cause: <code>rank 1: ValueError: no_names in *data*</code></li>" in html
    text = message.get_body(("plain",)).get_content()  # type: ignore[union-attr]
    assert "rank 1: ValueError: no_names in *data*" in text.splitlines()


def test_silent_servers_end_at_the_deadline_and_leave_nothing(web: WebServer) -> None:
    with SilentServer() as silent, SilentServer(drips=True) as dripping:
        urls = [
            f"json://{silent.address}/{SECRET}",
            f"json://{dripping.address}/{SECRET}",
            f"mailto://{silent.address}/?from=alerts@example.com&to=ops@example.com",
            f"json://{web.address}/",
        ]
        found = send(MESSAGE, urls, timeout_s=2)
        assert (silent.connections, dripping.connections) >= (2, 1)
    assert [each.problem for each in found[:3]] == ["no answer within 2 s"] * 3
    assert found[3].delivered


def test_check_server_follows_a_retraining(check: CheckServer) -> None:
    beat = Heartbeat(check.url + "/?create=1")
    beat.begin()
    wait_until(lambda: len(check.pings) == 1)
    assert check.state == "started"
    assert beat.end(0, "version 4 is the champion") == []
    assert check.state == "up"
    assert [(kind, body) for kind, _, body in check.pings] == [
        ("start", ""),
        ("success", "version 4 is the champion"),
    ]
    assert len({rid for _, rid, _ in check.pings}) == 1
    for exit_code, kind, state in (
        (7, "7", "down"),
        (0, "success", "up"),
        (-9, "fail", "down"),
        (None, "fail", "down"),
    ):
        beat = Heartbeat(check.url)
        beat.begin()
        beat.end(exit_code, "bad")
        beat.end(0)  # only the first end counts
        assert check.state == state
        assert [(kind, body) for kind, _, body in check.pings[-2:]] == [("start", ""), (kind, "bad")]
    assert len({rid for _, rid, _ in check.pings}) == 5


def test_body_is_the_newest_10_kb_without_secrets(check: CheckServer) -> None:
    lines = [f"line {number} é" for number in range(2000)]
    secrets = ["sesame", f"{check.url} token=abcd1234 \x1b[31msesame"]
    Heartbeat(check.url, secrets=["sesame"]).end(1, "\n".join([*lines, *secrets]))
    ((_, _, body),) = check.pings
    assert BODY_BYTES - 30 < len(body.encode()) <= BODY_BYTES
    assert body.splitlines()[0] in lines and body.splitlines()[-3] == lines[-1]
    assert not [secret for secret in ("sesame", check.url, "abcd1234", "\x1b") if secret in body]


def test_refusal_is_a_warning_and_not_tried_again(check: CheckServer) -> None:
    check.statuses = [404]
    (warning,) = Heartbeat(check.url).end(1)
    assert "1: the server answered 404" in warning and check.statuses == []
    assert Heartbeat(None).end(0) == []


@pytest.mark.long
def test_check_server_that_is_unavailable_gets_the_messages_later(check: CheckServer) -> None:
    check.statuses = [503, 503]
    beat = Heartbeat(check.url)
    beat.begin()
    wait_until(lambda: len(check.pings) == 1)
    assert beat.end(0) == []
    assert [kind for kind, _, _ in check.pings] == ["start", "success"]


def test_killed_retraining_is_detected_by_its_silence() -> None:
    program = """
import sys, time
from ddptrain.notify.heartbeat import Heartbeat
beat = Heartbeat(sys.argv[1])
beat.begin()
time.sleep(600)
"""
    with serving(check := CheckServer(grace_s=1)):
        process = subprocess.Popen([sys.executable, "-c", program, check.url])
        try:
            wait_until(lambda: bool(check.pings))
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        wait_until(lambda: check.state == "down")
    assert [kind for kind, _, _ in check.pings] == ["start"]


@pytest.mark.long
def test_process_ends_although_servers_are_silent() -> None:
    program = """
import sys
from ddptrain.notify.heartbeat import Heartbeat
first = Heartbeat(sys.argv[1], timeout_s=1)
first.begin()
first.end(0)
Heartbeat(sys.argv[1], timeout_s=600).begin()  # its thread still waits when the process ends
print(*first.warnings, sep="\\n")
"""
    with SilentServer(drips=True) as dripping, SilentServer() as silent:
        for server in (silent, dripping):
            url = f"http://{server.address}/{SECRET}"
            done = subprocess.run(
                [sys.executable, "-c", program, url], capture_output=True, text=True, timeout=PATIENCE_S, check=False
            )
            assert (done.returncode, done.stderr) == (0, "")
            assert done.stdout.splitlines()[-1].endswith("the server does not answer")
            assert SECRET not in done.stdout


def test_apprise_stays_out_of_the_logs_of_this_process(web: WebServer, caplog: pytest.LogCaptureFixture) -> None:
    web.statuses = [401]
    with caplog.at_level(logging.DEBUG):
        send(MESSAGE, [f"json://{web.address}/{SECRET}"], timeout_s=PATIENCE_S, retries=0)
    assert "message not delivered" in caplog.text
    assert SECRET not in caplog.text
    assert not any(record.name.startswith(("apprise", "urllib3", "requests")) for record in caplog.records)
