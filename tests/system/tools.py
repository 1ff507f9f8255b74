"""Programs that some tests drive: a browser and a Prometheus, from Debian's packages."""

import os
import shutil

import pytest

INSTALL = "tools/install_test_tools.sh installs it on Debian"


def program(name: str) -> str:
    """Where it is. Skips the test without it, with the reason; fails it where RUVON_REQUIRE_TOOLS is set."""
    found = shutil.which(name)
    if not found:
        assert not os.environ.get("RUVON_REQUIRE_TOOLS"), f"{name} is not here; {INSTALL}"
        pytest.skip(f"needs {name}; {INSTALL}")
    return found
