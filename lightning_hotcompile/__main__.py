"""``python -m lightning_hotcompile`` is the command ``hotcompile``."""

from lightning_hotcompile.cli.main import main

if __name__ == "__main__":
    main()
