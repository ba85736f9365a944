"""``python -m tugline``: the command line."""

from tugline.cli.app import main

if __name__ == "__main__":
    main()
