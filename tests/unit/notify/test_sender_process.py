"""What the process that sends shows of a target, and how it explains a failure."""

from __future__ import annotations

import logging

import apprise
import pytest

from ddptrain.notify.sender_process import shown, targets

pytestmark = pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning")  # Apprise's import

ASSET = apprise.AppriseAsset(app_id="ddptrain")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("json://user:password@127.0.0.1:8080/token", ("json", "127.0.0.1:8080")),
        ("jsons://hooks.example.com/token", ("jsons", "hooks.example.com")),
        ("json://localhost/token", ("json", "localhost")),
        ("mailto://user:password@gmail.com", ("mailtos", "gmail.com:587")),
        ("gotify://gotify.example.com/tokentoken12345", ("gotify", "gotify.example.com")),
        # the host is a token or a topic
        ("json://intranet/token", ("json", "")),
        ("ntfy://secret-topic", ("ntfys", "")),
        ("slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ", ("slack", "")),
        ("https://hooks.slack.com/services/T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ", ("slack", "")),
        ("tgram://123456789:abcdefg_hijklmnop/12315544/", ("tgram", "")),
        ("discord://4174216298/JHMHI8qBe7bk2ZwO5U711o3dV_js", ("discord", "")),
        ("pbul://o.gn5kj6nfhv736I7jC3cj3QLRiyhgl98b", ("pbul", "")),
    ],
)
def test_host_is_shown_only_if_it_is_surely_a_host(url: str, expected: tuple[str, str]) -> None:
    (service,) = targets(url, ASSET)
    assert shown(service) == expected


def test_text_with_several_urls_has_several_targets() -> None:
    assert [shown(each)[1] for each in targets("json://10.0.0.1:1, json://10.0.0.2:2", ASSET)] == [
        "10.0.0.1:1",
        "10.0.0.2:2",
    ]


@pytest.mark.parametrize("url", ["nosuch://host", "nonsense", "slack://abc"])
def test_url_that_apprise_does_not_know_is_a_problem(url: str) -> None:
    (problem,) = targets(url, ASSET)
    assert isinstance(problem, str) and problem.startswith("Apprise does not accept the URL: ")


def test_apprise_logs_nothing_into_other_handlers_here(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        targets("json://127.0.0.1/tokentoken", ASSET)
    assert "tokentoken" not in caplog.text
