"""`titan report --serve`: serve the page to this machine only, and update it while a sweep runs."""

import functools
import json
import secrets
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from titan_hydra.core.base.errors import ConfigError, RunError

from .page import news, page
from .table import Report

LOOPBACK = "127.0.0.1"
EVERY = 3  # seconds after which an open page requests new data


def serve(make: Callable[[], Report], port: int) -> None:
    """Serve the page until Ctrl-C. `make` reads the runs again for each request. The page's path is secret, because
    other users of the machine can connect.
    """
    make()  # called once now, so that mistakes in the arguments raise an error before anything is served
    word = secrets.token_urlsafe(9)
    pages = {
        f"/{word}/": ("text/html", lambda: page(make(), live=EVERY)),
        f"/{word}/data.json": ("application/json", lambda: json.dumps(news(make()))),
    }
    try:
        server = ThreadingHTTPServer((LOOPBACK, port), functools.partial(Handler, pages))
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"--port={port}: {getattr(error, 'strerror', None) or error}; --port 0 takes one that is free"
        ) from error
    with server:
        server.daemon_threads = True
        print(f"http://{LOOPBACK}:{server.server_port}/{word}/   (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print("ended")


class Handler(BaseHTTPRequestHandler):
    """Handles only requests whose Host header is this machine's name, which a page of another site cannot send."""

    def __init__(self, pages: dict[str, tuple[str, Callable[[], str]]], *given: Any) -> None:
        """Handle the request; `pages` maps a path to its media type and to a function that makes the page."""
        self.pages = pages
        super().__init__(*given)

    def do_GET(self) -> None:
        """Send the page or, if it cannot be made, the reason."""
        host, (kind, content) = self.headers.get("Host", "").rpartition(":")[0], self.pages.get(self.path, ("", None))
        if content is None or host not in (LOOPBACK, "localhost"):
            return self.answer(404, "text/plain", "no such page\n")
        try:
            return self.answer(200, kind, content())
        except RunError as error:  # for example, a cell that was started later differs in a key that must be equal
            return self.answer(503, "text/plain", f"{error}\n")

    def answer(self, status: int, kind: str, text: str) -> None:
        """Send a response that is not cached."""
        body = text.encode()
        self.send_response(status)
        for name, value in {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": len(body),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        }.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Do nothing, in place of the base class's method, which would print a line for each request."""
