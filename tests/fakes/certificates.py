"""Certificates for tests: a certificate authority that uses the openssl command."""

import shutil
import ssl
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="the openssl command is not installed"
)

_EC_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")


class Pair(NamedTuple):
    """Paths of a certificate and its key."""

    certificate: str
    key: str


class Authority:
    """Signs certificates for 127.0.0.1; all files are in `folder`."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._name = name
        self._own = self._request(name, "-x509", "-nodes", "-days", "2")

    @property
    def certificate(self) -> str:
        return self._own.certificate

    def sign(self, name: str) -> Pair:
        """Create a key and a certificate of this name."""
        signer = ("-CA", self._own.certificate, "-CAkey", self._own.key)
        address = ("-addext", "subjectAltName=IP:127.0.0.1")
        no_authority = ("-addext", "basicConstraints=critical,CA:FALSE")
        return self._request(
            f"{self._name}-{name}",
            "-x509",
            "-nodes",
            "-days",
            "2",
            *signer,
            *address,
            *no_authority,
        )

    def sign_encrypted(self, name: str) -> Pair:
        """Create an encrypted key and its certificate."""
        plain = self.sign(name)
        key = str(self._folder / f"{name}-locked.key")
        _openssl("ec", "-in", plain.key, "-out", key, "-aes256", "-passout", "pass:sesame")
        return Pair(plain.certificate, key)

    def client_context(self, pair: Pair | None = None) -> ssl.SSLContext:
        """Return a client context that trusts this authority. pair: a client certificate."""
        context = ssl.create_default_context(cafile=self.certificate)
        if pair is not None:
            context.load_cert_chain(*pair)
        return context

    def _request(self, name: str, *arguments: str) -> Pair:
        pair = Pair(str(self._folder / f"{name}.pem"), str(self._folder / f"{name}.key"))
        files = ("-keyout", pair.key, "-out", pair.certificate)
        _openssl("req", *_EC_KEY, "-subj", f"/CN={name}", *files, *arguments)
        return pair


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
