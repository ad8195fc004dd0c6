"""Connections that send much, little or nonsense, without a key: others go on, memory stays."""

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from tests.e2e.bystander import Bystander
from tests.e2e.daemon import Daemon

pytestmark = pytest.mark.suite("hostile")

ATTACK_SECONDS = 1.2
MIB = 1 << 20
HOST = b"Host: localhost\r\n"
UPLOAD = (
    b"POST /v1/completions HTTP/1.1\r\n"
    + HOST
    + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
)
HANDSHAKE = (
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)
SESSION = b"GET /v1/sessions HTTP/1.1\r\n" + HOST + HANDSHAKE + b"\r\n"
RESPONSES = b"GET /v1/responses HTTP/1.1\r\n" + HOST + HANDSHAKE + b"\r\n"
PING = b"\x89\x80\0\0\0\0"
LONG_PING = b"\x89\xfd\0\0\0\0" + b"p" * 125
EMPTY_FRAGMENT = b"\x00\x80\0\0\0\0"
FIRST_FRAGMENT = b"\x01\x80\0\0\0\0"


@contextlib.contextmanager
def connections(
    daemon: Daemon, number: int, num_addresses: int = 1
) -> Iterator[list[socket.socket]]:
    address = ("127.0.0.1", int(daemon.url.rpartition(":")[2]))
    with contextlib.ExitStack() as stack:
        clients = []
        for n in range(number):
            own = (f"127.0.0.{1 + n % num_addresses}", 0)
            client = socket.create_connection(address, timeout=20, source_address=own)
            clients.append(stack.enter_context(client))
        yield clients


def open_websocket(connection: socket.socket, handshake: bytes = SESSION) -> None:
    connection.sendall(handshake)
    assert connection.recv(4096).startswith(b"HTTP/1.1 101 ")


