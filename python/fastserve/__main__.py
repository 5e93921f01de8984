"""``python -m fastserve`` is the command ``fastserve``."""

from fastserve.cli import main

if __name__ == "__main__":
    main()
