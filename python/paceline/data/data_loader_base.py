"""A loader that a script completes, and one that loads in a thread (`horovod.data.data_loader_base`)."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]


class BaseDataLoader:
    """Gives batches of a script's own data.

    A subclass defines `_iterate`, which yields the batches of an epoch, and `__len__`, their number; and
    `_process_batch`, if a batch is to be changed where it is used.
    """

    def __len__(self) -> int:
        """The number of batches of an epoch."""
        raise NotImplementedError(f"{type(self).__name__} has no __len__: define it, the number of batches")

    def _iterate(self) -> Iterator[Any]:
        """The batches of an epoch."""
        raise NotImplementedError(f"{type(self).__name__} has no _iterate: define it to yield batches")

    def _process_batch(self, batch: Any) -> Any:
        """The batch as the loop gets it."""
        return batch

    def __iter__(self) -> Iterator[Any]:
        """Begins an epoch."""
        for batch in self._iterate():
            yield self._process_batch(batch)


class AsyncDataLoaderMixin:
    """Loads up to `async_loader_queue_size` batches ahead, in a thread; 0 loads where they are used.

    It comes before the loader: `class Loader(AsyncDataLoaderMixin, MyLoader)`. Each iteration is an epoch with a thread
    of its own, which ends with it, also where the loop is left early. An error of the loader is raised in the loop.
    debug_data_loader: Horovod's, without effect.
    """

    def __init__(
        self, async_loader_queue_size: int = 64, debug_data_loader: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        if async_loader_queue_size < 0:
            raise ValueError(f"async_loader_queue_size is {async_loader_queue_size}, allowed is 0 and more")
        super().__init__(*args, **kwargs)
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        self._loading: _Loading | None = None

    def __iter__(self) -> Iterator[Any]:
        """Begins an epoch; one that has not ended is given up."""
        self.close_async_loader()
        if self.async_loader_queue_size == 0:
            yield from super().__iter__()  # type: ignore[misc]
            return
        loading = self._loading = _Loading(self._iterate(), self.async_loader_queue_size)  # type: ignore[attr-defined]
        try:
            for batch in loading:
                yield self._process_batch(batch)  # type: ignore[attr-defined]
        finally:
            loading.close()

    def close_async_loader(self) -> None:
        """Ends the thread of an epoch that is under way."""
        if self._loading is not None:
            self._loading.close()
            self._loading = None


class _Loading:
    """An epoch that a thread loads."""

    _END = object()

    def __init__(self, batches: Iterator[Any], ahead: int) -> None:
        self._queue: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(ahead)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._load, args=(batches,), name="data loader", daemon=True)
        self._thread.start()

    def _load(self, batches: Iterator[Any]) -> None:
        try:
            for batch in batches:
                if not self._put(batch):
                    break
        except BaseException as e:
            self._put(self._END, e)
        else:
            self._put(self._END)
        if self._closed.is_set():  # a consumer in another thread may wait; not where the queue is full
            with suppress(queue.Full):
                self._queue.put_nowait((self._END, None))

    def _put(self, batch: Any, error: BaseException | None = None) -> bool:
        """Waits for a place in the queue; False if the epoch was given up."""
        while not self._closed.is_set():
            try:
                self._queue.put((batch, error), timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def __iter__(self) -> Iterator[Any]:
        while not self._closed.is_set():
            batch, error = self._queue.get()
            if error is not None:
                raise error
            if batch is self._END:
                return
            yield batch

    def close(self) -> None:
        """Waits until the thread has loaded the batch at hand, and ends it."""
        self._closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
