"""The launchers of a run on several machines, linked: who is there, who fails, who falls silent.

Node 0 listens on the port after that of --rendezvous, and the others connect to it; what one says to all goes
through node 0. A message is a line of JSON. Before any rank is started each says hello, and node 0 lets all
go on or none; then each gives a beat every second, since a host that dies says nothing.

Standard library only; Linux.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trainer.errors import InputError

BEAT_SECONDS = 1.0
SILENT_SECONDS = 15.0  # a node that is not heard of for so long is lost
JOIN_SECONDS = 300.0  # so long all nodes have to come
CLOCK_SECONDS = 5.0  # by so much two clocks may differ
RETRY_SECONDS = 0.5
PAUSED_SECONDS = 5.0  # a turn that came so late: we were halted ourselves, and heard nobody
FLUSH_SECONDS = 2.0
LARGEST_BYTES = 1 << 20  # of what one has said and not ended

Message = dict[str, Any]


@dataclass(frozen=True)
class Node:
    """What a launcher says of itself when it comes."""

    number: int
    count: int  # of all nodes, as it knows them
    host: str
    facts: Mapping[str, str]  # what must be the same on all nodes, by its name for people
    time: float = 0.0  # by its clock, s since 1970
    wrong: int = 0  # the exit code with which a check here has ended, if it cannot start

    def __str__(self) -> str:
        return f"node {self.number} ({self.host})"


class Peer:
    """A connection to another launcher."""

    def __init__(self, connection: socket.socket, now: float) -> None:
        self.connection = connection
        self.node: Node | None = None  # once it has said hello
        self.heard = now
        self.silent = False  # for so long that it was told; should it wake, it hears what became of it
        self.read = b""
        self.unsent = b""


class Link:
    """One node's end. `turn` is to be called once a second or more often; what the others have said is in
    `told` then, as (number of the node, message). A node that is gone says ``{"lost": why}``.
    """

    def __init__(
        self, own: Node, address: str, selector: selectors.BaseSelector, say: Callable[[str], None]
    ) -> None:
        """`address`: of --rendezvous, HOST:PORT; `say` writes a line into the log. Raises InputError if it
        cannot be met there.
        """
        self.own = own
        self.ready = False  # whether all have come
        self.closed = False
        self.told: deque[tuple[int, Message]] = deque()
        self._names: dict[int, Node] = {}  # of those that have come
        self.peers: dict[int, Peer] = {}  # those with a number; of nodes other than 0 only node 0
        self._address = address
        self._say = say
        self._selector = selector
        self._strangers: list[Peer] = []  # those that have not said hello
        self._listening: socket.socket | None = None
        self._calling: socket.socket | None = None
        self._why = "no answer"  # node 0 could not be reached
        now = time.monotonic()
        self._until = now + JOIN_SECONDS
        self._turned = self._beaten = now
        self._retry_at = now
        host, port = split(address)
        self._port = port + 1
        try:
            found = socket.getaddrinfo(host, self._port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise InputError(
                f"--rendezvous {address}: the host cannot be resolved ({error.strerror}); "
                "give an address of node 0"
            ) from None
        self._family, self._place = found[0][0], found[0][4]
        if own.number == 0:
            self._listen(port)
        say(f"{own} of {own.count}: meeting the others at {address}")

    @property
    def leads(self) -> bool:
        return self.own.number == 0

    # -- until all have come -------------------------------------------------------------------------------

    def _listen(self, port: int) -> None:
        try:
            with _listener(self._family, (self._place[0], port)):
                pass  # rank 0 will take it
            self._listening = _listener(self._family, self._place)
        except OSError as error:
            taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
            why = f"ports {port} and {port + 1} are needed here, and one cannot be had ({error.strerror})"
            if not taken:
                why = f"this is node 0, and no address of this machine ({error.strerror})"
            raise InputError(f"--rendezvous {self._address}: {why}; give another one to all nodes") from None
        self._selector.register(self._listening, selectors.EVENT_READ, self._on_caller)

    def _on_caller(self) -> None:
        assert self._listening
        with contextlib.suppress(OSError):
            connection, _ = self._listening.accept()
            peer = self._begin(connection)
            self._strangers.append(peer)

    def _call(self, now: float) -> None:
        """Try to reach node 0, once more."""
        self._retry_at = now + RETRY_SECONDS
        if self._calling:
            return
        self._calling = calling = socket.socket(self._family, socket.SOCK_STREAM)
        calling.setblocking(False)
        code = calling.connect_ex(self._place)
        if code not in (0, errno.EINPROGRESS):
            self._calling, self._why = None, os.strerror(code)
            calling.close()
            return
        self._selector.register(calling, selectors.EVENT_WRITE, self._on_called)

    def _on_called(self) -> None:
        calling, self._calling = self._calling, None
        assert calling
        self._selector.unregister(calling)
        code = calling.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if not code and calling.getsockname() == calling.getpeername():
            code = errno.ECONNREFUSED  # of two that nobody listens for, TCP makes a connection with itself
        if code:
            self._why = os.strerror(code)
            calling.close()
            return
        peer = self._begin(calling)
        self.peers[0] = peer
        hello = asdict(self.own) | {"facts": dict(self.own.facts), "time": time.time()}
        self._send(peer, {"hello": hello})

    def _hello(self, peer: Peer, told: Any) -> None:
        """On node 0: somebody says who it is."""
        try:
            node = Node(**told)
            skew = time.time() - float(node.time)
            facts = dict(node.facts)
        except (TypeError, ValueError):
            self._drop(peer)  # another program's
            return
        self._names[node.number] = peer.node = node
        self._strangers.remove(peer)
        known = self.peers.get(node.number)
        ours = self.own
        wrong, code = "", 2
        if node.wrong:
            wrong, code = f"{node} cannot start: its own log says why", node.wrong
        elif node.count != ours.count:
            wrong = f"{node} has --nodes {node.count} and {ours} has --nodes {ours.count}"
        elif node.number == 0 or known:
            other = (known.node if known else None) or ours
            wrong = f"{node} and {other} have the same --node: give each machine its own"
        elif abs(skew) > CLOCK_SECONDS:
            which = "behind" if skew > 0 else "ahead of"
            wrong = f"the clock of {node} is {abs(skew):.0f} s {which} that of {ours}: set both, by NTP"
        for name, value in ours.facts.items():
            if not wrong and facts.get(name) != value:
                wrong = (
                    f"{node} has {name} {facts.get(name, 'of another version')} and {ours} has {value}: "
                    "all nodes need the same"
                )
        self.peers[node.number if not known and node.number else -1] = peer
        if wrong:
            self.refuse(wrong, code)
            raise InputError(wrong, code=code)
        self._say(f"{node} is here")
        if len(self.peers) == ours.count - 1:
            self._close_listening()
            self.ready = True
            self.tell({"go": ours.host})

    def refuse(self, sentence: str, code: int) -> None:
        """Tell all that are there why it does not begin, and let go of them."""
        self.tell({"refused": sentence, "code": code})
        self.close()

    def _absent(self) -> None:
        """Not all have come in time. Raises InputError."""
        if self.leads:
            missing = [number for number in range(1, self.own.count) if number not in self.peers]
            names = ("nodes " if len(missing) > 1 else "node ") + ", ".join(map(str, missing))
            wrong = (
                f"--rendezvous {self._address}: {names} of --nodes {self.own.count} did not come to "
                f"{self.own} within {JOIN_SECONDS:g} s: see that each is started and reaches it on port "
                f"{self._port}"
            )
        else:
            wrong = (
                f"--rendezvous {self._address}: {self.own} did not reach node 0 on port {self._port} within "
                f"{JOIN_SECONDS:g} s ({self._why}): see that it is started and reached from here"
            )
        self.refuse(wrong, code=1)
        raise InputError(wrong, code=1)

    # -- what is said --------------------------------------------------------------------------------------

    def name(self, number: int) -> str:
        """``node 1 (host)``"""
        return str(self._names.get(number) or f"node {number}")

    def turn(self, beat: Callable[[], Message]) -> None:
        """Do what is due. Raises InputError if it does not come to a beginning."""
        if self.closed:
            return
        now = time.monotonic()
        if (halted := now - self._turned) > PAUSED_SECONDS:
            for peer in self.peers.values():
                peer.heard += halted
        self._turned = now
        if not self.ready:
            if not self.leads and not self.peers and now >= self._retry_at:
                self._call(now)
            if now >= self._until and (self.leads or not self.peers):
                self._absent()
        if now - self._beaten >= BEAT_SECONDS:
            self._beaten = now
            self.tell({"beat": beat()})
        for peer in [*self.peers.values(), *self._strangers]:
            if now - peer.heard < SILENT_SECONDS or peer.silent:
                continue
            peer.silent = True
            why = f"not heard of for {SILENT_SECONDS:g} s: its host or the network to it is gone"
            if self.ready and (number := self._number(peer)) is not None:
                self.told.append((number, {"lost": why}))
            else:
                self._drop(peer)

    def tell(self, message: Message) -> None:
        """To node 0; of node 0, to all."""
        for peer in [*self.peers.values()]:
            self._send(peer, message)

    def close(self) -> None:
        """Say what is still to be said, as far as it is taken at once, and let go of all."""
        until = time.monotonic() + FLUSH_SECONDS
        for peer in self.peers.values():
            with contextlib.suppress(OSError):
                peer.connection.settimeout(max(until - time.monotonic(), 0.01))
                peer.connection.sendall(peer.unsent)
                peer.connection.shutdown(socket.SHUT_WR)
        for peer in [*self.peers.values(), *self._strangers]:
            with contextlib.suppress(OSError):  # what is closed unread is reset, and what was said is lost
                while peer not in self._strangers and time.monotonic() < until and peer.connection.recv(4096):
                    pass
            self._drop(peer)
        self._close_listening()
        if self._calling:
            self._selector.unregister(self._calling)
            self._calling.close()
            self._calling = None
        self.closed = True

    def _close_listening(self) -> None:
        if self._listening:
            self._selector.unregister(self._listening)
            self._listening.close()
            self._listening = None

    def _begin(self, connection: socket.socket) -> Peer:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer = Peer(connection, time.monotonic())
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._on_ready(peer))
        return peer

    def _drop(self, peer: Peer) -> None:
        if peer.connection.fileno() >= 0:
            self._selector.unregister(peer.connection)
            peer.connection.close()
        self.peers = {number: one for number, one in self.peers.items() if one is not peer}
        self._strangers = [one for one in self._strangers if one is not peer]

    def _gone(self, peer: Peer, why: str) -> None:
        number = self._number(peer)
        self._drop(peer)
        if self.ready and number is not None and not peer.silent:
            self.told.append((number, {"lost": why}))

    def _number(self, peer: Peer) -> int | None:
        return next((number for number, one in self.peers.items() if one is peer), None)

    def _send(self, peer: Peer, message: Message) -> None:
        if len(peer.unsent) > LARGEST_BYTES:
            return  # it does not listen, which will be told by its silence
        peer.unsent += json.dumps(message).encode() + b"\n"
        self._pump(peer)

    def _pump(self, peer: Peer) -> None:
        if peer.connection.fileno() < 0:
            return
        with contextlib.suppress(OSError):  # if it is gone, reading tells
            peer.unsent = peer.unsent[peer.connection.send(peer.unsent) :]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
        self._selector.modify(peer.connection, events, lambda: self._on_ready(peer))

    def _on_ready(self, peer: Peer) -> None:
        if peer.connection.fileno() < 0:  # it was let go of in the same turn
            return
        if peer.unsent:
            self._pump(peer)
        try:
            data = peer.connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data or len(peer.read) > LARGEST_BYTES:
            self._gone(peer, "its connection has ended: the process that started its ranks is gone")
            return
        peer.heard = time.monotonic()
        *lines, peer.read = (peer.read + data).split(b"\n")
        for line in lines:
            self._take(peer, line)

    def _take(self, peer: Peer, line: bytes) -> None:
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            self._drop(peer)  # another program's
        elif peer in self._strangers:
            self._hello(peer, message.get("hello"))
        elif "refused" in message:
            sentence, code = str(message["refused"]), int(message.get("code", 1))
            self.refuse(sentence, code)  # to those who have not heard of it
            raise InputError(sentence, code=code)
        elif "go" in message:
            self.ready = True
            self._names[0] = peer.node = Node(0, self.own.count, str(message["go"]), {})
        else:
            if (number := self._number(peer)) is not None:
                self.told.append((number, message))


def split(address: str) -> tuple[str, int]:
    """``HOST:PORT`` as (host, port)."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _listener(family: int, place: Any) -> socket.socket:
    """Raises OSError."""
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(place)
        made.listen(128)
        made.setblocking(False)
    except OSError:
        made.close()
        raise
    return made
