"""What every test shares: one thread, so that ranks and tests do not fight for the cores; figures at a run's end."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_terminal_summary(terminalreporter):
    """What passed tests told by `record_property`; what they print stays unseen, and with it what a worker prints."""
    told = [pair for report in terminalreporter.getreports("passed") for pair in report.user_properties]
    if told:
        terminalreporter.section("figures")
    for name, value in told:
        terminalreporter.write_line(f"{name}: {value}")
