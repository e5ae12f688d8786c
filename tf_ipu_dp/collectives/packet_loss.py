"""Random loss of the packets that a device receives, by a rule of nftables in the kernel.

The rule goes to the kernel through netlink: the command `nft` is often not installed. It is removed with its namespace.
"""

from __future__ import annotations

import os
import socket
import struct

_NETLINK_NETFILTER = 12
_NFTABLES = 10
_BATCH_BEGIN, _BATCH_END = 0x10, 0x11
_NEW_TABLE, _NEW_CHAIN, _NEW_RULE = 0, 3, 6
_REQUEST, _ACK, _CREATE, _APPEND = 0x1, 0x4, 0x400, 0x800
_FAMILY_NETDEV = 5
_ERROR = 2
_NESTED = 0x8000
_REGISTER, _VERDICT_REGISTER = 1, 0
_MODULUS = 10**8
_TABLE, _CHAIN = "tf_ipu_dp", "loss"


def drop_received(device: str, share: float) -> None:
    """Drops a share of the packets that a device receives, each by itself, before they are put together again.

    It applies to the network namespace of the calling thread. OSError where the kernel has no nftables.
    """
    hook = _attribute(1, _be32(0)) + _attribute(2, _be32(0)) + _attribute(3, _text(device))
    chain = (
        _attribute(1, _text(_TABLE)) + _attribute(3, _text(_CHAIN)) + _nested(4, hook) + _attribute(7, _text("filter"))
    )
    expressions = (
        # register = random number below the modulus, in network order: registers are compared byte by byte
        _expression("numgen", _attribute(1, _be32(_REGISTER)), _attribute(2, _be32(_MODULUS)), _attribute(3, _be32(1)))
        + _expression(
            "byteorder", *(_attribute(n, _be32(v)) for n, v in ((1, _REGISTER), (2, _REGISTER), (3, 1), (4, 4), (5, 4)))
        )
        # go on if it is less than the share
        + _expression(
            "cmp",
            _attribute(1, _be32(_REGISTER)),
            _attribute(2, _be32(2)),
            _nested(3, _attribute(1, _be32(round(share * _MODULUS)))),
        )
        + _expression(
            "immediate", _attribute(1, _be32(_VERDICT_REGISTER)), _nested(2, _nested(2, _attribute(1, _be32(0))))
        )
    )
    rule = _attribute(1, _text(_TABLE)) + _attribute(2, _text(_CHAIN)) + _nested(4, expressions)
    messages = [
        _message(_BATCH_BEGIN, _REQUEST, 0, socket.AF_UNSPEC, b"", _NFTABLES),
        _message(
            _NFTABLES << 8 | _NEW_TABLE, _REQUEST | _ACK | _CREATE, 1, _FAMILY_NETDEV, _attribute(1, _text(_TABLE))
        ),
        _message(_NFTABLES << 8 | _NEW_CHAIN, _REQUEST | _ACK | _CREATE, 2, _FAMILY_NETDEV, chain),
        _message(_NFTABLES << 8 | _NEW_RULE, _REQUEST | _ACK | _CREATE | _APPEND, 3, _FAMILY_NETDEV, rule),
        _message(_BATCH_END, _REQUEST, 4, socket.AF_UNSPEC, b"", _NFTABLES),
    ]
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER) as kernel:
        kernel.settimeout(10)
        kernel.send(b"".join(messages))
        answered = 0
        while answered < 3:
            data = kernel.recv(65536)
            while data:
                length, kind = struct.unpack_from("=IH", data)
                if kind == _ERROR:
                    (code,) = struct.unpack_from("=i", data, 16)
                    if code:
                        raise OSError(-code, os.strerror(-code))
                    answered += 1
                data = data[(length + 3) & ~3 :]


def _message(kind: int, flags: int, number: int, family: int, attributes: bytes, resource: int = 0) -> bytes:
    body = struct.pack("=BB", family, 0) + struct.pack(">H", resource) + attributes
    return struct.pack("=IHHII", 16 + len(body), kind, flags, number, 0) + body


def _expression(name: str, *attributes: bytes) -> bytes:
    return _nested(1, _attribute(1, _text(name)) + _nested(2, b"".join(attributes)))


def _nested(kind: int, attributes: bytes) -> bytes:
    return _attribute(kind | _NESTED, attributes)


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + b"\0" * (-len(value) % 4)


def _be32(value: int) -> bytes:
    return struct.pack(">I", value)


def _text(value: str) -> bytes:
    return value.encode() + b"\0"
