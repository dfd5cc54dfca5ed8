"""moto's S3 server behind a `Front`, in a process of its own: `python -m emulator.moto_server`.

It reads one line of JSON (see `main`), prints `{"port": n}` once it listens, and ends when its standard input does,
which is when the emulator dies.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import NoReturn

from emulator.front import Front
from emulator.profiles import PROFILES
from emulator.signature import Keys

LOOPBACK = "127.0.0.1"


def main() -> NoReturn:
    """Serve until standard input ends.

    The line has "bucket", "profile", "access_key", "secret_key", "session_token" (or null), and "certificate" and
    "key": paths of PEM files to serve HTTPS with, or null.
    """
    settings = json.loads(sys.stdin.readline())
    os.environ.setdefault("AWS_DEFAULT_REGION", "us-east-1")
    from moto.moto_server.werkzeug_app import create_backend_app
    from moto.s3.models import s3_backends
    from werkzeug.serving import ThreadedWSGIServer, WSGIRequestHandler

    class Quiet(WSGIRequestHandler):
        """Writes no line per request."""

        protocol_version = "HTTP/1.1"

        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            """Say nothing."""

    s3_backends["123456789012"]["aws"].create_bucket(settings["bucket"], "us-east-1")
    profile = PROFILES[settings["profile"]]
    keys = Keys(settings["access_key"], settings["secret_key"], settings["session_token"], profile.regions)
    front = Front(create_backend_app("s3"), keys, profile)
    tls = (settings["certificate"], settings["key"]) if settings["certificate"] else None
    server = ThreadedWSGIServer(LOOPBACK, 0, front, handler=Quiet, ssl_context=tls)
    if tls:
        # In the connection's own thread: a client that says nothing holds up no other.
        server.socket.do_handshake_on_connect = False  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(json.dumps({"port": server.server_port}), flush=True)  # noqa: T201
    sys.stdin.read()
    os._exit(0)  # the requests under way end with us


if __name__ == "__main__":
    main()
