"""TLS settings: errors name the flag and are raised when the settings are read."""

import ssl
from pathlib import Path

import msgspec
import pytest

from proto.errors import ConfigError
from proto.runtime.security import server_context
from proto.settings.config import FrontEndConfig, ServeConfig
from proto.settings.config_checks import validate
from tests.fakes.certificates import Authority, needs_openssl


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"ssl_keyfile": "k"}, "--ssl-keyfile needs --ssl-certfile"),
        ({"ssl_ca_certs": "a"}, "--ssl-ca-certs needs --ssl-certfile"),
        ({"ssl_cert_reqs": 2}, "--ssl-cert-reqs needs --ssl-certfile"),
        ({"ssl_certfile": "c", "ssl_cert_reqs": 1}, "--ssl-cert-reqs 1 needs --ssl-ca-certs"),
        ({"ssl_certfile": "c", "ssl_ca_certs": "a"}, "--ssl-ca-certs has no effect"),
        ({"ssl_certfile": "c", "ssl_cert_reqs": 3}, "--ssl-cert-reqs must be 0, 1 or 2"),
    ],
)
def test_incomplete_settings_are_refused(settings: dict[str, str | int], expected: str) -> None:
    config = ServeConfig(frontend=FrontEndConfig(**settings))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=expected):
        validate(config)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@needs_openssl
class TestContext:
    def refusal(self, **settings: str | int) -> str:
        with pytest.raises(ConfigError) as caught:
            server_context(FrontEndConfig(**settings))  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def test_a_certificate_and_its_key(self, authority: Authority) -> None:
        certificate, key = authority.sign("server")
        context = server_context(FrontEndConfig(ssl_certfile=certificate, ssl_keyfile=key))
        assert context.verify_mode == ssl.CERT_NONE
        assert context.minimum_version >= ssl.TLSVersion.TLSv1_2
        assert all(each["aead"] for each in context.get_ciphers())

    def test_certificate_and_key_in_one_file(self, authority: Authority, tmp_path: Path) -> None:
        together = tmp_path / "both.pem"
        together.write_text("".join(Path(path).read_text() for path in authority.sign("both")))
        config = FrontEndConfig(ssl_certfile=str(together))
        assert server_context(config).cert_store_stats()["x509"] == 0

    def test_client_certificates_are_verified(self, authority: Authority) -> None:
        certificate, key = authority.sign("server")
        config = FrontEndConfig(
            ssl_certfile=certificate,
            ssl_keyfile=key,
            ssl_ca_certs=authority.certificate,
            ssl_cert_reqs=2,
        )
        context = server_context(config)
        assert context.verify_mode == ssl.CERT_REQUIRED
        assert context.cert_store_stats()["x509_ca"] == 1
        config = msgspec.structs.replace(config, ssl_cert_reqs=1)
        assert server_context(config).verify_mode == ssl.CERT_OPTIONAL

    def test_a_missing_file_is_named(self, authority: Authority) -> None:
        certificate, _ = authority.sign("server")
        assert self.refusal(ssl_certfile="/nowhere/c.pem") == (
            "--ssl-certfile /nowhere/c.pem: No such file or directory"
        )
        refusal = self.refusal(ssl_certfile=certificate, ssl_keyfile="/nowhere/k.pem")
        assert refusal == "--ssl-keyfile /nowhere/k.pem: No such file or directory"

    def test_a_certificate_without_its_key(self, authority: Authority) -> None:
        certificate, _ = authority.sign("server")
        assert self.refusal(ssl_certfile=certificate) == (
            f"--ssl-certfile {certificate} has no private key; give --ssl-keyfile"
        )

    def test_a_key_of_another_certificate_is_refused(self, authority: Authority) -> None:
        certificate, _ = authority.sign("server")
        _, key = authority.sign("other")
        refusal = self.refusal(ssl_certfile=certificate, ssl_keyfile=key)
        assert refusal.endswith(f"with the key in {key}: key values mismatch")

    def test_an_encrypted_key_does_not_prompt_for_a_password(self, authority: Authority) -> None:
        certificate, key = authority.sign_encrypted("locked")
        refusal = self.refusal(ssl_certfile=certificate, ssl_keyfile=key)
        assert "password" in refusal or "decrypt" in refusal

    def test_a_file_that_is_not_pem_is_refused(self, authority: Authority, tmp_path: Path) -> None:
        (tmp_path / "x").write_text("hello")
        certificate, key = authority.sign("server")
        assert "not a valid PEM file" in self.refusal(ssl_certfile=str(tmp_path / "x"))
        refusal = self.refusal(
            ssl_certfile=certificate, ssl_keyfile=key, ssl_ca_certs=str(tmp_path / "x")
        )
        assert refusal.startswith(f"--ssl-ca-certs {tmp_path / 'x'}: ")
