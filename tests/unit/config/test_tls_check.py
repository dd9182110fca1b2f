"""The files of cluster.tls are checked before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddptrain.clusters.security import make_tls
from ddptrain.config.load import load_config
from ddptrain.config.workload_check import check_tls
from ddptrain.errors import ConfigError

TEXT = """workload: petnames
cluster:
  address: tls://10.0.0.5:8786
  tls:
    ca_file: {0}/cert.pem
    cert_file: {0}/cert.pem
    key_file: {0}/{1}
"""


def problem_of(folder: Path, key: str = "key.pem") -> str:
    """The problem, without the folder; "" if there is none."""
    (folder / "c.yaml").write_text(TEXT.format(folder, key))
    try:
        check_tls(load_config(folder / "c.yaml"))
    except ConfigError as error:
        (problem,) = error.problems
        return str(problem).replace(f"{folder}/", "")
    return ""


NO_PEM = "contains no certificate (it is a PEM file with the line -----BEGIN CERTIFICATE-----)"
NO_PAIR = "is not the key of that certificate (it is a PEM file without a password that belongs to cert_file)"


def test_files_that_fit_are_no_problem(tmp_path: Path) -> None:
    make_tls(tmp_path)
    assert problem_of(tmp_path) == ""


def test_a_file_that_is_missing_is_named_with_its_line(tmp_path: Path) -> None:
    missing = "can't be read: No such file or directory (copy it from the cluster, or correct the path)"
    assert problem_of(tmp_path) == f"c.yaml:5: cluster.tls.ca_file: the file cert.pem {missing}"
    make_tls(tmp_path)
    assert problem_of(tmp_path, "other.pem") == f"c.yaml:7: cluster.tls.key_file: the file other.pem {missing}"


def test_a_file_that_is_no_certificate(tmp_path: Path) -> None:
    make_tls(tmp_path)
    (tmp_path / "cert.pem").write_text("Not found")
    assert problem_of(tmp_path) == f"c.yaml:5: cluster.tls.ca_file: the file cert.pem {NO_PEM}"


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_key_that_is_not_that_of_the_certificate(tmp_path: Path, encrypted: bool) -> None:
    from cryptography.hazmat.primitives import serialization

    other = tmp_path / "other"
    other.mkdir()
    make_tls(tmp_path)
    make_tls(other)
    if encrypted:  # OpenSSL would ask for the password
        key = serialization.load_pem_private_key((tmp_path / "key.pem").read_bytes(), None)
        form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)
        (other / "key.pem").write_bytes(key.private_bytes(*form, serialization.BestAvailableEncryption(b"secret")))
    told = problem_of(tmp_path, "other/key.pem")
    assert told == f"c.yaml:7: cluster.tls.key_file: the file other/key.pem {NO_PAIR}"


def test_a_configuration_without_certificates(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("workload: petnames\n")
    check_tls(load_config(tmp_path / "c.yaml"))
