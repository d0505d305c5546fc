"""An HTTP server on this machine that serves byte ranges and fails as it is told to. Each connection has a thread."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server:
    """`files` by name; `fault(n, again)` says how the n-th GET (from 1), which repeats `again` earlier ones, fails.

    It returns None, an HTTP status, or "truncate", "short", "drop", "hang" or "whole".
    """

    def __init__(self, files: dict[str, bytes], fault: Callable[[int, int], object], latency: float = 0.0) -> None:
        self.files, self.fault, self.latency = files, fault, latency
        self.head_fault: Callable[[int], object] = lambda n: None
        self.heads = 0
        self.gets: list[tuple[str, int, int]] = []
        self.versions: dict[str, str] = {}
        self.connections = 0
        self.released = threading.Event()
        self.lock = threading.Lock()
        self.url = ""

    def handler(server) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def setup(self) -> None:
                with server.lock:
                    server.connections += 1
                super().setup()

            def do_HEAD(self) -> None:
                self.answer(body=False)

            def do_GET(self) -> None:
                self.answer(body=True)

            def answer(self, body: bool) -> None:
                name = self.path.lstrip("/").split("?")[0]
                content = server.files.get(name)
                fault = None
                wanted = self.headers.get("Range")
                start, end = 0, len(content or b"")
                if wanted:
                    first, last = wanted.removeprefix("bytes=").split("-")
                    start, end = int(first), int(last) + 1
                if body:
                    with server.lock:
                        server.gets.append((name, start, end))
                        fault = server.fault(len(server.gets), server.gets.count((name, start, end)) - 1)
                    time.sleep(server.latency)
                else:
                    server.heads += 1
                    fault = server.head_fault(server.heads)
                if content is None:
                    fault = 404
                if isinstance(fault, int):
                    self.reply(fault, b"no", body)
                elif fault == "drop":  # a reset, without an answer
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    self.close_connection = True
                    self.connection.close()
                elif fault == "hang":
                    server.released.wait(60)
                    self.close_connection = True
                elif fault == "truncate":  # half of the promised bytes, then the end
                    self.reply(206, content[start:end], body, sent=(end - start) // 2)
                    self.close_connection = True
                elif fault == "short":  # half of the bytes, and a header that agrees with them
                    self.reply(206, content[start : start + (end - start) // 2], body)
                elif fault == "whole" or not wanted:
                    self.reply(200, content, body)
                else:
                    self.reply(206, content[start:end], body)

            def reply(self, status: int, content: bytes, body: bool, sent: int | None = None) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.send_header("Accept-Ranges", "bytes")
                self.send_header("ETag", server.versions.get(self.path.lstrip("/"), '"1"'))
                self.end_headers()
                if body:
                    self.wfile.write(content[:sent])

            def log_message(self, *_: object) -> None:
                pass

        return Handler


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is no error here."""


@contextmanager
def serving(files: dict[str, bytes], fault: Callable[[int, int], object] = lambda n, again: None, latency: float = 0.0):
    """A server for the time of a test."""
    server = Server(files, fault, latency)
    http = _Http(("127.0.0.1", 0), server.handler())
    server.url = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        http.shutdown()
        http.server_close()
        thread.join()
