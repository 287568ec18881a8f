"""Secure aggregation (Bonawitz et al. 2017): the server learns the sum of the clients' vectors and nothing else.

Every client masks its vector with one random stream for each other client, which cancels in the sum, and with one of
its own. The keys of both are shared among the clients (Shamir), so that any `threshold` of them can remove the masks of
clients that dropped out, or the own masks of those that did not; never both for the same client. Vectors are
fixed-point numbers modulo 2**64. The server follows the protocol but may look at all messages.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

FRACTION_BITS = 40
"""Fixed-point precision: 2**-40, with a range of ±2**23 for the sum."""
PRIME = 2**521 - 1
"""Field of Shamir's shares; larger than a key of 256 bits."""
KEY_BYTES = 32
Vector = Tensor
"""int64, added modulo 2**64."""


def encode(values: Tensor) -> Vector:
    """A float tensor as fixed-point numbers."""
    return (values.double() * 2**FRACTION_BITS).round().to(torch.int64)


def decode(vector: Vector) -> Tensor:
    """Fixed-point numbers as fp64."""
    return vector.double() / 2**FRACTION_BITS


def stream(key: bytes, length: int) -> Vector:
    """Pseudo-random int64 numbers from a key (ChaCha20)."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    cipher = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    return torch.frombuffer(bytearray(cipher.update(bytes(8 * length))), dtype=torch.int64)


def split_secret(secret: bytes, holders: Iterable[int], threshold: int) -> dict[int, int]:
    """Shamir's shares of a secret by holder: any `threshold` of them restore it, fewer reveal nothing."""
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    shares = {}
    for holder in holders:
        value = 0
        for coefficient in reversed(coefficients):
            value = (value * (holder + 1) + coefficient) % PRIME
        shares[holder] = value
    return shares


def join_secret(shares: Mapping[int, int]) -> bytes:
    """The secret of at least `threshold` shares, by Lagrange interpolation at 0."""
    total = 0
    for holder, share in shares.items():
        numerator = denominator = 1
        for other in shares:
            if other != holder:
                numerator = numerator * (other + 1) % PRIME
                denominator = denominator * (other - holder) % PRIME
        total = (total + share * numerator * pow(denominator, -1, PRIME)) % PRIME
    return total.to_bytes(KEY_BYTES, "big")


def public_key(private: bytes) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agree(private: bytes, public: bytes, purpose: bytes) -> bytes:
    """The key that two clients share for a purpose (X25519 and HKDF)."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    shared = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    return HKDF(SHA256(), KEY_BYTES, None, purpose).derive(shared)


def pairwise_mask(client: int, other: int, private: bytes, public: bytes, length: int) -> Vector:
    """The mask between two clients, which each adds with the opposite sign."""
    mask = stream(agree(private, public, b"weft mask"), length)
    return mask if client < other else -mask


@dataclass
class SecureClient:
    """One client's part of a round."""

    client: int
    threshold: int
    transport_key: bytes = field(default_factory=lambda: secrets.token_bytes(KEY_BYTES))
    """Encrypts the shares for other clients."""
    mask_key: bytes = field(default_factory=lambda: secrets.token_bytes(KEY_BYTES))
    """Makes the pairwise masks."""
    own_key: bytes = field(default_factory=lambda: secrets.token_bytes(KEY_BYTES))
    """Makes the client's own mask."""
    keys: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    """Public transport and mask keys of all clients of the round."""
    held: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Shares of other clients' mask and own keys."""
    revealed: bool = False

    def public_keys(self) -> tuple[bytes, bytes]:
        return public_key(self.transport_key), public_key(self.mask_key)

    def make_shares(self, keys: dict[int, tuple[bytes, bytes]]) -> dict[int, bytes]:
        """Encrypted shares of this client's mask and own keys, by receiver."""
        if len(keys) < self.threshold or len({key for pair in keys.values() for key in pair}) < 2 * len(keys):
            raise ValueError(f"{len(keys)} clients with distinct keys are not the {self.threshold} that are needed")
        self.keys = keys
        mask = split_secret(self.mask_key, keys, self.threshold)
        own = split_secret(self.own_key, keys, self.threshold)
        self.held[self.client] = (mask[self.client], own[self.client])
        return {other: self._seal(other, [mask[other], own[other]]) for other in keys if other != self.client}

    def receive_shares(self, sealed: Mapping[int, bytes]) -> None:
        """Decrypt the shares of the clients that go on; only their masks are used."""
        for other, data in sealed.items():
            mask, own = self._open(other, data)
            self.held[other] = (mask, own)

    def mask(self, vector: Vector) -> Vector:
        """The vector with this client's masks."""
        masked = vector + stream(self.own_key, len(vector))
        for other in self.held:
            if other != self.client:
                masked += pairwise_mask(self.client, other, self.mask_key, self.keys[other][1], len(vector))
        return masked

    def reveal(self, survivors: Iterable[int]) -> dict[int, tuple[str, int]]:
        """Shares that remove masks: of each survivor's own key, and of the mask key of each client that dropped out."""
        alive = set(survivors)
        enough = len(alive) >= self.threshold and self.client in alive and alive <= self.held.keys()
        if self.revealed or not enough:
            raise ValueError(f"{len(alive)} survivors, of which {self.threshold} are needed once in a round")
        self.revealed = True
        return {c: ("own", own) if c in alive else ("mask", mask) for c, (mask, own) in self.held.items()}

    def _seal(self, other: int, shares: list[int]) -> bytes:
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

        nonce = secrets.token_bytes(12)
        text = json.dumps([hex(s) for s in shares]).encode()
        return nonce + ChaCha20Poly1305(self._transport(other)).encrypt(nonce, text, f"{self.client}-{other}".encode())

    def _open(self, other: int, data: bytes) -> tuple[int, int]:
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

        key = ChaCha20Poly1305(self._transport(other))
        mask, own = json.loads(key.decrypt(data[:12], data[12:], f"{other}-{self.client}".encode()))
        return int(mask, 16), int(own, 16)

    def _transport(self, other: int) -> bytes:
        return agree(self.transport_key, self.keys[other][0], b"weft shares")


def unmask(
    masked: Mapping[int, Vector],
    mask_publics: Mapping[int, bytes],
    revealed: Mapping[int, Mapping[int, tuple[str, int]]],
    threshold: int,
) -> Vector:
    """The sum of the survivors' vectors, from their masked vectors and the shares that clients revealed."""
    total = torch.stack(list(masked.values())).sum(0)
    for client, public in mask_publics.items():
        kind = "own" if client in masked else "mask"
        shares = {
            holder: shares_of[client][1] for holder, shares_of in revealed.items() if shares_of[client][0] == kind
        }
        if len(shares) < threshold:
            raise ValueError(f"{len(shares)} shares of client {client}, of which {threshold} are needed")
        key = join_secret(dict(list(shares.items())[:threshold]))
        if kind == "own":
            total -= stream(key, len(total))
            continue
        if public_key(key) != public:
            raise ValueError(f"the shares of client {client} do not restore its key")
        for survivor in masked:
            total += pairwise_mask(client, survivor, key, mask_publics[survivor], len(total))
    return total
