"""What remains of data and texts once secrets are removed, as known values."""

from __future__ import annotations

import time
from typing import Any

import pytest

from ddptrain.redact import hide_arguments, hide_credentials, hide_known, hide_secrets, known_secrets, secrets_in
from ddptrain.secret_rules import is_secret_name

DATABASE = "PGPASSWORD PGPASS MYSQL_PWD MYSQLPASS REDISPASS REDIS_PW ROOTPW LDAPPWD SMTP_PASSWORD FTPPASS SSHPASS DBPWD"


@pytest.mark.parametrize("name", DATABASE.split())
def test_password_of_a_server_is_removed_wherever_its_name_stands(name: str) -> None:
    assert is_secret_name(name) and is_secret_name(name.lower())
    assert hide_secrets({"env": {name: "hunter2"}}) == {"env": {name: "<left out>"}}
    assert hide_credentials(f"{name}=hunter2 psql -h db") == f"{name}=<left out> psql -h db"
    assert hide_credentials(f'{{"{name}": "hunter2"}}') == f'{{"{name}": "<left out>"}}'
    assert hide_arguments([f"--{name.lower()}", "hunter2", "x"]) == [f"--{name.lower()}", "<left out>", "x"]
    assert known_secrets({name: "hunter2"}) == ["hunter2"]


@pytest.mark.parametrize("name", ["PWD", "OLDPWD", "PGHOST", "PGUSER", "max_tokens"])
def test_other_variables_stay(name: str) -> None:
    assert hide_secrets({name: "hunter2"}) == {name: "hunter2"}
    assert hide_credentials(f"{name}=hunter2") == f"{name}=hunter2"


@pytest.mark.parametrize(
    ("data", "hidden"),
    [
        ({"password": ["a", {"b": "c"}]}, {"password": ["<left out>", {"b": "<left out>"}]}),
        (
            {"password": "", "pin": 7, "token": True, "secret": None},
            {"password": "", "pin": 7, "token": True, "secret": None},
        ),
        ({"token": 8675309}, {"token": "<left out>"}),
        ({"args": ("--pwd", "x", "--lr", "1")}, {"args": ["--pwd", "<left out>", "--lr", "1"]}),
        ({"url": "s3://me:pw@bucket/k"}, {"url": "s3://<left out>@bucket/k"}),
        ([1, 2.5, None, "text"], [1, 2.5, None, "text"]),
    ],
)
def test_data_keep_their_form(data: Any, hidden: Any) -> None:
    assert hide_secrets(data) == hidden


def test_texts_that_were_hidden_are_listed_the_longest_first() -> None:
    data = {"password": ["short", "much-longer"], "lr": "0.1", "url": "http://u:pw@h"}
    assert list(secrets_in(data, hide_secrets(data))) == ["short", "much-longer", "http://u:pw@h"]
    assert known_secrets({"password": ["hunter2", "hunter2-and-more"]}) == ["hunter2-and-more", "hunter2"]


def test_known_texts_are_removed_from_all_data() -> None:
    data = {"a": ["x hunter2 y"], "b": ("hunter2", 3), "hunter2": None}
    assert hide_known(data, ["hunter2"]) == {"a": ["x <left out> y"], "b": ("<left out>", 3), "hunter2": None}


@pytest.mark.parametrize("text", ["a." * 40_000 + "=", "-a." * 40_000])
def test_time_for_a_long_text_of_another_user_grows_with_its_length(text: str) -> None:
    began = time.process_time()
    assert hide_credentials(text) == text
    assert time.process_time() - began < 5.0  # 40 s and 75 s, if every name was read to its end
