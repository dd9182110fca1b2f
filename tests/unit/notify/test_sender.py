"""Targets: missing variables, and the parts of a URL that are secret. The delivery is in tests/integration."""

from __future__ import annotations

from ddptrain.notify.sender import Message, missing_variables, secret_parts, send


def test_missing_variable_is_named() -> None:
    found = send(Message("title", "body"), ["env:A_URL", "env:B_URL"], timeout_s=1, environ={"B_URL": " "})
    assert [each.warning for each in found] == [
        "message not delivered to env:A_URL: the environment variable A_URL is not set; it should contain a URL",
        "message not delivered to env:B_URL: the environment variable B_URL is empty; it should contain a URL",
    ]
    urls = ["env:A_URL", "json://host", None, "env:B_URL", "env:A_URL"]
    assert missing_variables(urls, {"B_URL": "json://host"}) == [
        "the environment variable A_URL is not set; it should contain a URL"
    ]


def test_parts_of_a_url_are_secret_except_its_scheme() -> None:
    found = secret_parts("tgram://123456:ab%20cdef/chat1?format=text")
    assert {"123456", "ab%20cdef", "ab cdef", "chat1", "tgram://123456:ab%20cdef/chat1?format=text"} <= set(found)
    assert "tgram" not in found
    assert found == sorted(found, key=len, reverse=True)
    assert secret_parts("") == []
