"""Another user of the host of a pool: sees that there are processes, and nothing of theirs."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest

from tests.attack.castle import LINES_MAX, MODEL, Castle
from tests.conftest import keys, value
from tests.support import messages as wire
from tests.support.processes import script
from tests.support.raw_peers import frame

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user"),
]

#: What it could do, of all that it tries; the folder of the pool may be entered by all.
CURIOUS = '''
import json, os, pathlib, socket, struct, sys
os.setgroups([]), os.setgid(65534), os.setuid(65534)
folder, unix, pids, needles, hello, proof = json.loads(sys.argv[1])
could, refused = [], {}

def tries(what, how):
    try:
        if how():
            could.append(what)
    except OSError as error:
        refused[what] = str(error)

for path in pathlib.Path(folder).iterdir():
    if path.suffix in (".secret", ".key"):
        tries(f"read {path.name}", path.read_bytes)
    tries(f"write {path.name}", lambda: path.open("ab"))
for pid in pids:
    proc = pathlib.Path(f"/proc/{pid}")
    for name in ("environ", "mem", "maps", "smaps", "stack"):
        tries(f"read {proc / name}", lambda: (proc / name).open("rb").read(1))
    tries(f"list {proc / 'fd'}", lambda: list((proc / "fd").iterdir()))
    line = (proc / "cmdline").read_bytes()
    could += [f"find a secret in {proc / 'cmdline'}" for one in needles if one.encode() in line]
for path in pathlib.Path("/dev/shm").iterdir():
    if "kvpool" in path.name:
        tries(f"read {path}", lambda: path.open("rb").read(1))

def maps():
    """Ask for the segment as an honest client does, but for its proof."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(3)
    sock.connect(chr(0) + unix)
    for said in hello, proof:
        sock.sendall(bytes.fromhex(said))
        data, passed, _, _ = socket.recv_fds(sock, 1 << 16, 4)
    return passed

def hears():
    """What it is told before its first word."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(chr(0) + unix)
    raise OSError(str(sock.recv(4096)))

tries("hear why", hears)
for _ in range(100):
    tries("map the segment", maps)
print(json.dumps([could, refused]))
'''


async def test_another_user_learns_nothing(attacked: Castle) -> None:
    """Neither secrets nor blocks: not from files, /proc, shared memory or the socket of shm."""
    first = keys("local", 1)
    async with await attacked.client() as pool:
        await pool.write(MODEL, first, [value(first[0])])
        (member,) = await pool.members()
    (name,) = (one[len("shm://@") :] for one in member.addresses if one.startswith("shm"))
    for path in (attacked.folder, *attacked.folder.parents):
        if path.is_relative_to(tempfile.gettempdir()) and path != Path(tempfile.gettempdir()):
            path.chmod(0o755)  # what protects the secrets is not that nobody gets there
    pids = [node.process.pid for node in attacked.nodes if node.process is not None]
    lines = len(attacked.lines(attacked.server))
    needles = [(attacked.folder / "cluster.secret").read_text().strip()]
    asks = [frame(wire.Hello("default", "curious", bytes(32))), frame(wire.Proof(bytes(32)))]
    told = [str(attacked.folder), name, pids, needles, *(one.hex() for one in asks)]
    async with script(CURIOUS, json.dumps(told)) as child:
        could, refused = json.loads(await child.line())
    assert could == []
    assert "map the segment" in refused
    assert "is of user 65534" in refused["hear why"]
    said = attacked.lines(attacked.server)[lines:]
    assert any("refused a client of another user" in line for line in said)
    assert len(said) <= LINES_MAX
    for node in attacked.nodes:
        node.check()
