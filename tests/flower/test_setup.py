"""`fedsc flower setup`: files that fit together, and secrets that stay secret."""

from __future__ import annotations

import ipaddress
import os
import ssl
import subprocess
import tomllib
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.common.config import parse_config_args
from typer.testing import CliRunner

from fedsc import FedscError
from fedsc.cli import app
from fedsc.flower.setup import write_app, write_federation


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("setup") / "federation"
    words = ["flower", "setup", str(folder), "--nodes", "2", "--address", "fl.example.org:9092"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0
    assert result.output.count("start.sh") == 3
    return folder


def test_the_app_is_run_as_the_documentation_says(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["flower", "app", str(tmp_path / "app")])
    assert result.exit_code == 0
    page = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text()
    block = page.split("    fedsc flower app app\n")[1].split("\n\n")[0]
    command = " ".join(block.replace("\\\n", " ").split())
    assert command.startswith("FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 flwr run app local ")
    assert command.replace(" app ", f" {tmp_path / 'app'} ") in result.output


def test_the_servers_certificate_is_for_its_name_and_signed_by_the_ca(federation: Path) -> None:
    ca = x509.load_pem_x509_certificate((federation / "ca.crt").read_bytes())
    certificate, key = (federation / "superlink" / f"server.{end}" for end in ("crt", "key"))
    server = x509.load_pem_x509_certificate(certificate.read_bytes())
    server.verify_directly_issued_by(ca)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fl.example.org", "localhost"]
    assert ipaddress.ip_address("127.0.0.1") in names.get_values_for_type(x509.IPAddress)
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)


def test_every_node_has_a_key_of_its_own_that_others_cannot_read(federation: Path) -> None:
    public = set()
    for k in range(2):
        node = federation / f"node-{k}"
        key = serialization.load_ssh_private_key((node / "key").read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        own = key.public_key().public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
        assert (node / "key.pub").read_bytes().strip() == own
        public.add(own)
        assert (node / "ca.crt").read_bytes() == (federation / "ca.crt").read_bytes()
    assert len(public) == 2
    for secret in (*federation.glob("node-*/key"), federation / "superlink/server.key"):
        assert secret.stat().st_mode & 0o077 == 0


def test_the_scripts_start_what_the_documentation_says(federation: Path) -> None:
    superlink = (federation / "superlink" / "start.sh").read_text()
    for flag in ("--enable-supernode-auth", "--disable-runtime-dependency-installation"):
        assert flag in superlink
    assert "--host 0.0.0.0 --port 9092" in superlink
    assert "--insecure" not in superlink
    connection = tomllib.loads((federation / "flwr/config.toml").read_text())["superlink"]
    assert connection["federation"]["address"] == "fl.example.org:9092"
    assert Path(connection["federation"]["root-certificates"]) == federation / "ca.crt"


def test_a_node_is_told_its_partition_and_where_its_images_are(
    federation: Path, tmp_path: Path
) -> None:
    """With a program in the place of flower-supernode that prints what it was given."""
    printer = tmp_path / "flower-supernode"
    printer.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    printer.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [federation / "node-1" / "start.sh"],
        env={**os.environ, "PATH": path, "DATA": "folder:/data/x rays"},
        capture_output=True,
        text=True,
        check=True,
    )
    words = done.stdout.splitlines()
    assert parse_config_args([words[words.index("--node-config") + 1]]) == {
        "partition-id": 1,
        "state-dir": str(federation / "node-1" / "state"),
        "data": "folder:/data/x rays",
    }
    assert words[words.index("--superlink") + 1] == "fl.example.org:9092"


@pytest.mark.parametrize(
    "address",
    ["localhost", ":9092", "localhost:x", "localhost:99999", "a b:9092", "$(date):9092", "-x:9092"],
)
def test_an_address_needs_host_and_port(address: str, tmp_path: Path) -> None:
    with pytest.raises(FedscError, match="is not HOST:PORT"):
        write_federation(tmp_path / "f", 2, address)
    assert not (tmp_path / "f").exists()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(FedscError, match="is not empty"):
        write_federation(tmp_path, 2, "localhost:9092")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_an_app_does_not_replace_another_project(tmp_path: Path) -> None:
    write_app(tmp_path / "app")
    write_app(tmp_path / "app")  # its own, as after an upgrade
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "mine"\n')
    with pytest.raises(FedscError, match="of another project"):
        write_app(tmp_path)
    assert "mine" in (tmp_path / "pyproject.toml").read_text()


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(FedscError, match="is a file"):
        write_federation(tmp_path / "mine.txt", 2, "localhost:9092")


@pytest.mark.parametrize("address", ["[::1]:9092", "10.0.0.1:9092", "fl-1.example.org:9092"])
def test_addresses_of_all_kinds(address: str, tmp_path: Path) -> None:
    write_federation(tmp_path / "f", 1, address)
    assert f"--superlink {address} " in (tmp_path / "f" / "node-0" / "start.sh").read_text()
