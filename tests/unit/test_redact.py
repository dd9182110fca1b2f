"""Secrets: what counts as one, and that it is hidden."""

from __future__ import annotations

import time
from typing import Any

import pytest

from ddptrain.redact import (
    LEFT_OUT,
    hide_credentials,
    hide_known,
    hide_secrets,
    is_secret_file,
    known_secrets,
)

# --- What counts as a secret, as a table; and that every place that writes, sends or ships something uses it ---


def words(text: str) -> list[str]:
    return text.split()


VALUE = "hu/nt+er2!"  # none of the known formats: only its place can give it away

SECRET_NAMES = words("""
key secret token password passwd pwd pass passphrase credentials secret_key secretKey access_key account_key sas_token
sasToken clientSecret client_secret secretAccessKey aws_secret_access_key aws_session_token api_key apiKey apikey
openai_key db_pass db_pw private_key privateKey auth_token refresh_token bearer authorization cookie
connection_string connectionString sharedKey account-key signing_key hf_token use_auth_token
x-api-key basic_auth encryption_key dsn azure_storage_sas token_2
""")
SECRET_VARIABLES = words("""
WANDB_API_KEY AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID AWS_SESSION_TOKEN DB_PASS PGPASSWORD MYSQL_PWD REDIS_PASS DBPASS
GITHUB_TOKEN HF_TOKEN HUGGING_FACE_HUB_TOKEN AZURE_STORAGE_KEY AZURE_STORAGE_CONNECTION_STRING CLIENTSECRET
SECRET_KEY_BASE SSH_PASSPHRASE GITHUB_TOKEN_PROD SENTRY_DSN SMTP_PASSWD NPM_AUTH PGPASS MYSQLPASS REDISPASS REDIS_PW
ROOTPW LDAPPWD FTPPASS SSHPASS DBPWD
""")
SECRET_ARGUMENTS = [
    ["--password", VALUE],
    ["--password", "-" + VALUE],
    [f"--token={VALUE}"],
    ["--lr", "0.1", "--api-key", VALUE, "--epochs", "3"],
    [f"--db.password={VALUE}"],
    [f"db.password={VALUE}"],
    [f"+trainer.apiKey={VALUE}"],
    ["-password", VALUE],
    ["--clientSecret", VALUE],
    ["--pwd", VALUE],
    [f"--passwd={VALUE}"],
    ["--config", f'{{"db": {{"password": "{VALUE}"}}}}'],
    ["--dsn", f"host=db user=me password={VALUE}"],
    [f"serve --password {VALUE} --port 80"],
    ["--header", "Authorization: Bearer " + VALUE.replace("!", "") * 2],
]
SECRET_ADDRESSES = [
    f"https://host/data.csv?token={VALUE}",
    f"https://account.blob.core.windows.net/c/f?sv=2022&sig={VALUE}&se=2030",
    f"https://host/f?X-Amz-Credential=AKIA&X-Amz-Signature={VALUE}",
    f"https://host/f?page=1&pwd={VALUE}",
    f"https://host/f?passwd={VALUE}",
    f"https://host/f?key={VALUE}",
    f"https://host/f?accessToken={VALUE}",
    f"https://host/#access_token={VALUE}",
    f"jdbc:sqlserver://host:1433;user=me;password={VALUE}",
    f"s3://AKIA:{VALUE}@bucket/images",
    "https://user:hu/nter2@host/f",
    "https://user:hu@nt/er2@host/f",
    "https://user:hu?nter2@host/f",
    "https://user:hu#nter2@host/f",
    f"see s3://a@b/c and s3://me:{VALUE}@bucket.",
    f"mongodb+srv://me:{VALUE}@host/db?retryWrites=true",
    "https://ghtoken-hunter2@github.com/me/private",
    f"DefaultEndpointsProtocol=https;AccountName=me;AccountKey={VALUE};EndpointSuffix=core.windows.net",
    "https://hooks.slack.com/services/T00000000/B00000000/hunter2hunter2",
]
KNOWN = [
    "AKIA" + "IOSFODNN7EXAMPLE",
    "ghp_" + "x1" * 18,
    "hf_" + "aB" * 17,
    "sk-ant-" + "api03-" + "x_" * 20,
    "xoxb-" + "1234567890-abcdef",
    "eyJhbGciOiJIUzI1NiJ9." + "eyJzdWIiOiIxMjM0In0.abc",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc\n-----END RSA PRIVATE KEY-----",
    "-----BEGIN OPENSSH PRIVATE KEY-----\nMIIE",
    "AIza" + "Sy" * 17 + "a",
    "glpat-" + "a1" * 10,
]
SECRET_FILES = words("""
.env .env.local prod.env config/prod.env .envrc .netrc .git-credentials .npmrc .pypirc .pgpass .aws/credentials
.aws/config sub/.aws/config .ssh/config .kube/config .docker/config.json id_rsa id_rsa.pub id_ecdsa id_ecdsa_sk
id_ed25519 deploy.pem deploy.PEM certs/store.p12 store.pfx Store.PFX server.key app.jks my.keytab vault.kdbx
credentials credentials.json client_secret_1.json service-account-prod.json secrets.yaml .streamlit/secrets.toml
terraform.tfvars my.ppk
""")

