"""Object stores by `obstore`: S3, Google Cloud Storage, Azure, and a directory that is shared."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from kvpool.errors import ConfigError, Unavailable
from kvpool.protocols.cold_tier import Gone, Listed

#: Names that are listed at most: at 32 MiB each, 3 TiB.
_LISTED_MAX: Final = 100_000

#: Names in one turn of the loop.
_CHUNK: Final = 200
#: The library tries again by itself, but not for longer.
_RETRIES: Final = 2
_RETRY_S: Final = 4.0
#: Stores say in their answers what is wrong, with numbers that differ from request to request.
_CODE: Final = re.compile(r"<Code>(\w{1,64})</Code>")
#: It is as good as gone, while the store works.
_CUT: Final = "the object has become shorter"
_MEANINGS: Final = {
    "NoSuchBucket": "there is no such bucket",
    "ContainerNotFound": "there is no such container",
    "ExpiredToken": "the credentials have expired",
    "RequestTimeTooSkewed": "the clock of this host is not that of the store",
}


class ObstoreObjects:
    """One prefix of one bucket."""

    def __init__(self, url: str, prefix: str, endpoint: str, region: str) -> None:
        """Raises ConfigError. Credentials come from the environment, as `obstore` finds them."""
        try:
            import obstore
            from obstore import exceptions, store
        except ImportError:
            raise ConfigError(
                f"{url}: object stores need the package obstore: pip install 'kvpool[objects]'"
            ) from None
        self._obstore: Any = obstore
        self._exceptions: Any = exceptions
        options: dict[str, Any] = {}
        if not url.startswith("file:"):
            from datetime import timedelta

            options["client_options"] = {"allow_http": endpoint.startswith("http://")}
            options["retry_config"] = {
                "max_retries": _RETRIES,
                "retry_timeout": timedelta(seconds=_RETRY_S),
            }
        if endpoint:
            options["endpoint"] = endpoint
        if region:
            options["region"] = region
        if url.startswith("file:"):
            options["mkdir"] = True
        try:
            self._store: Any = store.from_url(f"{url.rstrip('/')}/{prefix}", **options)
        except Exception as error:  # the library raises several, also of its own kind
            raise ConfigError(f"{url}: {_first_line(error)}") from None

    async def put(self, name: str, data: bytes | memoryview) -> None:
        with self._errors(of_bucket=True):
            await self._obstore.put_async(self._store, name, data, use_multipart=False)

    async def get(self, name: str, start: int, size: int) -> bytes | memoryview:
        with self._errors():
            found = await self._obstore.get_range_async(self._store, name, start=start, length=size)
        data = memoryview(found)
        if len(data) != size:
            raise Gone(_CUT)
        return data

    async def listing(self, prefix: str) -> list[Listed]:
        found: list[Listed] = []
        with self._errors(of_bucket=True):
            async for page in self._obstore.list(self._store, prefix, chunk_size=_CHUNK):
                found += [
                    Listed(m["path"], m["size"], m["last_modified"].timestamp()) for m in page
                ]
                if len(found) >= _LISTED_MAX:
                    break
                await asyncio.sleep(0)
        return found

    async def folders(self, prefix: str) -> list[str]:
        with self._errors(of_bucket=True):
            page = await self._obstore.list_with_delimiter_async(self._store, prefix)
        return [path.rstrip("/").rpartition("/")[2] for path in page["common_prefixes"]]

    async def delete(self, name: str) -> None:
        try:
            with self._errors():
                await self._obstore.delete_async(self._store, name)
        except Gone:
            pass

    @contextmanager
    def _errors(self, of_bucket: bool = False) -> Iterator[None]:
        """Every error of the library as one of ours, in few words: it is a reason in a log.

        `of_bucket`: the request is not for an object, so what is not found is the bucket.
        """
        known = self._exceptions
        try:
            yield
        except (known.NotFoundError, FileNotFoundError) as error:
            meaning = _MEANINGS.get(_code(error), _MEANINGS["NoSuchBucket"] if of_bucket else "")
            if meaning:
                raise Unavailable(meaning) from None
            raise Gone("there is no such object") from None
        except Exception as error:  # also one of its runtime, when its own code fails
            if "InvalidRange" in str(error):
                raise Gone(_CUT) from None
            raise Unavailable(_reason(error)) from None


def _code(error: Exception) -> str:
    found = _CODE.search(str(error))
    return found[1] if found else ""


def _reason(error: Exception) -> str:
    """The same for all requests that fail for one reason."""
    text, code = str(error), _code(error)
    if code in _MEANINGS:
        return _MEANINGS[code]
    if " 401 " in text or " 403 " in text or "Unauthenticated" in text:
        return f"access is refused{f' ({code})' * bool(code)}: look at the credentials"
    if "kind: Connect" in text:
        return "no connection: look at the endpoint"
    return _first_line(error).partition(": <")[0] + f": {code}" * bool(code)


def _first_line(error: Exception) -> str:
    """Without what differs from request to request, such as names and numbers of them."""
    text = str(error).strip().splitlines()
    return text[0].rpartition(" - ")[2][:160] if text else type(error).__name__
