"""Certificates made for a run of the tests, with the command openssl."""

from __future__ import annotations

import atexit
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest


class Certificate(NamedTuple):
    cert: str
    key: str


@cache
def certificate(name: str, address: str = "127.0.0.1") -> Certificate:
    """A self-signed one, which is also an authority that signs it."""
    if shutil.which("openssl") is None:
        pytest.skip("certificates of tests are made with the command openssl")
    folder = Path(tempfile.mkdtemp(prefix="kvpool-certificates-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    made = Certificate(str(folder / "cert.pem"), str(folder / "key.pem"))
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    names = ["-subj", f"/CN={name}", "-addext", f"subjectAltName=IP:{address}"]
    out = ["-keyout", made.key, "-out", made.cert]
    subprocess.run([*command.split(), *names, *out], check=True, capture_output=True, timeout=60)
    return made
