"""The targets of the process that sends."""

from __future__ import annotations

import logging

import apprise
import pytest

from ddptrain.notify.sender_process import targets

pytestmark = pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning")  # Apprise's import

ASSET = apprise.AppriseAsset(app_id="ddptrain")


def test_text_with_several_urls_has_several_targets() -> None:
    assert len(targets("json://10.0.0.1:1, json://10.0.0.2:2", ASSET)) == 2


@pytest.mark.parametrize("url", ["nosuch://host", "nonsense", "slack://abc"])
def test_url_that_apprise_does_not_know_is_a_problem(url: str) -> None:
    (problem,) = targets(url, ASSET)
    assert isinstance(problem, str) and problem.startswith("Apprise does not accept the URL: ")


def test_apprise_logs_nothing_into_other_handlers_here(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        targets("json://127.0.0.1/tokentoken", ASSET)
    assert "tokentoken" not in caplog.text
