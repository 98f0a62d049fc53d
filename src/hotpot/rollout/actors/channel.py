"""One end of the connection between an actor's parent and its child: whole messages, and no call of it waits.

Owns the socket and what is not sent or not whole yet. A frame is a mark, the payload's length, its CRC-32, and the payload;
anything else is a fault, behind which nothing is read any more. What came before it is not lost.
"""

import socket
import struct
import zlib

from hotpot.experience.crashpoints import through
from hotpot.rollout.actors.codec import GarbageError, Said, decode, encode

_HEADER = struct.Struct(">4sII")
_MARK = b"hpac"
MAX_PAYLOAD_BYTES = 256 * 2**20
"""Longest message; a length beyond it is taken for garbage."""
_CHUNK_BYTES = 2**18


class Channel:
    """Messages over a connected socket. ``ended`` once the other side is gone, ``fault`` once it has sent garbage."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self.socket = connected
        self.ended = False
        self.fault = ""
        self._out = bytearray()
        self._in = bytearray()

    @property
    def unsent(self) -> bool:
        """Whether something waits for room in the socket."""
        return bool(self._out)

    def send(self, said: Said) -> None:
        """Send a message, as soon as there is room. Raises ValueError where it is too long to be one."""
        payload = encode(said)
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise ValueError(f"a message of {len(payload)} bytes; at most {MAX_PAYLOAD_BYTES} can be sent")
        frame = _HEADER.pack(_MARK, len(payload), zlib.crc32(payload)) + payload
        self._out += through("actor_message_answer", frame)
        self.flush()

    def flush(self) -> None:
        """Send what there is room for."""
        while self._out and not self.ended:
            try:
                sent = self.socket.send(self._out[:_CHUNK_BYTES])
            except BlockingIOError:
                return
            except OSError:
                self.ended = True
            else:
                del self._out[:sent]

    def receive(self) -> list[Said]:
        """Return the messages that are there."""
        while not self.ended:
            try:
                read = self.socket.recv(_CHUNK_BYTES)
            except BlockingIOError:
                break
            except OSError:
                read = b""
            self.ended = not read
            self._in += read
        messages: list[Said] = []
        try:
            while not self.fault and (payload := self._payload()) is not None:
                messages.append(decode(payload))
        except GarbageError as garbage:
            self.fault = str(garbage)
        return messages

    def close(self) -> None:
        """Close the socket: the other side sees that this one is gone."""
        self.ended = True
        self.socket.close()

    def _payload(self) -> bytes | None:
        """Take the next frame's payload; None where it is not whole yet. Raises :class:`GarbageError`."""
        if len(self._in) < _HEADER.size:
            return None
        mark, length, crc = _HEADER.unpack_from(self._in)
        if mark != _MARK or length > MAX_PAYLOAD_BYTES:
            raise GarbageError(f"not a frame: {bytes(self._in[:60])!r}")
        end = _HEADER.size + length
        if len(self._in) < end:
            return None
        payload = bytes(self._in[_HEADER.size : end])
        del self._in[:end]
        if zlib.crc32(payload) != crc:
            raise GarbageError(f"a frame with a wrong checksum: {payload[:60]!r}")
        return payload
