"""Both halves of the proofs in a handshake of the data plane; `kvpool.wire.auth` makes them."""

from __future__ import annotations

import secrets

from msgspec.structs import replace

from kvpool.errors import Unauthenticated
from kvpool.protocols import BlockStore
from kvpool.types import Cluster
from kvpool.wire import auth
from kvpool.wire.auth import Challenge, Proof
from kvpool.wire.messages import TYPES, Hello, Welcome, decode_answer
from kvpool_transports.streams.requests import Exchange
from kvpool_transports.streams.stream import Stream


async def prove(
    stream: Exchange, hello: Hello, cluster: Cluster, binding: bytes, deadline: float
) -> None:
    """Say `hello`, and prove that this client knows the secret, to a server that does. Raises
    Unauthenticated."""
    nonce = secrets.token_bytes(auth.NONCE_SIZE)
    key = auth.key_id(cluster, nonce) if cluster.tenant else b""
    hello = replace(hello, nonce=nonce, tenant=cluster.tenant, key=key)
    await stream.send(hello, deadline=deadline)
    frame = await stream.receive(deadline=deadline)
    if frame.type == TYPES[Welcome]:
        raise Unauthenticated("the server asks for no secret: give it the one of this client")
    challenge = decode_answer(Challenge, frame.type, frame.body)
    expected = auth.server_proof(cluster, nonce, challenge.nonce, binding)
    if not auth.same(challenge.proof, expected):
        middle = ", or another process answers in its place" if binding else ""
        raise Unauthenticated(f"the server does not know this cluster's secret{middle}")
    proof = Proof(auth.client_proof(cluster, nonce, challenge.nonce, binding))
    await stream.send(proof, deadline=deadline)


async def ask_for_proof(
    stream: Stream, store: BlockStore, hello: Hello, binding: bytes, deadline: float
) -> Cluster | None:
    """Let the client of this `hello` prove that it knows the secret: what a tenant's has proved,
    None for every other one.

    Raises Unauthenticated, with the same words whether there is such a tenant or not. What it
    returns is true until something is awaited.
    """
    seen, proved, secrets_of = store.cluster, None, store.guard.secrets_of
    if hello.tenant:
        good = secrets_of(hello.tenant)
        proved = auth.find_tenant(good, seen, hello.tenant, hello.key, hello.nonce)
        if proved is None:
            raise Unauthenticated(f"tenant {hello.tenant!r} does not have this secret here")
        seen = proved
    if len(hello.nonce) != auth.NONCE_SIZE:
        raise Unauthenticated("this cluster has a secret: give it (setting secret_file)")
    ours = secrets.token_bytes(auth.NONCE_SIZE)
    challenge = Challenge(ours, auth.server_proof(seen, hello.nonce, ours, binding))
    await stream.send(challenge, deadline=deadline)
    proof = await stream.expect(Proof, deadline=deadline)
    if not auth.same(proof.proof, auth.client_proof(seen, hello.nonce, ours, binding)):
        raise Unauthenticated("the client does not know this cluster's secret")
    if proved and proved.secret not in secrets_of(proved.tenant):  # it was revoked meanwhile
        raise Unauthenticated("this secret of the tenant is not valid any more")
    return proved
