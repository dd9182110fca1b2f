"""Removes secrets from data that are written or sent; the only rules for names, texts and files that contain secrets.

The rules follow detect-secrets 1.5 (KeywordDetector, BasicAuthDetector) and the token formats of gitleaks. Neither is a
dependency: both look for secrets in source files, where `secretary = "x"` is one, and judge no name without a value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathspec import PathSpec

LEFT_OUT = "<left out>"
_SHORTEST_SECRET = 4  # shorter numbers are not secrets; shorter texts occur within other text


# --- data ---


def holds_secret(path: Sequence[str | int]) -> bool:
    """Return whether the value at a key of a configuration, as ("env", "WANDB_API_KEY"), is probably secret."""
    return any(is_secret_name(part) for part in path if isinstance(part, str))


def hide_secrets(value: Any, *, in_secret: bool = False) -> Any:
    """Return the data without the texts and numbers at or below a secret name, and without secrets inside texts.

    A list of texts is handled as the arguments of a program: `--password X`, `--token=X`.
    """
    if isinstance(value, Mapping):
        named_secret = is_secret_name(str(value.get("name", "")))  # {name: DB_PASSWORD, value: X}, as in Kubernetes
        return {
            name: hide_secrets(
                below, in_secret=in_secret or is_secret_name(str(name)) or (named_secret and name == "value")
            )
            for name, below in value.items()
        }
    if isinstance(value, list | tuple):
        if not in_secret and all(isinstance(below, str) for below in value):
            return _hide_arguments(value)
        return [hide_secrets(below, in_secret=in_secret) for below in value]
    if isinstance(value, str):
        return LEFT_OUT if in_secret and value else hide_credentials(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return LEFT_OUT if in_secret and is_number and len(str(value)) >= _SHORTEST_SECRET else value


def _hide_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a program without the values of options with secret names."""
    kept: list[str] = []
    follows_secret = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        is_value = follows_secret and not argument.startswith("--")
        is_secret = not any(char.isspace() for char in name) and "://" not in name and is_secret_name(name)
        follows_secret = not is_value and is_secret and not equals and argument.startswith("-")
        hidden = f"{name}={LEFT_OUT}" if is_secret and equals else hide_credentials(argument)
        kept.append(LEFT_OUT if is_value else hidden)
    return kept


def known_secrets(*values: Any) -> list[str]:
    """Return the secrets in the data that are long enough to search in other texts, the longest first."""
    secrets = {text for value in values for text in _changed(value, hide_secrets(value))}
    return sorted((text for text in secrets if len(text) >= _SHORTEST_SECRET), key=len, reverse=True)


def _changed(value: Any, hidden: Any) -> Iterator[str]:
    if isinstance(value, Mapping | list | tuple):
        for key in value if isinstance(value, Mapping) else range(len(value)):
            yield from _changed(value[key], hidden[key])
    elif value != hidden:
        yield str(value)


def hide_known(value: Any, secrets: Iterable[str]) -> Any:
    """Return the data with LEFT_OUT in place of each of these texts."""
    if isinstance(value, Mapping):
        return {name: hide_known(below, secrets) for name, below in value.items()}
    if isinstance(value, list | tuple):
        kept = [hide_known(below, secrets) for below in value]
        return kept if isinstance(value, list) else tuple(kept)
    for secret in secrets if isinstance(value, str) else ():
        value = value.replace(secret, LEFT_OUT)
    return value


# --- texts ---

_ADDRESS = re.compile(r"(?<=://)(?:(?!://)\S)+")
# What is before the name, the name, what is between, and the value. A name has a longest length: without it, a text
# such as "a.a.a.a=" takes a time that grows with its length squared.
_IN_QUERY = re.compile(r"([?&;#])([^=&;#?\s]+)(=)(?!<left out>)[^&;#\s\"']+")
_ASSIGNED = re.compile(
    r"(?<![\w-])()([A-Za-z_][\w.-]{0,200})(\s?=\s?)(?!=|<left out>)(?:\"[^\"]*\"|'[^']*'|[^\s;&,'\"]+)"
)
_IN_JSON = re.compile(r"([\"'])([\w.-]+)(\1\s*:\s*[\"']?)(?:(?<=\")[^\"]*|(?<=')[^']*|(?<![\"'])[0-9]+)")
_OPTION = re.compile(r"(?<![\w-])(--?)([A-Za-z][\w.-]{0,200})([\s,\"']+)(?!<left out>)[^\s,\"'-][^\s,\"']*")


