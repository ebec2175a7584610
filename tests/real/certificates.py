"""A certificate authority of a few lines, and a machine's certificate that it signed."""

import datetime
import ipaddress

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from outlast.peer.tls import Tls


def authority(directory):
    now = datetime.datetime.now(datetime.UTC)
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    names = [
        x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        for name in ("authority", "machine")
    ]
    for position, file in enumerate(("ca.pem", "cert.pem")):
        builder = (
            x509.CertificateBuilder()
            .subject_name(names[position])
            .issuer_name(names[0])
            .public_key(keys[position].public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=position == 0, path_length=None), True)
            .add_extension(
                x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
                False,
            )
        )
        signed = builder.sign(keys[0], hashes.SHA256())
        (directory / file).write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    (directory / "key.pem").write_bytes(
        keys[1].private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return Tls(cert=directory / "cert.pem", key=directory / "key.pem", ca=directory / "ca.pem")
