"""What the host runs on."""


def get_device_type() -> str:
    return "cpu"
