"""What UCX's own `ucx_perftest`, which its wheel has, brings over the same lanes: the limit of what
direct reads can.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import time
from typing import Final

_SIZE, _MESSAGES = 2 << 20, 200
_LIMIT_S: Final = 20.0
#: Of the host, or of the receiver's device.
INTO: Final = "cuda"


def rate(lanes: str, into: str | None = None) -> str:
    """Messages of 2 MiB from the host's memory into this kind of memory, as words: a machine may
    lack the program, or what it needs."""
    own = {**os.environ, "UCX_TLS": lanes}
    spec = importlib.util.find_spec("libucx")
    if spec is not None and "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY" not in own:  # that of the wheel
        places = spec.submodule_search_locations or []
        for name, folder in (("PATH", "bin"), ("LD_LIBRARY_PATH", "lib")):
            known = [own[name]] if own.get(name) else []
            own[name] = os.pathsep.join([*(f"{place}/{folder}" for place in places), *known])
    tool = shutil.which("ucx_perftest", path=own.get("PATH"))
    if tool is None:
        return "no ucx_perftest"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    kinds = ["-t", "tag_bw", "-m", f"host,{into or INTO}", "-s", str(_SIZE), "-n", str(_MESSAGES)]
    ask = [tool, "127.0.0.1", "-p", port, *kinds, "-w", "20", "-f"]
    receiver = subprocess.Popen(
        [tool, "-p", port], env=own, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    said = "refused"
    try:
        for _ in range(50):  # the receiver may not listen yet
            if "refused" not in said:
                break
            time.sleep(0.2)
            done = subprocess.run(
                ask, env=own, capture_output=True, text=True, timeout=_LIMIT_S, check=False
            )
            if done.returncode == 0:  # the overall bandwidth, in MiB/s
                return f"ucx_perftest {float(done.stdout.split()[-3]) * 2**20 / 1e9:.1f} GB/s"
            said = done.stderr or done.stdout
    except subprocess.TimeoutExpired:
        said = f"no answer within {_LIMIT_S:.0f} s"
    finally:
        receiver.kill()
        receiver.wait()
    return f"ucx_perftest: {said.strip().rpartition('ERROR ')[2].partition(chr(10))[0]}"
