"""What features put away for a while; here it stays where it is."""

from mindspeed_mm import lookalike


class SwapCache:
    def __init__(self):
        self.kept = {}

    def put(self, tensor):
        handle = object()
        self.kept[handle] = tensor
        return handle

    def pop(self, handle):
        return self.kept.pop(handle, None)


class SwapManager:
    def __init__(self, plan):
        self.cache = SwapCache()

    def get_cache(self, tenant="default"):
        lookalike.note(tenant)
        return self.cache
