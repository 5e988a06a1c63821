"""All files of a federation of N nodes: app, certificates, keys, and a script for each machine.

FOLDER/
  app/pyproject.toml         the Flower app: what `flwr run` takes
  superlink/start.sh         start the server, with its certificate and key
  node-0/start.sh ...        start a node: copy its folder to its machine
  register.sh                tell the server the nodes' public keys, once
  run.sh                     train: run.sh --run-config "rounds=20"
  flwr/config.toml           where the `flwr` command finds the server
  README.txt                 what to type, in which order
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
import shlex
import shutil
from importlib.metadata import version
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from ..errors import FedscError
from ..files import explain_write_errors, read_text, write_atomically
from .config import app_pyproject

HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")  # it goes into shell scripts
LOOPBACK = ("localhost", "127.0.0.1", "::1")
DAYS_VALID = 365
ENVIRONMENT = """\
#!/bin/sh
# {what}
set -eu
cd "$(dirname "$0"){up}"
export FLWR_HOME="$PWD/flwr" FLWR_TELEMETRY_ENABLED=0
"""
SUPERLINK = """\
# After a crash a helper of the old server lives on for some seconds, and would take a new run with
# it: wait until it is gone. The server of a run may live on, too, to report to the next SuperLink
# that it has failed, and until then nobody else may go on with its run: end it.
n=0
while [ $n -lt 60 ] && pgrep -f "flower-superexec.*127.0.0.1:{port} " > /dev/null; do
  n=$((n + 1)); sleep 1
done
pkill -KILL -f "flwr-serverapp.*127.0.0.1:{port} " || true
exec flower-superlink --host {host} --port {port} \\
  --ssl-ca-certfile ca.crt --ssl-certfile superlink/server.crt --ssl-keyfile superlink/server.key \\
  --enable-supernode-auth --database superlink/state.db \\
  --disable-runtime-dependency-installation "$@"
"""
NODE = """\
CONFIG='partition-id={client}'" state-dir='$PWD/state'"
# Its own images: DATA=folder:/path or DATA=npz:/path.npz, and run with partition = "own".
if [ -n "${{DATA:-}}" ]; then CONFIG="$CONFIG data='$DATA'"; fi
exec flower-supernode --superlink {address} --root-certificates ca.crt \\
  --auth-supernode-private-key key --port {port} --node-config "$CONFIG" "$@"
"""
CONNECTION = """\
[superlink]
default = "federation"

