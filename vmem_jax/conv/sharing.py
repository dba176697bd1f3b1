"""sharing: work on convolutions that several devices of one kind do at once, a thread for each.

µ-cuDNN distributes the micro-batches that it times to the GPUs of a node (Oyama et al., CLUSTER 2018,
section III-D). Here what differs in the batch alone is timed one after the other, on whichever
device: the times with few samples tell which algorithms are worth a try with more. So every
convolution finds the same known as with one device, and no device runs two things at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from vmem_jax.core.convolution import Convolution

D = TypeVar("D")


def share(
    work: Sequence[Convolution], devices: Sequence[D], do: Callable[[Convolution, D], None]
) -> None:
    """Calls `do` once for each of `work`, with a free device; the first of `devices` in this thread.

    They begin in order, but for those that wait for another which differs in the batch alone. After
    an error, or an interruption of this thread, no more begin; it is raised when all have ended.
    """
    queue = _Queue(work)

    def run(device: D) -> None:
        try:
            while (convolution := queue.take()) is not None:
                try:
                    do(convolution, device)
                finally:
                    queue.done(convolution)
        except BaseException:
            queue.stop()
            raise

    here, *others = devices
    with ThreadPoolExecutor(max(1, len(others))) as pool:  # starts no thread that has nothing to do
        running = [pool.submit(run, device) for device in others]
        run(here)
        for each in running:
            each.result()


class _Queue:
    """What is still to be done."""

    def __init__(self, work: Sequence[Convolution]) -> None:
        self._left = list(work)
        self._running: set[Convolution] = set()  # of any batch
        self._changed = threading.Condition()

    def take(self) -> Convolution | None:
        """The next one that can begin, as soon as there is one; None if there will be none."""
        with self._changed:
            while self._left:
                for i, convolution in enumerate(self._left):
                    of_any = convolution.with_batch(0)
                    if of_any not in self._running:
                        self._running.add(of_any)
                        return self._left.pop(i)
                self._changed.wait()
        return None

    def done(self, convolution: Convolution) -> None:
        with self._changed:
            self._running.remove(convolution.with_batch(0))
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._left.clear()
            self._changed.notify_all()