def pipelined(daemon: Daemon) -> None:
    request = b"GET /health/live HTTP/1.1\r\n" + HOST + b"\r\n"
    with connections(daemon, 30) as clients:
        flood_whole(clients, request * (MIB // 4 // len(request)))


def pipelined_after_an_upload(daemon: Daemon) -> None:
    """The first request never ends, so that the others wait."""
    request = b"GET /health/live HTTP/1.1\r\n" + HOST + b"\r\n"
    body = b'{"prompt": "Once", "max_tokens": 4000, "ignore_eos": true}'
    first = UPLOAD + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    with connections(daemon, 20) as clients:
        for client in clients:
            client.sendall(first)
        flood_whole(clients, request * (MIB // 4 // len(request)))


def tiny_chunks(daemon: Daemon) -> None:
    with connections(daemon, 30) as clients:
        for client in clients:
            client.sendall(UPLOAD)
        flood_whole(clients, b"1\r\n \r\n" * (MIB // 24))


def tiny_chunks_of_many(daemon: Daemon) -> None:
    with connections(daemon, 200) as clients:
        for client in clients:
            client.sendall(UPLOAD)
        flood_whole(clients, b"1\r\n \r\n" * 1000)


def flood_whole(clients: Sequence[socket.socket], piece: bytes) -> None:
    """Send whole pieces on all connections by four threads for a time."""
    until = time.monotonic() + ATTACK_SECONDS
    offsets = dict.fromkeys(clients, 0)

    def send(own: list[socket.socket]) -> None:
        for client in own:
            client.setblocking(False)
        while own and time.monotonic() < until:
            _, writable, _ = select.select([], own, [], 0.05)
            for client in writable:
                try:
                    offsets[client] += client.send(piece[offsets[client] :])
                except BlockingIOError:
                    continue
                except OSError:  # the daemon has closed it
                    own.remove(client)
                offsets[client] %= len(piece)

    threads = [threading.Thread(target=send, args=(list(clients[n::4]),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def websocket_frames(first: bytes, frames: bytes, number: int = 8) -> Callable[[Daemon], None]:
    def attack(daemon: Daemon) -> None:
        with connections(daemon, number) as clients:
            for client in clients:
                open_websocket(client)
                client.sendall(first)
            flood_whole(clients, frames)

    return attack


def tiny_fragments(daemon: Daemon) -> None:
    websocket_frames(FIRST_FRAGMENT, b"\x00\x81\0\0\0\0x" * 20_000)(daemon)


def short_messages(daemon: Daemon) -> None:
    websocket_frames(b"", b"\x81\x82\0\0\0\0{}" * 20_000)(daemon)


def uploads(daemon: Daemon, num_addresses: int = 1) -> None:
    """Bodies of which the last byte does not come."""
    chunk = b"%x\r\n" % MIB + b" " * MIB + b"\r\n"
    with connections(daemon, 40, num_addresses) as clients:
        for client in clients:
            client.sendall(UPLOAD)
        send_slowly(clients, chunk * 18)


def partial_messages(daemon: Daemon) -> None:
    size = 19 * MIB
    frame = b"\x81\xff" + struct.pack("!Q", size) + b"\0\0\0\0"
    with connections(daemon, 40) as clients:
        for client in clients:
            open_websocket(client, RESPONSES)
        send_slowly(clients, frame + b" " * (18 * MIB))


def partial_messages_in_fragments(daemon: Daemon) -> None:
    fragment = b"\x00\xfe" + struct.pack("!H", 50_000) + b"\0\0\0\0" + b" " * 50_000
    with connections(daemon, 40) as clients:
        for client in clients:
            open_websocket(client, RESPONSES)
            client.sendall(FIRST_FRAGMENT)
        send_slowly(clients, fragment * 380)


def messages_that_wait(daemon: Daemon) -> None:
    """Large messages after one whose response takes long."""
    body = (
        b'{"type": "response.create", "input": "Once", "max_output_tokens": 4000,'
        b' "temperature": 0, "ignore_eos": true}'
    )
    first = b"\x81\xfe" + struct.pack("!H", len(body)) + b"\0\0\0\0" + body
    size = 19 * MIB
    second = b"\x81\xff" + struct.pack("!Q", size) + b"\0\0\0\0" + b" " * size
    with connections(daemon, 24) as clients:
        for client in clients:
            open_websocket(client, RESPONSES)
        send_slowly(clients, first + second)


def send_slowly(clients: Sequence[socket.socket], data: bytes) -> None:
    """Send all of the data on all connections, a MiB of each in turn."""
    left = dict.fromkeys(clients, 0)
    for client in clients:
        client.setblocking(False)
    until = time.monotonic() + 3 * ATTACK_SECONDS
    while left and time.monotonic() < until:
        _, writable, _ = select.select([], list(left), [], 0.1)
        for client in writable:
            begin = left[client]
            try:
                left[client] += client.send(memoryview(data)[begin : begin + MIB])
            except BlockingIOError:
                continue
            except OSError:  # the daemon has closed it
                del left[client]
                continue
            if left[client] == len(data):
                del left[client]


ATTACKS: dict[str, Callable[[Daemon], None]] = {
    "pipelined requests": pipelined,
    "pipelined after a response that takes long": pipelined_after_an_upload,
    "chunks of a byte": tiny_chunks,
    "chunks of a byte on 200 connections": tiny_chunks_of_many,
    "pings": websocket_frames(b"", PING * 20_000),
    "pings whose answers are not read": websocket_frames(b"", LONG_PING * 2000, 30),
    "empty fragments": websocket_frames(FIRST_FRAGMENT, EMPTY_FRAGMENT * 20_000),
    "fragments of a byte": tiny_fragments,
    "short messages": short_messages,
    "uploads": uploads,
    "uploads from forty addresses": lambda daemon: uploads(daemon, 40),
    "partial messages": partial_messages,
    "partial messages in fragments": partial_messages_in_fragments,
    "messages that wait": messages_that_wait,
}

COMPUTING = ("pipelined after a response that takes long", "messages that wait")
"""Attacks with many responses at a time, which may take the engine's time."""


@pytest.mark.parametrize("attack", ATTACKS)
def test_others_do_not_wait(daemon: Daemon, attack: str) -> None:
    with Bystander(daemon, gaps=attack not in COMPUTING) as bystander:
        ATTACKS[attack](daemon)
        bystander.rest(0.5)
    print(attack, bystander.figures)
    bystander.check()
    assert "Traceback" not in daemon.text


BAD_UPGRADES = {
    "a long header": HOST + HANDSHAKE + b"X-Long: " + b"y" * 20_000 + b"\r\n",
    "no version": HOST + HANDSHAKE.replace(b"Sec-WebSocket-Version: 13\r\n", b""),
    "a wrong version": HOST + HANDSHAKE.replace(b"13", b"12"),
    "two keys": HOST + HANDSHAKE + b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n",
    "a key that is none": HOST + HANDSHAKE.replace(b"dGhl", b"\xe9\xe9\xe9\xe9"),
    "odd protocols": HOST + HANDSHAKE + b"Sec-WebSocket-Protocol: a b,,\x80\r\n",
    "an odd connection": HOST + HANDSHAKE + b"Connection: \x80,,\r\n",
    "a body": HOST + HANDSHAKE + b"Content-Length: 5\r\n",
    "chunks": HOST + HANDSHAKE + b"Transfer-Encoding: chunked\r\n",
    "two lengths": HOST + HANDSHAKE + b"Content-Length: 00\r\n",
}


def test_bad_upgrades_are_answered_and_closed(daemon: Daemon) -> None:
    with Bystander(daemon) as bystander, connections(daemon, 220) as clients:
        line = b"GET /v1/sessions HTTP/1.1\r\n"
        long_line = b"GET /v1/sessions?" + b"q" * 20_000 + b" HTTP/1.1\r\n"
        cases = [line + lines + b"\r\n" for lines in BAD_UPGRADES.values()]
        cases.append(long_line + HOST + HANDSHAKE + b"\r\n")
        for number, client in enumerate(clients):
            client.sendall(cases[number % len(cases)])
        unanswered = set()
        deadline = time.monotonic() + 10
        for number, client in enumerate(clients):
            client.settimeout(max(0.01, deadline - time.monotonic()))
            answer = b""
            try:
                while b"\r\n\r\n" not in answer and (piece := client.recv(65536)):
                    answer += piece
            except OSError as error:
                answer = repr(error).encode()
            if not answer.startswith(b"HTTP/1.1 4") or b"100 Continue" in answer:
                unanswered.add((cases[number % len(cases)][:300], answer[:100]))
        bystander.rest()
    assert not unanswered
    bystander.check()
    assert "Traceback" not in daemon.text
