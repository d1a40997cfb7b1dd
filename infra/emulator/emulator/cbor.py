"""The part of CBOR (RFC 8949) that rpc-v2-cbor sends: what moto's server does not speak."""

import datetime
import io
import struct


def encode(value):
    if value is None or isinstance(value, bool):
        return {None: b"\xf6", False: b"\xf4", True: b"\xf5"}[value]
    if isinstance(value, int):
        return _head(0, value) if value >= 0 else _head(1, -1 - value)
    if isinstance(value, float):
        return b"\xfb" + struct.pack(">d", value)
    if isinstance(value, bytes):
        return _head(2, len(value)) + value
    if isinstance(value, str):
        return _head(3, len(value.encode())) + value.encode()
    if isinstance(value, list):
        return _head(4, len(value)) + b"".join(map(encode, value))
    if isinstance(value, dict):
        return _head(5, len(value)) + b"".join(encode(k) + encode(v) for k, v in value.items())
    if isinstance(value, datetime.datetime):
        return _head(6, 1) + encode(value.timestamp())
    raise TypeError(f"{type(value)} is not sent in CBOR")


def decode(data):
    return _item(io.BytesIO(data))


def _head(major, number):
    for code, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if code == 24 and number < 24:
            return bytes([major << 5 | number])
        if number < 1 << 8 * size:
            return bytes([major << 5 | code]) + number.to_bytes(size)
    raise ValueError(f"{number} does not fit into 64 bits")


BREAK = object()


def _item(stream):
    first = stream.read(1)[0]
    major, info = first >> 5, first & 31
    if major == 7:
        if info in (25, 26, 27):
            return struct.unpack({25: ">e", 26: ">f", 27: ">d"}[info], stream.read(1 << info - 24))[0]
        return {20: False, 21: True, 22: None, 23: None, 31: BREAK}[info]
    endless = info == 31
    number = None if endless else info if info < 24 else int.from_bytes(stream.read(1 << info - 24))
    if major == 0:
        return number
    if major == 1:
        return -1 - number
    if major in (2, 3):
        if endless:
            return (b"" if major == 2 else "").join(_until_break(stream))
        return stream.read(number) if major == 2 else stream.read(number).decode()
    if major == 4:
        return list(_until_break(stream)) if endless else [_item(stream) for _ in range(number)]
    if major == 5:
        items = list(_until_break(stream)) if endless else [_item(stream) for _ in range(2 * number)]
        return dict(zip(items[::2], items[1::2]))
    value = _item(stream)
    return datetime.datetime.fromtimestamp(value, datetime.UTC) if number == 1 else value


def _until_break(stream):
    while (value := _item(stream)) is not BREAK:
        yield value
