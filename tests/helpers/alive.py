"""Whether equal steps leave more and more alive. The resident set cannot tell: an allocator keeps pages as it likes."""

import gc

from mindspeed_chunk.tools.measure import LiveBytes

STEPS = 50


def growth(step):
    """Bytes of tensors by which the second half of the steps leaves more alive than the first.

    Of a half, the step that leaves least counts: gloo's own thread may let go of the last message a moment later.
    """
    told = []
    gc.freeze()  # what is there already need not be looked at again and again
    try:
        with LiveBytes() as live:
            for _ in range(STEPS):
                step()
                gc.collect()
                told.append(live.now)
    finally:
        gc.unfreeze()
    half = STEPS // 2
    return min(told[half:]) - min(told[1:half])
