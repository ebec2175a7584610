"""``python -m outlast``: the command line."""

from outlast.cli import main

if __name__ == "__main__":
    main()
