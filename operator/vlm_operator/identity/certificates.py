"""Creates CAs and leaf certificates: EC P-256, SHA-256, PKCS#8 keys in PEM."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from vlm_operator import names
from vlm_operator.identity.schedule import BACKDATE_SECONDS, Validity
from vlm_operator.names import Role
from vlm_operator.state.identities import dns_name, spiffe_id


@dataclasses.dataclass(frozen=True)
class Pair:
    """A certificate and its key as PEM; `validity.serial` is hexadecimal."""

    certificate: str
    key: str = dataclasses.field(repr=False)
    validity: Validity


def new_authority(*, seconds: float, now: float) -> Pair:
    """Create a self-signed CA that is valid for `seconds`."""
    key = ec.generate_private_key(ec.SECP256R1())
    serial = x509.random_serial_number()
    subject = _name(f"Triptych CA {serial:x}"[:64])  # a chain is found by the subject
    builder = _builder(subject, subject, key, serial, end=now + seconds, now=now)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_key_usage(authority=True), critical=True)
    return _pair(builder.sign(key, hashes.SHA256()), key)


def issue(
    authority: Pair, *, namespace: str, service: str, role: Role, seconds: float, now: float
) -> Pair:
    """Issue a certificate of one role, valid as server and client.

    It ends after `seconds`, and not after its CA.
    """
    signer = x509.load_pem_x509_certificate(authority.certificate.encode())
    key = ec.generate_private_key(ec.SECP256R1())
    end = min(now + seconds, authority.validity.not_after)
    serial = x509.random_serial_number()
    builder = _builder(_name(role.value), signer.subject, key, serial, end=end, now=now)
    alternative = [
        x509.UniformResourceIdentifier(spiffe_id(namespace, service, role)),
        x509.DNSName(dns_name(namespace, service, role)),
    ]
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    signer_id = signer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    builder = (
        builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(authority=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.SubjectAlternativeName(alternative), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(signer_id),
            critical=False,
        )
    )
    return _pair(builder.sign(_load_key(authority.key), hashes.SHA256()), key)


def load(certificate: str, key: str) -> Pair:
    """Read a certificate and its key.

    Raises:
        ValueError: one is no PEM of its kind, or they do not belong together.
    """
    loaded, own = x509.load_pem_x509_certificate(certificate.encode()), _load_key(key)
    if loaded.public_key() != own.public_key():
        raise ValueError("the key does not belong to the certificate")
    return _pair(loaded, own)


def digest(bundle: str) -> str:
    """Return a short digest of a bundle of trust anchors."""
    return hashlib.sha256(bundle.encode()).hexdigest()[:16]


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    serial: int,
    *,
    end: float,
    now: float,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(serial)
        .not_valid_before(_moment(now - BACKDATE_SECONDS))
        .not_valid_after(_moment(end))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _name(common: str) -> x509.Name:
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, names.GROUP),
            x509.NameAttribute(NameOID.COMMON_NAME, common),
        ]
    )


def _key_usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pair(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Pair:
    return Pair(
        certificate=certificate.public_bytes(serialization.Encoding.PEM).decode(),
        key=key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ).decode(),
        validity=Validity(
            serial=f"{certificate.serial_number:x}",
            not_before=certificate.not_valid_before_utc.timestamp(),
            not_after=certificate.not_valid_after_utc.timestamp(),
        ),
    )


def _load_key(key: str) -> ec.EllipticCurvePrivateKey:
    loaded = serialization.load_pem_private_key(key.encode(), password=None)
    if not isinstance(loaded, ec.EllipticCurvePrivateKey):
        raise ValueError("the key is no EC key")
    return loaded


def _moment(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(int(seconds), datetime.UTC)
