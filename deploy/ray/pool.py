"""A pool on a Ray cluster: masters as named actors, and one server on each node.

    python deploy/ray/pool.py up --capacity 64GiB --secret-file /etc/kvpool/secret
    python deploy/ray/pool.py masters       # HOST:PORT,HOST:PORT, for clients
    python deploy/ray/pool.py status
    python deploy/ray/pool.py down

kvpool[ray] must be installed on all nodes, and the secret's file be there. Each actor runs one
process of kvpool and takes it with it when it ends. (docs/operate.md, "Run a pool on Ray")
"""

from __future__ import annotations

import argparse
import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any, NoReturn

import ray
from ray.util import get_node_ip_address, placement_group, remove_placement_group
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from kvpool.errors import ConfigError
from kvpool.units import human, parse_size

MASTER, SERVER = "kvpool-master-{}", "kvpool-server-{}"
GROUP = "kvpool-servers"
#: For a node to take its server, and for a process to be ready.
PLACED_WITHIN_S = 30.0
READY_WITHIN_S = 60.0
#: For an actor to answer: it does at once, unless its node is lost.
ANSWER_S = 3.0
#: Between the end of a process and its next start; doubled each time, up to the last.
AGAIN_S, AGAIN_S_MAX = 1.0, 30.0


class Process:
    """One process of kvpool, as an actor: it is started again when it ends.

    In words, `{ip}` is the address of this node and `{id}` is a name of it; `{masters}` is replaced
    before each start, so that masters that have moved are found.
    """

    def __init__(self, words: list[str], masters: list[str]) -> None:
        node, ip = ray.get_runtime_context().get_node_id()[:8], get_node_ip_address()
        self._where = f"node {node} at {ip}"
        ip = f"[{ip}]" if ":" in ip else ip
        here = {"{ip}": ip, "{id}": f"{socket.gethostname()}-{node}"}
        for name, value in here.items():
            words = [word.replace(name, value) for word in words]
        self._words = words
        self._masters = masters
        self._changed = threading.Condition()
        self._process: subprocess.Popen[str] | None = None
        self._ready, self._last, self._starts, self._stopping = "", "", 0, False
        # One thread for all of its life: the kernel ends the process with the thread that made it.
        threading.Thread(target=self._supervise, daemon=True).start()

    def address(self) -> str:
        """`HOST:PORT` of a master."""
        return self._words[self._words.index("--bind") + 1]

    def ready(self, within_s: float) -> tuple[str, str]:
        """The line that says what it offers, and ""; or "" and why it does not start."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._starts > 1, within_s)
            if self._ready:
                return self._ready, ""
            return "", self._last or f"it was not ready after {within_s:g} s"

    def describe(self) -> tuple[str, int, str, int]:
        """Its node, its pid, what it offers ("": it is not ready), and number of starts."""
        process = self._process
        return self._where, process.pid if process is not None else 0, self._ready, self._starts

    def stop(self, within_s: float) -> bool:
        """SIGTERM, which hands over blocks if `--drain` says so; True when it has ended."""
        with self._changed:
            self._stopping = True
            if self._process is not None:
                self._process.send_signal(signal.SIGTERM)
            return self._changed.wait_for(lambda: self._process is None, within_s)

    def _supervise(self) -> None:
        again_s = AGAIN_S
        while not self._stopping:
            began = time.monotonic()
            try:
                self._run_once()
            except Exception as error:  # this node cannot start a process, Ray does not answer, ...
                logging.exception("the process is started again")
                self._last = str(error)
            again_s = AGAIN_S if time.monotonic() - began > 60 else min(2 * again_s, AGAIN_S_MAX)
            time.sleep(again_s)

    def _run_once(self) -> None:
        words = self._with_masters()
        with self._changed:
            if self._stopping:
                return
            self._starts += 1
            self._changed.notify_all()
            self._process = process = subprocess.Popen(
                [sys.executable, "-m", "kvpool", *words, "--die-with-parent"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",  # a name in its log may be any bytes
            )
        try:
            self._read(process)
        except Exception:
            process.terminate()
            assert process.stdout is not None
            process.stdout.close()  # nobody reads what it says any more: it would wait for that
            raise
        finally:
            process.wait()
            with self._changed:
                self._process, self._ready = None, ""
                self._changed.notify_all()

    def _with_masters(self) -> list[str]:
        if not self._masters:
            return self._words
        while not (addresses := master_addresses(self._masters)):
            time.sleep(AGAIN_S)
        return [word.replace("{masters}", ",".join(addresses)) for word in self._words]

    def _read(self, process: subprocess.Popen[str]) -> None:
        """Pass its lines on to the actor's log, until it ends."""
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", file=sys.stderr, flush=True)
            with self._changed:
                self._last = line.strip()
                if line.startswith(("master at ", "server ")):
                    self._ready = self._last
                    self._changed.notify_all()


