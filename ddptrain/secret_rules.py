"""The rules for names, text formats and files that contain secrets; all modules use these rules.

The rules follow detect-secrets 1.5 (KeywordDetector, BasicAuthDetector, the detectors of known token formats) and the
token formats of gitleaks. Neither is a dependency: both look for secrets in the lines of source files, where
`secretary = "x"` counts as a secret. Neither can judge a name without a value.
"""

from __future__ import annotations

import re
from functools import cache, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathspec import PathSpec


def _words(text: str) -> frozenset[str]:
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
_ABOUT = _words(
    """
    age algorithm args chars column count dim dir directory embedding enabled env expires expiry field file
    filename folder format header kind len length manager mode name names path policy prefix provider required
    scheme size suffix ttl type types url uri var version
    """
)
# "key", "token", "pass" and "auth" have other meanings after these words.
_HARMLESS_BEFORE = {
    "key": _words(
        """
    answer any arrow attention audio batch by cache caption class column compare comparison config cursor data
    default dict drop example extra feature field file first foreign group grouping has hot id ignore image img
    index input instruction is item join json keep label last lookup loss map max metric min model monitor n
    name next no num object option order output partition path per prefix primary prompt public query question
    rank record response row run sample section sequence shard sort sorting state strip target text to train
    unique use val value video with
    """
    ),
    "token": _words(
        """
    additional audio begin bos class cls end eos extra first image img last mask max min n next no num pad per
    prev sep special start stop text unk video vision vocab word
    """
    ),
    "pass": _words(
        """
    all back backward band by each eval every first forward full high last low max min multi n next num one per
    second single third train two val warmup
    """
    ),
    "auth": _words("disable enable has is need needs no require requires skip use with"),
}
# After these words, "key", "keys", "token" and "tokens" always mean a secret.
_CREDENTIAL_BEFORE = _words(
    """
    access account anthropic api auth aws azure bearer bot client cohere db database deploy encryption gcp
    github gitlab google hf hub huggingface license master mistral npm oauth openai private pypi refresh
    registry s3 secret security service session shared signing slack ssh storage stripe telegram vault wandb
    """
)
_SIGNATURES = frozenset({"hmac", "sig", "signature"})  # in the query of a URL


@lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Return whether a parameter, variable, option or field of that name probably contains a secret."""
    if name in _WORKING_DIRECTORY:
        return False
    words = [word.lower() for word in _WORD.findall(name)]
    if not words or (len(words) > 1 and words[-1] in _ABOUT):
        return False
    if _STRONG.search("".join(words)) or not _STRONG_WORDS.isdisjoint(words) or words[-1].endswith("pwd"):
        return True
    if words[-1] in _HARMLESS_BEFORE and (len(words) == 1 or words[-2] not in _HARMLESS_BEFORE[words[-1]]):
        return True
    pairs = pairwise(words)
    return any(one in _CREDENTIAL_BEFORE and two in ("key", "keys", "token", "tokens") for one, two in pairs)


def is_secret_in_query(name: str) -> bool:
    """Return whether a part of a URL's query of that name probably contains a secret, or a signature."""
    words = [word.lower() for word in _WORD.findall(name)]
    return is_secret_name(name) or (bool(words) and words[-1] in _SIGNATURES)


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
