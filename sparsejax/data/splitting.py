"""Which documents are held out: decided by a hash, so it is the same on every machine."""

import hashlib


def in_validation(key: bytes, fraction: float, seed: int = 0) -> bool:
    """True for about `fraction` of all keys; depends on nothing but the key and the seed.

    Args:
        key: what identifies the document: its path or its text.
        fraction: share to hold out, in [0, 1).
        seed: another seed holds out another sample.
    """
    digest = hashlib.sha256(seed.to_bytes(8, "little") + key).digest()
    return int.from_bytes(digest[:8], "little") < fraction * 2.0**64