def fail(why: str) -> NoReturn:
    print(f"error: {why}", file=sys.stderr)
    raise SystemExit(1)


def found(name: str) -> Any:
    """The actor of this name; None if there is none."""
    try:
        return ray.get_actor(name)
    except ValueError:
        return None


def asked(answer: Any, within_s: float = ANSWER_S) -> Any:
    """What an actor has answered; None if it does not, such as when its node is lost."""
    try:
        return ray.get(answer, timeout=within_s)
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
        return None


def named(pattern: str) -> list[str]:
    """The names of all actors that there are of this kind."""
    prefix = pattern.format("")
    mine = [name for name in ray.util.list_named_actors() if name.startswith(prefix)]
    return sorted(mine, key=lambda name: int(name.removeprefix(prefix)))


def master_addresses(names: list[str]) -> list[str]:
    actors = [actor for name in names if (actor := found(name)) is not None]
    answers = [asked(actor.address.remote()) for actor in actors]
    return [address for address in answers if address]


def nodes() -> list[dict[str, Any]]:
    """Those that live; the head first, which is the last to go."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    return sorted(alive, key=lambda node: "node:__internal_head__" not in node["Resources"])


def start(name: str, words: list[str], masters: list[str], **options: Any) -> Any:
    """A detached actor, which Ray starts again when its process or its node is lost."""
    return (
        ray.remote(Process)
        .options(name=name, lifetime="detached", max_restarts=-1, max_concurrency=8, **options)
        .remote(words, masters)
    )


def up(wanted: argparse.Namespace, more: list[str]) -> None:
    """Start what is not there yet; when something does not start, end what this call has begun."""
    try:
        memory = parse_size(wanted.capacity)
    except ConfigError as error:
        fail(f"--capacity: {error}")
    hosts = nodes()
    servers = wanted.servers or len(hosts)
    for what, number in (("--masters", wanted.masters), ("--servers", servers)):
        if not 1 <= number <= len(hosts):
            fail(f"{what} {number}: expected 1 to {len(hosts)}, the nodes of this Ray cluster")
    common = ["--secret-file", wanted.secret_file] if wanted.secret_file else []
    begun: dict[str, Any] = {}
    names = [MASTER.format(number) for number in range(wanted.masters)]
    for number, name in enumerate(names):
        if found(name) is None:
            words = ["master", "--bind", f"{{ip}}:{wanted.port + number}", *common]
            here = NodeAffinitySchedulingStrategy(hosts[number]["NodeID"], soft=False)
            begun[name] = start(name, words, [], num_cpus=0, scheduling_strategy=here)
    if not (running := named(SERVER)):
        room = {"CPU": wanted.cpus, "memory": memory}
        group = placement_group([room] * servers, "STRICT_SPREAD", GROUP, lifetime="detached")
        if not group.wait(PLACED_WITHIN_S):
            end(begun, group)
            fail(
                f"no place for {servers} servers, each on a node of its own with {wanted.cpus:g} "
                f"CPU and {human(memory)}: `ray status` says what is free"
            )
        words = ["server", "--id", "{id}", "--masters", "{masters}", "--listen", wanted.listen]
        if not any(word.partition("=")[0] == "--tier" for word in more):  # it has one of them
            words += ["--capacity", wanted.capacity]
        words += [*common, *more]
        for number in range(servers):
            place = PlacementGroupSchedulingStrategy(group, number)
            need = {"num_cpus": wanted.cpus, "memory": memory, "scheduling_strategy": place}
            name = SERVER.format(number)
            begun[name] = start(name, words, names, **need)
    for name, actor in begun.items():
        line, why = asked(actor.ready.remote(READY_WITHIN_S), 2 * READY_WITHIN_S) or ("", "lost")
        if not line:
            end(begun, None if running else group)
            fail(f"{name} does not start: {why.removeprefix('error: ')}")
        print(line)
    if running:
        print(f"{len(running)} servers run already: `down` ends them")


def end(actors: dict[str, Any], group: PlacementGroup | None, within_s: float = 0.0) -> None:
    """Servers first, each in order if it has `within_s` for it."""
    ordered = sorted(actors, reverse=True)
    ending = {name: actors[name].stop.remote(within_s) for name in ordered if "server" in name}
    for name in ordered:
        if name in ending and within_s and asked(ending[name], within_s + ANSWER_S) is None:
            print(f"{name} did not answer, and is ended as it is", file=sys.stderr)
        ray.kill(actors[name])
    if group is not None:
        remove_placement_group(group)


def down(within_s: float) -> None:
    actors = {name: ray.get_actor(name) for name in [*named(SERVER), *named(MASTER)]}
    if not actors:
        fail("no pool runs in this Ray cluster (in this --namespace)")
    try:
        group = ray.util.get_placement_group(GROUP)
    except ValueError:
        group = None
    end(actors, group, within_s)


def status() -> None:
    names = [*named(MASTER), *named(SERVER)]
    answers = [(name, ray.get_actor(name).describe.remote()) for name in names]
    for name, answer in answers:
        where, pid, ready, starts = asked(answer) or ("no node: the one it had is lost", 0, "", 0)
        print(f"{name}  {where}  pid {pid or '-'}  starts {starts}  {ready or 'not ready'}")
    if not names:
        fail("no pool runs in this Ray cluster (in this --namespace)")


def main(arguments: list[str]) -> None:
    """The command line; what follows `--` goes to each `kvpool server`."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    more = arguments[cut + 1 :]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=["up", "down", "status", "masters"])
    parser.add_argument("--address", default="auto", help="of the Ray cluster")
    parser.add_argument("--namespace", default="kvpool", help="of Ray; one pool in each")
    parser.add_argument("--masters", type=int, default=1, help="each on a node of its own")
    parser.add_argument("--servers", type=int, default=0, help="default: one on each node")
    parser.add_argument("--capacity", default="1GiB", help="memory of each server, for Ray, too")
    parser.add_argument("--cpus", type=float, default=1.0, help="of each server")
    parser.add_argument("--port", type=int, default=7450, help="of the first master")
    parser.add_argument("--listen", default="shm://,tcp://{ip}:0", help="of servers")
    parser.add_argument("--secret-file", default="", help="a path that each node has")
    parser.add_argument("--within", type=float, default=60.0, help="down: seconds for each server")
    wanted = parser.parse_args(arguments[:cut])
    quiet: dict[str, Any] = {"logging_level": logging.ERROR}
    try:
        ray.init(wanted.address, namespace=wanted.namespace, log_to_driver=False, **quiet)
    except ConnectionError as error:
        fail(f"no Ray cluster at {wanted.address!r}: {error}")
    if wanted.command == "up":
        up(wanted, more)
    elif wanted.command == "down":
        down(wanted.within)
    elif wanted.command == "status":
        status()
    elif addresses := master_addresses(named(MASTER)):
        print(",".join(addresses))
    else:
        fail("no master of a pool answers in this Ray cluster (in this --namespace)")


if __name__ == "__main__":
    main(sys.argv[1:])