def hide_credentials(text: str) -> str:
    """Return the text without secrets in URLs, values assigned to secret names, and texts of known secret formats."""
    if "://" in text:
        text = _IN_QUERY.sub(_hide_value, _ADDRESS.sub(_hide_user_info, text))
    for mark, pattern in (("=", _ASSIGNED), (":", _IN_JSON), ("-", _OPTION)):
        if mark in text:
            text = pattern.sub(_hide_value, text)
    return KNOWN_FORMATS.sub(LEFT_OUT, text)


def _hide_value(found: re.Match[str]) -> str:
    before, name, between = found[1], found[2], found[3]
    in_query = before in ("?", "&", ";", "#")
    # In messages, `key=` alone is often the name of an object in a store.
    is_secret = is_secret_name(name) and (in_query or name != "key" or before != "")
    is_signature = in_query and _words_of(name)[-1:] in (["hmac"], ["sig"], ["signature"])
    return f"{before}{name}{between}{LEFT_OUT}" if is_secret or is_signature else found[0]


def _hide_user_info(address: re.Match[str]) -> str:
    """Return the text after "://" without user and password; the password may contain "/", "?" and "@" by mistake."""
    rest = address[0]
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    user_info, at, _ = authority.rpartition("@")
    _, colon, password = (user_info if at else authority).partition(":")
    if at and not colon:
        return LEFT_OUT + rest[len(user_info) :]
    if not colon or (not at and (not password or password.isdigit() or authority.startswith("["))):
        return rest  # no user: a port, or nothing, follows the host
    end = re.split(r"[?#]", rest, maxsplit=1)[0].rfind("@")
    end = rest.rfind("@") if end < 0 else end
    return rest if end < 0 else LEFT_OUT + rest[end:]


# --- names ---


def _listed(text: str) -> frozenset[str]:
    return frozenset(text.split())


_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_WORKING_DIRECTORY = frozenset({"PWD", "OLDPWD"})  # of a shell; `pwd` in lower case is a password
# Anywhere in a name, without separators.
_STRONG = re.compile(
    r"passw(?:or)?d|passwort|passphrase|passcode|secret(?!ar|ion|ly|ing)|credential|contrase[nñ]a|apikey"
    r"|(?:access|account|auth|client|db|database|encryption|master|priv|private|service|shared|signing|storage)key"
    r"|(?:access|api|auth|bearer|oauth|refresh|session)token|connectionstring|connectionstr|connstring|connstr"
    r"|authorization|(?:db|ftp|http|https|imap|jdbc|ldap|login|mail|mongo|my|pg|postgres|proxy|redis|root|smtp|sql|ssh"
    r"|user|admin)(?:pass|pwd|pw)$"
)
_STRONG_WORDS = frozenset({"bearer", "cookie", "cookies", "dsn", "jwt", "otp", "sas", "totp"})
# The last word of names whose value describes a secret, or its location, but is not the secret.
_ABOUT = _listed("""
age algorithm args chars column count dim dir directory embedding enabled env expires expiry field file
filename folder format header kind len length manager mode name names path policy prefix provider required
scheme size suffix ttl type types url uri var version
""")
# "key", "token", "pass" and "auth" have other meanings after these words.
_HARMLESS_BEFORE = {
    "key": _listed("""
answer any arrow attention audio batch by cache caption class column compare comparison config cursor data
default dict drop example extra feature field file first foreign group grouping has hot id ignore image img
index input instruction is item join json keep label last lookup loss map max metric min model monitor n
name next no num object option order output partition path per prefix primary prompt public query question
rank record response row run sample section sequence shard sort sorting state strip target text to train
unique use val value video with
"""),
    "token": _listed("""
additional audio begin bos class cls end eos extra first image img last mask max min n next no num pad per
prev sep special start stop text unk video vision vocab word
"""),
    "pass": _listed("""
all back backward band by each eval every first forward full high last low max min multi n next num one per
second single third train two val warmup
"""),
    "auth": _listed("disable enable has is need needs no require requires skip use with"),
}
# After these words, "key", "keys", "token" and "tokens" always mean a secret.
_CREDENTIAL_BEFORE = _listed("""
access account anthropic api auth aws azure bearer bot client cohere db database deploy encryption gcp
github gitlab google hf hub huggingface license master mistral npm oauth openai private pypi refresh
registry s3 secret security service session shared signing slack ssh storage stripe telegram vault wandb
""")


