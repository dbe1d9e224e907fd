"""A slow and breakable link: a TCP proxy on loopback, since not every kernel has a `netem` to delay with."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections import deque


class Link:
    """Forwards connections to `target`; every byte takes half of `round_trip` seconds in either direction.

    `cut` is a cable that is pulled: nothing passes any more, and neither side is told. `mend` puts it back,
    for what is sent from then on. `reset` ends the connections that there are.
    """

    def __init__(self, target: tuple[str, int], round_trip: float) -> None:
        self.target = target
        self.delay = round_trip / 2
        self.connections = 0  # how many there have been
        self._cut = False
        self._pairs: list[_Way] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._stop = False

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop = True
        self._wake.send(b".")
        self._thread.join(5)
        for one in (self._listener, self._wake, self._woken):
            one.close()

    def cut(self) -> None:
        self._cut = True

    def mend(self) -> None:
        self._cut = False

    def reset(self) -> None:
        for way in list(self._pairs):
            with contextlib.suppress(OSError):
                way.source.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while not self._stop:
                due = [way.queue[0][0] for way in self._pairs if way.queue]
                wait = max(0.0, min(due) - time.monotonic()) if due else None
                for key, _ in selector.select(wait):
                    if key.fileobj is self._listener:
                        self._accept(selector)
                    elif key.data is not None:
                        self._take(selector, key.data)
                self._give(selector)
            for way in list(self._pairs):
                self._drop(selector, way)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        near, _ = self._listener.accept()
        self.connections += 1
        try:
            far = socket.create_connection(self.target, 5)
        except OSError:
            near.close()
            return
        for source, sink in ((near, far), (far, near)):
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            way = _Way(source, sink)
            self._pairs.append(way)
            selector.register(source, selectors.EVENT_READ, way)

    def _take(self, selector: selectors.BaseSelector, way: _Way) -> None:
        try:
            data = way.source.recv(65536)
        except OSError:
            data = b""
        if not self._cut:
            way.queue.append((time.monotonic() + self.delay, data))
        if not data:
            selector.unregister(way.source)

    def _give(self, selector: selectors.BaseSelector) -> None:
        now = time.monotonic()
        for way in list(self._pairs):
            while way.queue and way.queue[0][0] <= now:
                _, data = way.queue.popleft()
                if self._cut:
                    continue
                try:
                    if not data:
                        way.sink.shutdown(socket.SHUT_WR)
                        way.ended = True
                    else:
                        way.sink.sendall(data)
                except OSError:
                    way.ended = True
            other = next((one for one in self._pairs if one.source is way.sink), None)
            if way.ended and (other is None or other.ended):
                for one in (way, other):
                    if one is not None:
                        self._drop(selector, one)

    def _drop(self, selector: selectors.BaseSelector, way: _Way) -> None:
        if way in self._pairs:
            self._pairs.remove(way)
        with contextlib.suppress(KeyError, ValueError):
            selector.unregister(way.source)
        way.source.close()


class _Way:
    """One direction of a connection, with what is on its way: (when it arrives, bytes)."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.source = source
        self.sink = sink
        self.queue: deque[tuple[float, bytes]] = deque()
        self.ended = False
