"""Certificates for servers of tests, which clients trust by the same file."""

from __future__ import annotations

import subprocess
from pathlib import Path


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """``cert.pem`` and ``key.pem`` for this machine, signed by themselves."""
    certificate, key = folder / "cert.pem", folder / "key.pem"
    names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
    kind = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1")
    files = ("-keyout", str(key), "-out", str(certificate))
    argv = ("openssl", "req", "-x509", *kind, *files, "-subj", "/CN=tugline", "-addext", names)
    subprocess.run(argv, capture_output=True, check=True)
    return certificate, key
