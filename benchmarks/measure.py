"""Time, memory, compilations, and the limits of the machine, as this process sees them.

Every figure is taken after the device is done. The limits are measured in the same process as the
work, after it, since a machine that is shared or throttled changes from one minute to the next.
"""

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

COMPILE_EVENTS = "/jax/core/compile/"  # tracing, lowering and the backend's own part


class CompileClock:
    """Seconds spent on compiling, and how many programs were compiled."""

    def __init__(self):
        self.seconds = 0.0
        self.programs = 0

    def record(self, event: str, seconds: float, **_: Any) -> None:
        if event.startswith(COMPILE_EVENTS):
            self.seconds += seconds
            self.programs += event.endswith("backend_compile_duration")


@contextmanager
def compile_clock() -> Iterator[CompileClock]:
    """Counts what is compiled inside the block."""
    clock = CompileClock()
    jax.monitoring.register_event_duration_secs_listener(clock.record)
    try:
        yield clock
    finally:
        jax.monitoring.unregister_event_duration_listener(clock.record)


def measured(run: Callable[[], Any], reps: int, tokens: int) -> dict[str, Any]:
    """What every part reports of its call, of `tokens` tokens: the first one, then `reps` more."""
    with compile_clock() as compiling:
        first = timed(run, 1)[0]
    with compile_clock() as recompiling:
        seconds = timed(run, reps)
    return {
        "tokens_per_s": tokens / median(seconds),
        "seconds": seconds,
        "first_call_s": first,
        "compile_s": compiling.seconds,
        "recompilations": recompiling.programs,
        "peak_memory_mb": peak_memory_mb(),
    }


def timed(run: Callable[[], Any], reps: int) -> list[float]:
    """Wall seconds of each of `reps` runs, sorted; `run` returns arrays, which are waited for."""
    seconds = []
    for _ in range(reps):
        start = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)


def median(ordered: list[float]) -> float:
    return ordered[len(ordered) // 2]


def peak_memory_mb() -> float:
    """The most memory held so far: of the device where it tells, else of this process."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    if all("peak_bytes_in_use" in s for s in stats):
        return max(s["peak_bytes_in_use"] for s in stats) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def matmul_flops(dtype: str, size: int = 2048) -> float:
    """FLOP/s of a square matrix product on one device, the best of five."""
    a = jnp.ones((size, size), dtype)
    product = jax.jit(lambda a: a @ a)
    jax.block_until_ready(product(a))
    return 2 * size**3 / timed(lambda: product(a), 5)[0]


def memory_bandwidth(megabytes: int = 256) -> float:
    """Bytes/s read and written by one device that adds 1 to an array, the best of five."""
    a = jnp.zeros(megabytes * 2**18, jnp.float32)
    add = jax.jit(lambda a: a + 1, donate_argnums=0)
    a = jax.block_until_ready(add(a))
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        a = jax.block_until_ready(add(a))
        seconds.append(time.perf_counter() - start)
    return 2 * a.nbytes / min(seconds)
