"""Bytes that are nearly right."""

import random
from collections.abc import Sequence
from typing import Final

INTERESTING: Final = (0, 1, 2, 3, 4, 0x0B, 0x22, 0x26, 0x7F, 0x80, 0x81, 0xC0, 0xED, 0xFE, 0xFF)
NUMBERS: Final = (0, 1, 127, 128, 255, 256, 65535, 65536, (1 << 31) - 1, (1 << 32) - 1, 1 << 62)


def damage(rng: random.Random, data: bytes, corpus: Sequence[bytes]) -> bytes:
    """With zero to eight changes: bits, bytes, pieces that are gone, repeated or of another one."""
    body = bytearray(data)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3, 8))):
        at = rng.randrange(len(body) + 1)
        kind = rng.randrange(8)
        if kind == 0:
            body.insert(at, rng.choice(INTERESTING))
        elif kind == 1:
            del body[at : at + rng.choice((1, 1, 2, 4, len(body)))]
        elif kind == 2:
            other = rng.choice(corpus)
            cut = rng.randrange(len(other) + 1)
            body[at : at + rng.choice((0, len(body)))] = other[cut : cut + rng.randrange(40)]
        elif kind == 3:
            body[at:at] = body[at : at + rng.randrange(1, 20)] * rng.choice((1, 1, 2, 50))
        elif at < len(body):
            if kind == 4:
                body[at] ^= 1 << rng.randrange(8)
            elif kind == 5:
                body[at] = rng.choice(INTERESTING)
            elif kind == 6:
                body[at] = rng.randrange(256)
            else:
                # A length that is off by a little.
                body[at] = (body[at] + rng.choice((-2, -1, 1, 2))) & 255
    return bytes(body)


def noise(rng: random.Random) -> bytes:
    """Bytes without any form."""
    return rng.randbytes(rng.choice((0, 1, 2, 10, 100, 5000)))
