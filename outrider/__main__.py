"""`python -m outrider`: the command line."""

from __future__ import annotations

from outrider.cli.main import main

if __name__ == "__main__":
    main(prog_name="outrider")
