"""Every message, of the kernel and of all rings: `wire.Drain` is where `wire.Hello` is."""
# ruff: noqa: F403

from __future__ import annotations

from kvpool.wire.auth import *
from kvpool.wire.changes import *
from kvpool.wire.hints import *
from kvpool.wire.messages import *
from kvpool.wire.moves import *
from kvpool.wire.questions import *
from kvpool.wire.removal import *
from kvpool_transports.ucx_token import *