def _words_of(name: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(name)]


@lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Return whether a parameter, variable, option or field of that name probably contains a secret."""
    if name in _WORKING_DIRECTORY:
        return False
    words = _words_of(name)
    if not words or (len(words) > 1 and words[-1] in _ABOUT):
        return False
    if _STRONG.search("".join(words)) or not _STRONG_WORDS.isdisjoint(words) or words[-1].endswith("pwd"):
        return True
    if words[-1] in _HARMLESS_BEFORE and (len(words) == 1 or words[-2] not in _HARMLESS_BEFORE[words[-1]]):
        return True
    pairs = pairwise(words)
    return any(one in _CREDENTIAL_BEFORE and two in ("key", "keys", "token", "tokens") for one, two in pairs)


# Texts that are secrets under any name.
KNOWN_FORMATS = re.compile(
    r"""
    -----BEGIN\ (?:[A-Z0-9]+\ )*PRIVATE\ KEY(?:\ BLOCK)?-----.*?(?:-----END\ [A-Z0-9 ]+-----|\Z)
    | \b(?:A3T[A-Z0-9]|AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}\b                    # AWS
    | \b(?:gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{22,}|glpat-[\w-]{20,})   # GitHub, GitLab
    | \bhf_[A-Za-z0-9]{30,} | \bwandb_v1_\w{20,}                             # Hugging Face, W&B
    | \bsk-(?:(?:ant|proj|svcacct|admin)-[\w-]{20,}|[A-Za-z0-9]{32,})        # OpenAI, Anthropic
    | \bxox[abeoprs]-[\w-]{10,} | (?<=hooks\.slack\.com/services/)[\w/+-]+   # Slack
    | \b[rs]k_(?:live|test)_[0-9A-Za-z]{16,} | \bAIza[\w-]{35}               # Stripe, Google
    | \bnpm_[A-Za-z0-9]{36} | \bpypi-AgEIcHlwaS5vcmc[\w-]{20,}               # npm, PyPI
    | \bSG\.[\w-]{22}\.[\w-]{43} | \beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*      # SendGrid, JSON web tokens
    | (?i:\bbearer\s+)[\w.~+/=-]{12,}
    """,
    re.VERBOSE | re.DOTALL,
)

# In the syntax of gitignore; compared without regard to case.
_FILES_LEFT_OUT = """
.env .env.* *.env .envrc .netrc _netrc .git-credentials .npmrc .yarnrc.yml .pypirc .pgpass .my.cnf .mylogin.cnf
.boto .s3cfg .htpasswd .dockercfg **/.docker/config.json .vault-token .terraformrc .databrickscfg
.aws/ .azure/ .ssh/ .gnupg/ .kube/ .oci/ .gcloud/ **/.config/gcloud/ .huggingface/
*.pem *.key *.p12 *.pfx *.p8 *.jks *.keystore *.ppk *.kdbx *.keytab *.tfvars *.tfstate *.gpg
id_rsa* id_dsa* id_ecdsa* id_ed25519* id_xmss*
credentials .credentials credentials.json credentials.yaml credentials.yml client_secret*.json
service-account*.json service_account*.json application_default_credentials.json
secrets.json secrets.toml secrets.yaml secrets.yml .secrets kubeconfig
"""


@cache
def _secret_files() -> PathSpec[Any]:
    from pathspec import PathSpec

    return PathSpec.from_lines("gitignore", _FILES_LEFT_OUT.split())


def is_secret_file(path: str) -> bool:
    """Return whether a file at that path, relative to a project, probably contains secrets."""
    return _secret_files().match_file(path.lower())
