"""An S3 server (moto) whose requests fail as a test says: refused, throttled, broken off, or not answered at all."""

from __future__ import annotations

import random
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

FAULTS = ("reset", "500", "503", "403")
_CODES = {"500": ("InternalError", "500 Internal Error"), "503": ("SlowDown", "503 Slow Down"),
          "403": ("AccessDenied", "403 Forbidden")}  # fmt: skip
_CUT = struct.pack("ii", 1, 0)

Choose = Callable[[int], str | None]
"""Returns the fault of the request with a number, or None if it is answered."""


class FaultyStore:
    """A WSGI application around moto's; `requests` counts what it was asked since `fail`."""

    def __init__(self, answer: Any) -> None:
        self._answer, self._lock = answer, threading.Lock()
        self.address = ""
        self.requests = 0
        self._choose: Choose = lambda _: None
        self._released = threading.Event()

    def fail(self, choose: Choose = lambda _: None) -> None:
        """Choose from now on which requests fail; those that hang end."""
        with self._lock:
            self._released.set()
            self._released = threading.Event()
            self.requests, self._choose = 0, choose

    def fail_from(self, number: int, fault: str) -> None:
        """Let all requests from the one with a number on fail."""
        self.fail(lambda request: fault if request >= number else None)

    def fail_often(self, share: float, seed: int) -> None:
        """Let a share of the requests fail, each in one of the ways that a later attempt may survive."""
        numbers = random.Random(seed)
        self.fail(lambda _: numbers.choice(("reset", "500", "503")) if numbers.random() < share else None)

    def __call__(self, environment: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Answer a request, or let it fail."""
        with self._lock:
            fault = self._choose(self.requests)
            released = self._released
            self.requests += 1
        if fault is None:
            found: Iterable[bytes] = self._answer(environment, start_response)
            return found
        environment["wsgi.input"].read(int(environment.get("CONTENT_LENGTH") or 0))
        if fault == "hang":
            released.wait()
        if fault in ("reset", "hang"):
            connection = environment["werkzeug.socket"]
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _CUT)
            connection.shutdown(socket.SHUT_RDWR)
            raise ConnectionAbortedError
        code, status = _CODES[fault]
        start_response(status, [("Content-Type", "application/xml")])
        if environment["REQUEST_METHOD"] == "HEAD":
            return []
        return [f"<Error><Code>{code}</Code><Message>a fault of the test</Message></Error>".encode()]


@contextmanager
def faulty_store() -> Iterator[FaultyStore]:
    """Serve an empty store on a free port."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    store = FaultyStore(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, store, threaded=True, request_handler=MotoRequestHandler)
    store.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield store
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
