"""`holdfast` with a clock that is faster than real time: `python -m tests.support.fast_clock RATE
BEGAN_S SIMULATED_S serve ...`. At the real time BEGAN_S it is SIMULATED_S."""

import sys
import time


def simulated(rate: float, began_s: float, simulated_s: float, now_s: float) -> float:
    return simulated_s + (now_s - began_s) * rate


if __name__ == "__main__":
    real = time.time
    rate, began_s, simulated_s = map(float, sys.argv[1:4])
    time.time = lambda: simulated(rate, began_s, simulated_s, real())
    time.time_ns = lambda: round(time.time() * 1_000_000) * 1000

    from holdfast.cli.main import main

    sys.exit(main(sys.argv[4:]))
