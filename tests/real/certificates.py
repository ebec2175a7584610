"""A certificate authority of a few lines, and machines' certificates that it signed."""

import datetime
import ipaddress

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from outlast.peer.key import Tls


def authority(directory):
    """The files of one machine."""
    return machines(directory, ["machine"])[0]


def machines(directory, names):
    """The files of machines of one authority."""
    signer = ec.generate_private_key(ec.SECP256R1())
    (directory / "ca.pem").write_bytes(_signed("authority", signer, signer))
    made = []
    for name in names:
        key = ec.generate_private_key(ec.SECP256R1())
        files = {kind: directory / f"{name}-{kind}.pem" for kind in ("cert", "key")}
        files["cert"].write_bytes(_signed(name, key, signer))
        files["key"].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        made.append(Tls(**files, ca=directory / "ca.pem"))
    return made


def _signed(name, key, signer):
    now = datetime.datetime.now(datetime.UTC)
    names = [
        x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, one)])
        for one in (name, "authority")
    ]
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    builder = (
        x509.CertificateBuilder()
        .subject_name(names[0])
        .issuer_name(names[1])
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=key is signer, path_length=None), True)
        .add_extension(x509.SubjectAlternativeName([address]), False)
    )
    return builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
