"""`ddptrain notify test`: what it prints, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from ddptrain.cli.unattended.notify import app
from ddptrain.errors import ConfigError, UsageError
from ddptrain.notify import heartbeat, sender
from ddptrain.notify.messages import Message
from ddptrain.notify.sender import Delivery


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(heartbeat, "_post", lambda *_: ("", False))
    return tmp_path


def notify(*arguments: str) -> Result:
    root = typer.Typer(result_callback=lambda code, **_: exit(code or 0))
    root.add_typer(app, name="notify")
    return CliRunner().invoke(root, ["notify", *arguments])


def answer_with(monkeypatch: pytest.MonkeyPatch, *deliveries: Delivery) -> list[tuple[Message, list[str], object]]:
    sent: list[tuple[Message, list[str], object]] = []

    def send(message: Message, urls: list[str], **options: object) -> list[Delivery]:
        sent.append((message, urls, options["retries"]))
        return list(deliveries)

    monkeypatch.setattr(sender, "send", send)
    return sent


CONFIG = 'workload: petnames\nnotify: {urls: ["env:A", "env:B"], heartbeat: "https://host/x"}\n'


def test_one_line_for_each_target_and_exit_code_0(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "c.yaml").write_text(CONFIG)
    sent = answer_with(monkeypatch, Delivery("env:A (slack)"), Delivery("env:B (json://h:1)"))
    done = notify("test", "c.yaml")
    assert done.exit_code == 0
    assert done.stdout.splitlines() == [
        "env:A (slack): delivered",
        "env:B (json://h:1): delivered",
        "notify.heartbeat (https://host): delivered",
    ]
    assert [(urls, retries) for _, urls, retries in sent] == [(["env:A", "env:B"], 0)]
    assert str(folder / "c.yaml") in sent[0][0].text


def test_failure_is_exit_code_4(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "c.yaml").write_text(CONFIG)
    answer_with(monkeypatch, Delivery("env:A (slack)", "refused"), Delivery("env:B"))
    done = notify("test", "c.yaml")
    assert done.exit_code == 4
    assert done.stdout.splitlines()[0] == "env:A (slack): refused"
    assert done.stderr == "ddptrain: 1 of 3 messages were not delivered\n"
    done = notify("test", "c.yaml", "--json")
    assert done.exit_code == 4
    assert json.loads(done.stdout)[0] == {"target": "env:A (slack)", "delivered": False, "problem": "refused"}


def test_configuration_without_targets_is_a_usage_error(folder: Path) -> None:
    (folder / "c.yaml").write_text("workload: petnames\n")
    done = notify("test", "c.yaml")
    assert isinstance(done.exception, UsageError)
    assert str(done.exception) == "c.yaml has neither notify.urls nor notify.heartbeat: there is nothing to test"


def test_set_changes_the_configuration(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "c.yaml").write_text(CONFIG)
    sent = answer_with(monkeypatch)
    assert notify("test", "c.yaml", "--set", "notify.urls=slack://a", "--set", "notify.heartbeat=null").exit_code == 0
    assert sent[0][1] == ["slack://a"]
    assert isinstance(notify("test", "c.yaml", "--set", "notify.urls=x").exception, ConfigError)
