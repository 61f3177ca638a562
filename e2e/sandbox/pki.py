"""Keys and certificates of one region, made by openssl: elliptic curves, so it takes no time."""

from pathlib import Path

from sandbox.progress import checked

FIX = "see whether `openssl version` works"


def new_key(path: Path) -> None:
    """A private key only its owner reads."""
    checked(["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", path], fix=FIX, timeout_s=30)
    path.chmod(0o600)


def new_authority(folder: Path, name: str) -> None:
    """NAME.key and the self-signed NAME.crt."""
    new_key(folder / f"{name}.key")
    checked(
        ["openssl", "req", "-x509", "-new", "-key", folder / f"{name}.key", "-days", "3650", "-subj", f"/CN={name}",
         "-addext", "keyUsage=critical,keyCertSign,cRLSign,digitalSignature", "-out", folder / f"{name}.crt"],
        fix=FIX, timeout_s=30,
    )  # fmt: skip


def sign(folder: Path, name: str, subject: str, authority: str, alternatives: str = "") -> None:
    """NAME.key and NAME.crt for a server (with alternative names) or a client, signed by an authority here."""
    new_key(folder / f"{name}.key")
    lines = ["basicConstraints=CA:FALSE", "extendedKeyUsage=serverAuth,clientAuth"]
    if alternatives:
        lines.append(f"subjectAltName={alternatives}")
    extensions = folder / f"{name}.ext"
    extensions.write_text("\n".join(lines) + "\n")
    request = folder / f"{name}.csr"
    checked(
        ["openssl", "req", "-new", "-key", folder / f"{name}.key", "-subj", subject, "-out", request],
        fix=FIX, timeout_s=30,
    )  # fmt: skip
    checked(
        ["openssl", "x509", "-req", "-in", request, "-CA", folder / f"{authority}.crt", "-CAkey",
         folder / f"{authority}.key", "-CAcreateserial", "-days", "3650", "-extfile", extensions,
         "-out", folder / f"{name}.crt"],
        fix=FIX, timeout_s=30,
    )  # fmt: skip
    request.unlink()
    extensions.unlink()


def make(folder: Path, address: str, service_address: str) -> None:
    """Everything a region's API server needs; kept for the life of the run's folder."""
    if (folder / "complete").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    new_authority(folder, "ca")
    new_authority(folder, "front-proxy-ca")
    names = (
        "localhost",
        "kubernetes",
        "kubernetes.default",
        "kubernetes.default.svc",
        "kubernetes.default.svc.cluster.local",
    )
    alternatives = ",".join(
        [f"DNS:{name}" for name in names] + [f"IP:{ip}" for ip in ("127.0.0.1", address, service_address)]
    )
    sign(folder, "apiserver", "/CN=kube-apiserver", "ca", alternatives)
    sign(folder, "admin", "/O=system:masters/CN=admin", "ca")
    sign(folder, "front-proxy-client", "/CN=front-proxy-client", "front-proxy-ca")
    new_key(folder / "sa.key")
    checked(["openssl", "ec", "-in", folder / "sa.key", "-pubout", "-out", folder / "sa.pub"], fix=FIX, timeout_s=30)
    (folder / "complete").touch()
