"""Python imports this at start, where this folder is on its path: see played_device.py."""

import played_device

played_device.install()
