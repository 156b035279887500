"""Adds the logs of the servers that a failed test used to its report.

The hook is imported by the ``conftest.py`` of each folder whose tests use a server.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

from tests.processes.server import Server


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Function,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        for name, value in item.funcargs.items():
            if isinstance(value, Server):
                report.sections.append((f"logs of {name}", value.logs()))
    return report
