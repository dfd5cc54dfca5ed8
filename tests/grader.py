"""A reward server for tests, as a process of its own: `python -m tests.grader`. It tells its port on standard output.

It scores as the recipe `digit` does; what a completion says makes it misbehave: "boom" is answered with 500, "slow"
only after SLOW_S, "together" when several such requests are there. The path says what happens to whole requests:
`/digit`; `/first/<n>/<status>`, which answers so to the first n, status 0 with a connection that breaks;
`/always/<status>`; `/answer/<JSON>`, with that answer; `/pairs`, which answers two at a time. With
ASYNCGRPO_REWARD_TOKEN it wants that one. `GET /requests` tells what was asked.
"""

import json
import os
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SLOW_S = 60.0
TOGETHER, PAIR = threading.Barrier(4), threading.Barrier(2)
TOKEN = os.environ.get("ASYNCGRPO_REWARD_TOKEN")
REQUESTS: list[dict[str, Any]] = []


class Grader(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(200, REQUESTS) if self.path == "/requests" else self._answer(405, "POST it")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        kind, *rest = urllib.parse.unquote(self.path).strip("/").split("/", 2)
        before = sum(request["path"] == self.path for request in REQUESTS)
        REQUESTS.append({"path": self.path, "body": body, "authorization": self.headers.get("authorization")})
        texts = ["".join(m["content"] for m in c) if isinstance(c, list) else c for c in body["completions"]]
        if TOKEN and self.headers.get("authorization") != f"Bearer {TOKEN}":
            return self._answer(401, f"{self.headers.get('authorization')} does not open this")
        if kind == "always" or (kind == "first" and before < int(rest[0])):
            return self._answer(int(rest[-1]), "not now")
        if kind == "pairs":
            PAIR.wait(30)
        if kind == "answer":
            return self._answer(200, json.loads(rest[0]))
        if "slow" in texts:
            time.sleep(SLOW_S)
        if "together" in texts:
            TOGETHER.wait(30)
        if "boom" in texts:
            return self._answer(500, "it went boom")
        return self._answer(200, [None if text == "none" else text.count("7") / max(1, len(text)) for text in texts])

    def _answer(self, status: int, answer: Any) -> None:
        if not status:
            self.close_connection = True
            return
        data = json.dumps(answer).encode()
        try:
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("location", "https://elsewhere.example/score?secret=1")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        except BrokenPipeError:  # it did not wait
            self.close_connection = True

    def log_message(self, *_: Any) -> None:
        pass


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Grader)
    print(server.server_port, flush=True)
    server.serve_forever()