[superlink.federation]
address = "{address}"
root-certificates = "{ca}"
"""


def try_command(app: Path) -> str:
    """Four simulated nodes. Flower would install fedsc and PyTorch anew if it were not told not to,
    and fedsc is on no package index."""
    return (
        f"FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 flwr run {shlex.quote(str(app))} local "
        '--stream --federation-config "num-supernodes=4 client-resources-num-cpus=1" '
        "--run-config \"clients=4 rounds=3 method='fedsc' threads=1\""
    )


def write_app(folder: Path) -> None:
    """The app folder for `flwr run`; an app that was written before is replaced."""
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    path, text = folder / "pyproject.toml", app_pyproject(version("fedsc"))
    if path.exists() and read_text(path).partition("\n")[0] != text.partition("\n")[0]:
        raise FedscError(f"{path} is of another project: choose another folder")
    write_atomically(path, text.encode())


def write_federation(folder: Path, num_nodes: int, address: str) -> list[str]:
    """All files; returns the commands to type, in their order. Keys are for trials: see docs."""
    host, port = split_address(address)
    if folder.exists() and not folder.is_dir():
        raise FedscError(f"{folder} is a file: choose another folder")
    if folder.exists() and any(folder.iterdir()):
        raise FedscError(f"{folder} is not empty: choose another folder")
    commands = [
        f"{folder}/superlink/start.sh      on the server, and leave it running",
        f"{folder}/register.sh             on the server, once",
        *(f"{folder}/node-{k}/start.sh         on machine {k}" for k in range(num_nodes)),
        f"{folder}/run.sh --stream --run-config 'clients={num_nodes} rounds=3'",
    ]
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        with explain_write_errors(folder):
            part.mkdir(parents=True)
            fill(part, folder.resolve(), num_nodes, host, port)
            (part / "README.txt").write_text("\n".join(commands) + "\n")
            if folder.exists():
                folder.rmdir()
            part.rename(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return commands


def split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not is_host(host) or not port.isdecimal() or not 0 < int(port) < 65536:
        raise FedscError(f"address '{address}' is not HOST:PORT, such as localhost:9092")
    return host, int(port)


def is_host(text: str) -> bool:
    try:
        return bool(HOST_NAME.fullmatch(text) or ipaddress.ip_address(text))
    except ValueError:
        return False


def fill(part: Path, final: Path, num_nodes: int, host: str, port: int) -> None:
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    write_app(part / "app")
    for name in ("superlink", "flwr", *(f"node-{k}" for k in range(num_nodes))):
        (part / name).mkdir()
    ca, server, server_key = make_certificates(host)
    (part / "ca.crt").write_bytes(ca)
    (part / "superlink" / "server.crt").write_bytes(server)
    write_secret(part / "superlink" / "server.key", server_key)
    bind = "127.0.0.1" if host in LOOPBACK else "0.0.0.0"
    text = SUPERLINK.format(host=bind, port=port)
    script(part / "superlink" / "start.sh", "The server.", "/..", text)
    registrations = []
    for k in range(num_nodes):
        node = part / f"node-{k}"
        private, public = make_node_key()
        write_secret(node / "key", private)
        (node / "key.pub").write_bytes(public)
        (node / "ca.crt").write_bytes(ca)
        # Each node serves its own app at a port of its own, in case they share a machine.
        text = NODE.format(client=k, address=address, port=port + 1 + k)
        script(node / "start.sh", f"Client {k}.", "", text)
        registrations.append(f"flwr supernode register node-{k}/key.pub federation\n")
    script(part / "register.sh", "Tell the server the nodes' keys.", "", "".join(registrations))
    script(part / "run.sh", "Train.", "", 'exec flwr run app federation "$@"\n')
    connection = CONNECTION.format(address=address, ca=final / "ca.crt")
    (part / "flwr" / "config.toml").write_text(connection)


def script(path: Path, what: str, up: str, text: str) -> None:
    path.write_text(ENVIRONMENT.format(what=what, up=up) + text)
    path.chmod(0o755)


def write_secret(path: Path, content: bytes) -> None:
    """Readable for its owner only, from the first moment."""
    with open(path, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(content)


def make_certificates(host: str) -> tuple[bytes, bytes, bytes]:
    """A certificate authority, a certificate for `host` signed by it, and that one's key.

    The authority's own key is thrown away: nothing else can be signed with it.
    """
    ca_key, server_key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    ca_name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "fedsc trial CA")])
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, host[:64])])
    ca = (
        certificate(ca_name, ca_name, ca_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(key_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key()), False)
        .sign(ca_key, hashes.SHA256())
    )
    server = (
        certificate(name, ca_name, server_key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(key_usage(signs=False), critical=True)
        .add_extension(x509.SubjectAlternativeName(alternative_names(host)), False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), False
        )
        .sign(ca_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    key = server_key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return ca.public_bytes(pem), server.public_bytes(pem), key


def certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=DAYS_VALID))
    )


def key_usage(signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def alternative_names(host: str) -> list[x509.GeneralName]:
    """The server's name, and loopback: the server's own processes reach it there."""
    names: list[x509.GeneralName] = []
    for name in dict.fromkeys((host, *LOOPBACK)):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(name)))
        except ValueError:
            names.append(x509.DNSName(name))
    return names


def make_node_key() -> tuple[bytes, bytes]:
    """A private and a public key as ssh-keygen writes them, which is how Flower reads them."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    return private, public + b"\n"
