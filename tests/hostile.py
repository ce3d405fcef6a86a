"""A verifier whose answers do something to their worker; workers import it, so it is light."""

import os
import signal
import sys
import time

from agon_jax.verifiers.verdict import Verdict


def judge(gold: str, answer: str, limit_s: int) -> Verdict:
    deed, _, argument = answer.partition(" ")
    if deed == "hang":
        time.sleep(60)
    elif deed == "spin":  # deaf to a polite end
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            pass
    elif deed == "exit":
        os._exit(int(argument))
    elif deed == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif deed == "hoard":
        bytearray(1 << 40)
    elif deed == "raise":
        raise ZeroDivisionError("out of an answer")
    elif deed == "modules":
        held = {"jax", "flax", "transformers"} & set(sys.modules)
        return Verdict(not held, ", ".join(sorted(held)) or "right")
    return Verdict(answer == gold, "right" if answer == gold else "wrong")


def fail() -> None:
    raise ImportError("no verifier here")
