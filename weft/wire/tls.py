"""TLS for the messages of a run: one key pair and self-signed certificate, derived by every process from the secret.

Both sides must present this certificate. Keys are exchanged anew for every connection (TLS 1.3), so a secret that
becomes known later does not reveal recorded traffic.
"""

from __future__ import annotations

import datetime
import functools
import hmac
import importlib.util
import ssl
import tempfile

from weft.job.errors import MachineError

VALID_FROM, VALID_UNTIL = datetime.datetime(2020, 1, 1), datetime.datetime(2200, 1, 1)
"""Fixed, so that the certificate is the same in every process; it is trusted by its key, not by its dates."""


def check_tls_package() -> None:
    """Raise if the package for certificates is not installed."""
    if importlib.util.find_spec("cryptography") is None:
        raise MachineError("comm.encrypt needs the package cryptography: pip install 'weft[encrypt]'")


@functools.lru_cache(maxsize=8)
def tls_context(secret: bytes, server: bool) -> ssl.SSLContext:
    """The TLS settings of one side of a connection."""
    certificate, key = _certificate(secret)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate)
    with tempfile.NamedTemporaryFile("w") as file:  # mode 0600; load_cert_chain() reads files only
        file.write(certificate + key)
        file.flush()
        context.load_cert_chain(file.name)
    return context


def _certificate(secret: bytes) -> tuple[str, str]:
    """The run's certificate and private key, as PEM. Ed25519 signatures are deterministic."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.from_private_bytes(hmac.digest(secret, b"weft tls key", "sha256"))
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "weft run")])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, VALID_FROM, VALID_UNTIL)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, algorithm=None)
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return made.public_bytes(serialization.Encoding.PEM).decode(), private.decode()
