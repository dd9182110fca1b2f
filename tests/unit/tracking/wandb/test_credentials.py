"""To which server the key of W&B goes: the user says it, never a run directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddptrain.tracking.wandb.credentials import Access, access_to

KEY, OTHER = "k" * 40, "n" * 40
OWN, FOREIGN = "https://w.example", "https://foreign.example"


@pytest.mark.parametrize(
    ("named", "environ", "netrc", "settings", "expected"),
    [
        # The run names no server, or the user's own one.
        ("", {"WANDB_API_KEY": KEY}, "", "", Access(KEY)),
        ("", {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": OWN}, "", "", Access(KEY, OWN)),
        (f"{OWN}/", {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": OWN}, "", "", Access(KEY, OWN)),
        ("https://W.example:443", {"WANDB_API_KEY": KEY}, "", f"base_url = {OWN}", Access(KEY, OWN)),
        ("https://api.wandb.ai", {"WANDB_API_KEY": KEY}, "", "", Access(KEY)),
        # The user says where it is to go.
        (FOREIGN, {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": OWN}, "", "", Access(KEY, OWN)),
        # The run names another server.
        (FOREIGN, {"WANDB_API_KEY": KEY}, "", "", None),
        (FOREIGN, {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": ""}, "", "", None),
        (FOREIGN, {"WANDB_API_KEY": KEY}, "", f"base_url = {OWN}", None),
        (FOREIGN, {"WANDB_IDENTITY_TOKEN_FILE": "/token"}, "", "", None),
        (FOREIGN, {}, "", f"api_key = {KEY}", None),
        (FOREIGN, {}, f"machine api.wandb.ai password {KEY}", "", None),
        (FOREIGN, {}, f"default login user password {KEY}", "", None),
        ("https://api.wandb.ai.foreign.example", {"WANDB_API_KEY": KEY}, "", "", None),
        ("https://api.wandb.ai@foreign.example", {"WANDB_API_KEY": KEY}, "", "", None),
        ("http://w.example", {"WANDB_API_KEY": KEY}, "", f"base_url = {OWN}", None),
        ("https://w.example:8443", {"WANDB_API_KEY": KEY}, "", f"base_url = {OWN}", None),
        ("https://[", {"WANDB_API_KEY": KEY}, "", "", None),
        ("https://w.example:port", {"WANDB_API_KEY": KEY}, "", "", None),
        # A key of ~/.netrc is for its server alone, and is not sent in clear over a network.
        (OWN, {}, f"machine w.example password {OTHER}\ndefault password {KEY}", "", Access(OTHER, OWN)),
        (OWN, {"WANDB_API_KEY": KEY}, f"machine w.example password {OTHER}", "", None),
        ("http://w.example", {}, f"machine w.example password {OTHER}\nmachine api.wandb.ai password {KEY}", "", None),
        ("http://127.0.0.1:80", {}, f"machine 127.0.0.1:80 password {OTHER}", "", Access(OTHER, "http://127.0.0.1:80")),
        # There is no key at all.
        (FOREIGN, {}, "", "", Access()),
    ],
)
def test_credentials_go_only_to_a_server_that_the_user_has_chosen(
    named: str, environ: dict[str, str], netrc: str, settings: str, expected: Access | None, tmp_path: Path
) -> None:
    (tmp_path / ".config/wandb").mkdir(parents=True)
    (tmp_path / ".config/wandb/settings").write_text(f"[default]\n{settings}\n")
    (tmp_path / ".netrc").write_text(netrc)
    assert access_to(named, {"HOME": str(tmp_path), **environ}) == expected
