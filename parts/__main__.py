"""`python -m parts`. Without the packages it needs, it says where they are."""

import sys

try:
    from parts.cli import app
except ModuleNotFoundError as error:
    if error.name is None or error.name.startswith("parts"):
        raise
    print(
        f"Error: {error.name} is not installed for {sys.executable}. After `make demo`, in the checkout: "
        "`. .venv/bin/activate`. Then run this again.",
        file=sys.stderr,
    )
    sys.exit(2)

app(prog_name="python -m parts")
