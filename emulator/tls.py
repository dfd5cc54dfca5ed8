"""A certificate authority to be thrown away, and what it signed: HTTPS as in production, for this machine only."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path

import certifi
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALID = datetime.timedelta(days=30)
"""Longer than any Job may run."""


@dataclass(frozen=True)
class Certificate:
    """PEM files: the certificate of 127.0.0.1 and localhost, its key, and the authorities to check it against.

    `authorities` also holds the public ones, so that it can stand wherever they do.
    """

    chain: Path
    key: Path
    authorities: Path

    def environment(self) -> dict[str, str]:
        """The variables that make OpenSSL, httpx, aiohttp, urllib and the AWS SDKs trust it."""
        return {"SSL_CERT_FILE": str(self.authorities), "AWS_CA_BUNDLE": str(self.authorities)}

    def server_context(self) -> ssl.SSLContext:
        """For a server with this certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.chain, self.key)
        return context

    def client_context(self) -> ssl.SSLContext:
        """For a client that trusts it."""
        return ssl.create_default_context(cafile=self.authorities)


def issue(directory: Path) -> Certificate:
    """Make an authority and one certificate in `directory`. The authority's own key is not kept."""
    directory.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now(datetime.UTC)
    root_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    root_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "asyncgrpo emulator")])
    root_id = x509.SubjectKeyIdentifier.from_public_key(root_key.public_key())

    def builder(subject: x509.Name, public_key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(root_name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + VALID)
        )

    root = (
        builder(root_name, root_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(root_id, critical=False)
        .sign(root_key, hashes.SHA256())
    )
    names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
    leaf = (
        builder(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")]), key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(root_id),
            critical=False,
        )
        .sign(root_key, hashes.SHA256())
    )
    made = Certificate(directory / "server.pem", directory / "server.key", directory / "authorities.pem")
    made.chain.write_bytes(leaf.public_bytes(serialization.Encoding.PEM))
    made.key.touch(mode=0o600)
    made.key.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    public = Path(certifi.where()).read_bytes()
    made.authorities.write_bytes(root.public_bytes(serialization.Encoding.PEM) + public)
    return made


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )
