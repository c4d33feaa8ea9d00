"""CUDA devices that tests can have: all that kvpool uses of one, but the driver.

As a real one a fake device works later than it was asked to, in the order of each stream and in no
order between streams. Here it is as late as it may be: work runs when somebody waits for it, or
asks an event whether it has passed, and not before. So a wait that is missing, or one for another
stream, always shows.

Its memory has an address space of its own: addresses that no process has, where a real access of
the host ends the process. What torch offers to read device memory from the host raises, or waits
for the stream as it does on CUDA. Memory of the host is pinned or not: a copy that must not wait,
from or to memory that is not pinned, fails, where CUDA would silently wait.

The tensors run any program of torch, on the CPU, each operation when its stream reaches it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="devices need torch")

from torch.overrides import TorchFunctionMode  # noqa: E402

_TO_HOST = (
    torch.ops.aten._to_copy.default,
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
)
#: No process has addresses with these bits: an access faults.
_FAR = 0xDE << 48


class FakeStream:
    """Work in order. It runs when somebody waits for it."""

    def __init__(self, gpu: FakeGpu, device: Any) -> None:
        self.gpu = gpu
        self.device = device
        self.queued = 0
        self.done = 0
        self._work: deque[Callable[[], object]] = deque()
        gpu.streams.append(self)

    def queue(self, work: Callable[[], object]) -> None:
        with self.gpu.lock:
            self._work.append(work)
            self.queued += 1

    def run_to(self, position: int) -> None:
        """Run what was queued up to here. Raises RuntimeError, as CUDA does, for work that fails;
        it is told to whoever waits first."""
        self.gpu.wait_while_busy()
        with self.gpu.lock, torch.no_grad():
            while self.done < position:
                self.done += 1
                work = self._work.popleft()
                self.gpu.fail_if_asked()
                work()

    def synchronize(self) -> None:
        self.run_to(self.queued)

    def record_event(self) -> FakeEvent:
        event = FakeEvent(gpu=self.gpu)
        event.record(self)
        return event


class FakeEvent:
    """A point in the work of a stream: `torch.cuda.Event`."""

    def __init__(self, *, gpu: FakeGpu, blocking: bool = False) -> None:
        self._gpu = gpu
        self._blocking = blocking
        self._stream: FakeStream | None = None
        self._position = 0
        self._number = next(gpu.events)

    def __hash__(self) -> int:
        return self._number  # sets of events iterate alike in each run

    def record(self, stream: FakeStream | None = None) -> None:
        self._stream = stream or self._gpu.current_stream()
        self._position = self._stream.queued

    def query(self) -> bool:
        """A device goes on while it is asked: one piece of work each time."""
        self._gpu.touch()
        stream = self._stream
        if stream is None or stream.done >= self._position:
            return True
        if not self._gpu.busy:
            stream.run_to(stream.done + 1)
        return False

    def synchronize(self) -> None:
        assert self._blocking, "the thread would spin, and use up a core"
        if self._stream is not None:
            self._stream.run_to(self._position)


class FakeTensor(torch.Tensor):  # type: ignore[misc,name-defined,unused-ignore]
    """A tensor on a fake device. Its bytes are in `behind`, which only the device may touch."""

    is_cuda = True
    is_cpu = False
    is_meta = False
    behind: Any
    gpu: FakeGpu
    place: Any

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, behind: Any, gpu: FakeGpu, place: Any) -> FakeTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            behind.size(),
            strides=behind.stride(),
            storage_offset=behind.storage_offset(),
            dtype=behind.dtype,
            device="meta",
        )
        made.behind, made.gpu, made.place = behind, gpu, place
        return made  # type: ignore[no-any-return]

    @property
    def device(self) -> Any:
        return self.place

    def data_ptr(self) -> int:
        return int(self.behind.data_ptr()) ^ _FAR

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [one for one in _leaves((args, kwargs)) if isinstance(one, FakeTensor)]
        return tensors[0].gpu.run(func, args, kwargs, tensors)


class FakeGpu:
    """Some fake devices and their driver, in the place of torch's own until the test ends."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.lock = threading.RLock()
        self.events = itertools.count()
        #: While it is set the devices do nothing, and who waits for them waits.
        self.busy = False
        #: What the next work that runs raises, as CUDA would say it.
        self.fails = ""
        self.streams: list[FakeStream] = []
        #: Memory that a network card was given.
        self.registered: list[FakeTensor] = []
        #: Devices on which a thread has made a context, as CUDA does for its current one.
        self.contexts: set[Any] = set()
        self._idle = threading.Event()
        self._idle.set()
        self._threads = threading.local()
        self._defaults: dict[Any, FakeStream] = {}
        self._pinned: list[tuple[int, int]] = []
        self._keep: list[Any] = []
        patch.setattr(torch.cuda, "Stream", lambda device=None: FakeStream(self, _cuda(device)))
        patch.setattr(
            torch.cuda, "Event", lambda blocking=False: FakeEvent(gpu=self, blocking=blocking)
        )
        patch.setattr(torch.cuda, "stream", self.on_stream)
        patch.setattr(torch.cuda, "synchronize", self.synchronize)
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "set_device", self.set_device)
        patch.setattr(torch.cuda, "device_count", lambda: 2)
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 40, 1 << 40))
        patch.setattr(torch.cuda, "empty_cache", lambda: None)
        patch.setattr(torch.cuda, "current_stream", self.current_stream)
        patch.setattr(torch, "inference_mode", torch.no_grad)  # no tensors of our own kind in it
        patch.setattr("kvpool.device_copy.pinned", self.pinned)
        patch.setattr("kvpool.device.lane.pinned", self.pinned)
        patch.setattr("kvpool.device.checksum.uses_kernels", lambda device: False)
        if importlib.util.find_spec("ucxx") is not None:
            import ucxx._lib.arr

            patch.setattr(ucxx._lib.arr, "Array", self._registered(ucxx._lib.arr.Array))

    # --- for tests -------------------------------------------------------------------------

    def tensor(self, data: bytes, device: int = 0) -> Any:
        """These bytes on a device; the upload has ended."""
        behind = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return FakeTensor(behind, self, torch.device("cuda", device))

    def content(self, tensor: Any) -> bytes:
        """What is in the memory now, whatever is still queued."""
        return bytes(tensor.behind.contiguous().view(-1).view(torch.uint8).numpy())

    def stop(self) -> None:
        """The devices have other work."""
        self.busy = True
        self._idle.clear()

    def go_on(self) -> None:
        self.busy = False
        self._idle.set()

    # --- in the place of torch.cuda ------------------------------------------------------------

    @contextlib.contextmanager
    def on_stream(self, stream: FakeStream) -> Iterator[None]:
        stack = self._streams()
        stack.append(stream)
        try:
            with _Factories(self):
                yield
        finally:
            stack.pop()
            self.touch()  # torch makes the device before current again

    def set_device(self, device: Any) -> None:
        self._threads.device = _cuda(f"cuda:{device}" if isinstance(device, int) else device)
        self.touch()

    def touch(self) -> None:
        self.contexts.add(getattr(self._threads, "device", torch.device("cuda", 0)))

    def current_stream(self, device: Any = None) -> FakeStream:
        stack = self._streams()
        if device is None and stack:
            return stack[-1]  # its device is the current one
        place = _cuda(device)
        if stack and stack[-1].device == place:
            return stack[-1]
        return self._defaults.setdefault(place, FakeStream(self, place))

    def synchronize(self, device: Any = None) -> None:
        for stream in self.streams:
            if stream.device == _cuda(device):
                stream.synchronize()

    def pinned(self, size: int, device: Any) -> Any:
        memory = torch.empty(size, dtype=torch.uint8)
        self._keep.append(memory)
        self._pinned.append((memory.data_ptr(), memory.data_ptr() + size))
        return memory

    def is_pinned(self, address: int) -> bool:
        return any(first <= address < end for first, end in self._pinned)

    # --- for streams and tensors ---------------------------------------------------------------

    def wait_while_busy(self) -> None:
        assert self._idle.wait(20.0), "the device was left busy"

    def fail_if_asked(self) -> None:
        if self.fails:
            why, self.fails = self.fails, ""
            raise RuntimeError(why)

    def upload(self, host: Any, device: Any) -> FakeTensor:
        return FakeTensor(host.clone(), self, _cuda(device))

    def run(self, func: Any, args: Any, kwargs: Any, tensors: list[FakeTensor]) -> Any:
        """One operation of torch: views at once, all else when the stream reaches it."""
        place = tensors[0].place
        behind_args, behind_kwargs = _each(_behind, (args, kwargs))
        if func.is_view:
            views = func(*behind_args, **behind_kwargs)
            return _each(lambda view: FakeTensor(view, self, place), views)
        if func is torch.ops.aten.copy_.default:
            return self._copy(*args, **kwargs)
        if func in _TO_HOST and _cuda(kwargs.get("device", "cpu"), none=None) is None:
            self.current_stream(place).synchronize()  # the host waits
            return func(*behind_args, **behind_kwargs)
        return self._queue(func, args, kwargs, behind_args, behind_kwargs, tensors)

    def _queue(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        behind_args: Any,
        behind_kwargs: Any,
        tensors: list[FakeTensor],
    ) -> Any:
        place = tensors[0].place
        assert all(tensor.place == place for tensor in tensors), f"{func} on several devices"
        for tensor in _leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, FakeTensor):
                assert tensor.ndim == 0, f"{func} of the host's memory on a device"
        behind_kwargs.pop("device", None)
        if any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments):
            self.current_stream(place).queue(lambda: func(*behind_args, **behind_kwargs))
            return args[0]
        results = _each(_like, _shapes_of(func, behind_args, behind_kwargs))

        def work() -> None:
            made = func(*behind_args, **behind_kwargs)
            for result, one in zip(_leaves(results), _leaves(made), strict=True):
                result.copy_(one)

        self.current_stream(place).queue(work)
        return _each(lambda result: FakeTensor(result, self, place), results)

    def _copy(self, target: Any, source: Any, non_blocking: bool = False) -> Any:
        sides = [t for t in (target, source) if not isinstance(t, FakeTensor)]
        places = [t.place for t in (target, source) if isinstance(t, FakeTensor)]
        to, of = (t.behind if isinstance(t, FakeTensor) else t for t in (target, source))
        stream = self.current_stream(places[0])
        stream.queue(lambda: to.copy_(of))
        for host in sides:
            if not non_blocking:
                stream.synchronize()
            else:
                ends = host.data_ptr(), host.data_ptr() + host.numel() * host.element_size() - 1
                assert all(map(self.is_pinned, ends)), "CUDA would wait: this memory is not pinned"
                assert host.is_contiguous(), "torch would copy over pageable memory of its own"
        return target

    def _streams(self) -> list[FakeStream]:
        if not hasattr(self._threads, "stack"):
            self._threads.stack = []
        stack: list[FakeStream] = self._threads.stack
        return stack

    def _registered(self, array: Any) -> Any:
        """UCX's buffer: as a network card does, it reaches the memory behind an address of a
        device, and knows nothing of streams."""

        def make(buffer: Any) -> Any:
            if not isinstance(buffer, FakeTensor):
                return array(buffer)
            shown = buffer.__cuda_array_interface__
            size = shown["shape"][0]
            assert shown["typestr"] == "|u1", "a row of bytes"
            memory = (ctypes.c_uint8 * size).from_address(shown["data"][0] ^ _FAR)
            memory.owner = buffer
            self.registered.append(buffer)
            return array(memoryview(memory).cast("B"))

        return make


class _Factories(TorchFunctionMode):  # type: ignore[misc,unused-ignore]
    """New tensors, where the code of a stream asks for them on a device."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.to and not isinstance(args[0], FakeTensor):
            place = _cuda(kwargs.get("device", args[1] if len(args) > 1 else None), none=None)
            return func(*args, **kwargs) if place is None else self._gpu.upload(args[0], place)
        if func is torch.Tensor.pin_memory:
            whole = args[0].contiguous()
            place = self._gpu.pinned(whole.nbytes, None).view(whole.dtype).view(whole.shape)
            return place.copy_(whole)
        if kwargs.pop("pin_memory", False):
            whole = func(*args, **kwargs)
            return self._gpu.pinned(whole.nbytes, None).view(whole.dtype).view(whole.shape)
        place = _cuda(kwargs.get("device"), none=None)
        if place is not None and not any(isinstance(one, FakeTensor) for one in args):
            return self._gpu.upload(func(*args, **{**kwargs, "device": "cpu"}), place)
        return func(*args, **kwargs)


_NONE = object()


def _cuda(device: Any, none: Any = _NONE) -> Any:
    """The device with its number; `none` for what is no CUDA device."""
    if isinstance(device, torch.device | str) and torch.device(device).type == "cuda":
        return torch.device("cuda", torch.device(device).index or 0)
    return torch.device("cuda", 0) if none is _NONE else none


def _each(do: Callable[[Any], Any], what: Any) -> Any:
    """The same, with `do` of each tensor in it. Torch's own for trees takes ten times as long."""
    if isinstance(what, torch.Tensor):
        return do(what)
    if isinstance(what, dict):
        return {name: _each(do, one) for name, one in what.items()}
    return type(what)([_each(do, one) for one in what]) if type(what) in (list, tuple) else what


def _leaves(what: Any) -> Iterator[Any]:
    if isinstance(what, dict | list | tuple):
        for one in what.values() if isinstance(what, dict) else what:
            yield from _leaves(one)
    else:
        yield what


def _behind(tensor: Any) -> Any:
    return tensor.behind if isinstance(tensor, FakeTensor) else tensor


def _like(shape: Any) -> Any:
    return torch.empty_strided(shape.size(), shape.stride(), dtype=shape.dtype)


def _shape(tensor: Any) -> Any:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


#: What torch says of the shape of a result; it takes long to find out, and there are few.
_shapes: dict[str, Any] = {}


def _shapes_of(func: Any, args: Any, kwargs: Any) -> Any:
    asked = _each(lambda one: (one.size(), one.stride(), one.dtype), (args, kwargs))
    key = f"{func} {asked}"
    if key not in _shapes:
        args, kwargs = _each(_shape, (args, kwargs))
        _shapes[key] = func(*args, **kwargs)
    return _shapes[key]
