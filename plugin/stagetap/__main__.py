"""``python -m stagetap``: the ``stagetap`` command of this very interpreter."""

from stagetap.cli import main

if __name__ == "__main__":
    main()