HARMLESS_NAMES = words("""
tokenizer tokenizer_name tokenizers max_tokens num_tokens tokens tokens_per_batch token_count token_dim pad_token
eos_token image_token keyboard monkey passthrough secretary secretion author authority authors num_keys keys sort_key
group_key cache_key image_key label_key key_dim key_padding_mask num_key_value_heads compass bypass passes forward_pass
n_pass password_file token_path secret_name key_file tls_key_path hockey turkey donkey path passenger signature
authorization_mode auth_type cwd TOKENIZERS_PARALLELISM PWD OLDPWD KEYBOARD_LAYOUT SSH_AUTH_SOCK AUTHOR_NAME
MAX_TOKENS PASSES PGHOST PGUSER design signal assignment monkey_patch lr
""")
HARMLESS_ARGUMENTS = [
    ["--tokens-per-batch=8"],
    ["--max-tokens", "4096"],
    ["--tokenizer", "bert-base"],
    ["--sort-key=name"],
    ["--author", "Anna"],
    ["--password-file", "/run/pw"],
    ["--bypass", "cache"],
    ["train.py", "--lr", "0.1", "-m", "x"],
    ["--use-auth", "yes"],
]
HARMLESS_TEXTS = [
    "https://host/path?page=2",
    "https://host:8080/a@b/c",
    "https://host/img@2x.png",
    "https://[::1]:8080/a@b",
    "https://host/f?tokenizer=bert&max_tokens=3&sort_key=name",
    "s3://bucket/token/password/secret.txt",
    "s3://bucket/day=1/part-0.parquet",
    "https://host/path@v1?design=4&mail=a@b",
    "NoSuchKey: key=images/0001.jpg is not there",
    "expected a token, got 3 keys",
    "the password: too short",
    "if token == pad_token",
    "task-specific-skills-and-other-long-words-with-dashes-in-it",
    "da39a3ee5e6b4b0d3255bfef95601890afd80709",
]
HARMLESS_FILES = words("""
environment.yaml id_map.json keys.py secrets.py tokenizer.json tokens.txt env.py environment.yml monkey.py keyboard.md
passwords.py credentials.py netrc.py .gitignore config.json docker/config.json token.py key.txt data/identity.csv
aws/config.py keynote.md
""")


def test_values_of_secret_names_are_removed_and_those_of_others_stay() -> None:
    for name in (*SECRET_NAMES, *SECRET_VARIABLES):
        assert hide_secrets({name: VALUE}) == {name: LEFT_OUT}
        assert hide_secrets({"deeper": [{name: {"a": [VALUE, 12345], "b": ""}}]}) == {
            "deeper": [{name: {"a": [LEFT_OUT, LEFT_OUT], "b": ""}}]
        }
    for name in HARMLESS_NAMES:
        assert hide_secrets({name: VALUE}) == {name: VALUE}


@pytest.mark.parametrize("arguments", SECRET_ARGUMENTS)
def test_secrets_in_arguments_are_removed(arguments: list[str]) -> None:
    hidden = hide_secrets({"args": arguments})["args"]
    assert "hu/nt" not in str(hidden)
    assert len(hidden) == len(arguments)
    assert hide_secrets(hidden) == hidden


@pytest.mark.parametrize("text", SECRET_ADDRESSES)
def test_secrets_in_addresses_are_removed(text: str) -> None:
    hidden = hide_secrets(text)
    assert not any(part in hidden for part in ("hu/nt", "nter2", "nt/er2", "hunter2")), hidden
    assert LEFT_OUT in hidden
    assert hide_secrets(hidden) == hidden


def test_known_formats_are_removed_whatever_they_are_called() -> None:
    for text in KNOWN:
        assert hide_secrets({"about": f"see {text}"}) == {"about": f"see {LEFT_OUT}"}


def test_harmless_arguments_and_texts_are_kept() -> None:
    for arguments in HARMLESS_ARGUMENTS:
        assert hide_secrets(arguments) == arguments
    for text in HARMLESS_TEXTS:
        assert hide_credentials(text) == text


def test_secret_files_are_known() -> None:
    for name in SECRET_FILES:
        assert is_secret_file(name) and is_secret_file(f"below/{name}"), name
    assert [name for name in HARMLESS_FILES if is_secret_file(name)] == []


def test_switches_and_empty_values_are_no_secrets() -> None:
    data = {"token": True, "key": "", "password": None, "use_auth_token": False}
    assert hide_secrets(data) == data


def test_list_of_variables_as_kubernetes_has_it_is_understood() -> None:
    data = [{"name": "DB_PASSWORD", "value": VALUE}, {"name": "LANG", "value": "C"}]
    assert hide_secrets(data) == [{"name": "DB_PASSWORD", "value": LEFT_OUT}, {"name": "LANG", "value": "C"}]


def test_known_secrets_are_removed_from_other_texts() -> None:
    data: dict[str, Any] = {"params": {"db_pass": "hunter2", "token": "abc", "lr": 0.1}, "args": ["--pwd", "hunter2-2"]}
    secrets = known_secrets(data)
    assert secrets == ["hunter2-2", "hunter2"]
    assert hide_known({"message": ["no hunter2-2 at abc"], "n": 1}, secrets) == {
        "message": [f"no {LEFT_OUT} at abc"],
        "n": 1,
    }


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


@pytest.mark.parametrize("text", ["a." * 40_000 + "=", "-a." * 40_000])
def test_time_for_a_long_text_of_another_user_grows_with_its_length(text: str) -> None:
    began = time.process_time()
    assert hide_credentials(text) == text
    assert time.process_time() - began < 5.0  # 40 s and 75 s, if every name was read to its end
