"""One POST or GET to one server, with a deadline, over the standard library.

Owns sockets. Each call has a connection of its own, so that a lost connection always means a fault and never a server that
closed an idle one. What goes wrong on the way is a value (:class:`Lost`), not an exception: whoever called decides.
"""

import http.client
import json
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from hotpot.errors import EngineError

_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a server answered; ``retry_after_s`` is what it asked for, if it did."""

    status: int
    body: bytes
    retry_after_s: float | None = None

    def words(self) -> str:
        """Return status and the beginning of the body, for a message."""
        return f"HTTP {self.status}: {self.body[:300].decode('utf-8', 'replace')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """There was no whole answer, and why."""

    cause: str


class Http:
    """A server's address. ``url`` is ``http://host:port``; other schemes are refused."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or parts.query or parts.fragment:
            raise EngineError(f"engine.url = {url!r} is not of the form http://host:port; write it so")
        self.url = url.rstrip("/")
        self._host, self._port, self._base = parts.hostname, parts.port or 80, parts.path.rstrip("/")
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False

    def post(self, path: str, body: Mapping[str, Any], *, timeout_s: float) -> Reply | Lost:
        """Send ``body`` as JSON and return the whole answer, within ``timeout_s``."""
        return self._call("POST", path, json.dumps(body).encode(), timeout_s)

    def get(self, path: str, *, timeout_s: float) -> Reply | Lost:
        """Return what is at ``path``, within ``timeout_s``."""
        return self._call("GET", path, None, timeout_s)

    def close(self) -> None:
        """Break off every call that is under way, from any thread; further ones are lost at once."""
        with self._lock:
            self._closed = True
            for one in self._open:
                _shut(one)

    def _call(self, method: str, path: str, body: bytes | None, timeout_s: float) -> Reply | Lost:
        deadline = time.monotonic() + timeout_s
        connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        link: socket.socket | None = None
        try:
            connection.connect()
            link = connection.sock
            self._enter(link)
            connection.request(method, self._base + path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            data = _read(response, link, deadline)
        except TimeoutError:
            return Lost(cause=f"{method} {self.url}{path} had no answer within {timeout_s:.1f} s")
        except (OSError, http.client.HTTPException) as error:
            return Lost(cause=f"{method} {self.url}{path}: {type(error).__name__}: {error}")
        finally:
            if link is not None:
                with self._lock:
                    self._open.discard(link)
            connection.close()
        return Reply(
            status=response.status, body=data, retry_after_s=_seconds(response.getheader("Retry-After"))
        )

    def _enter(self, link: socket.socket) -> None:
        with self._lock:
            self._open.add(link)
            if self._closed:
                _shut(link)


def _read(response: http.client.HTTPResponse, link: socket.socket, deadline: float) -> bytes:
    parts = []
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        if link.fileno() >= 0:  # the response closes it at its end
            link.settimeout(left)
        part = response.read1(_CHUNK)
        if not part:
            break
        parts.append(part)
    if response.length:  # read1, unlike read, does not complain of a body that ends early
        raise http.client.IncompleteRead(b"".join(parts), response.length)
    return b"".join(parts)


def _shut(link: socket.socket) -> None:
    try:
        link.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it is down already


def _seconds(text: str | None) -> float | None:
    try:
        found = None if text is None else float(text)
    except ValueError:
        return None  # a date; our own pause will do
    return found if found is not None and found >= 0 else None
