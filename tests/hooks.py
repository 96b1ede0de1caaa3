"""A web hook on this machine, over https: what was posted to it."""

from __future__ import annotations

import http.server
import json
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

SECRET = "T0KEN-b7f3"


@dataclass
class Hook:
    """status: what it answers with, after so many seconds. posts: (path, headers, JSON) of each request."""

    address: str = ""
    status: int = 200
    seconds: float = 0.0
    posts: list[tuple[str, dict[str, str], dict[str, Any]]] = field(default_factory=list)


@contextmanager
def listening(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hook]:
    """A hook with a certificate that this process trusts."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl, which makes the certificate")
    key, certificate, hook = folder / "key.pem", folder / "certificate.pem", Hook()
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    named = ["-keyout", key, "-out", certificate, "-subj", "/CN=hook", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*made, *named], check=True, capture_output=True)

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            hook.posts.append((self.path, dict(self.headers), json.loads(body)))
            time.sleep(hook.seconds)
            self.send_response(hook.status)
            self.send_header("Location", f"{hook.address}?again")
            self.end_headers()

        do_GET = do_POST

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    hook.address = f"https://127.0.0.1:{server.server_port}/hooks/{SECRET}"
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    try:
        yield hook
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
