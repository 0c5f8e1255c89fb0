"""``python -m blockhooks`` is the console script `blockhooks`."""

from blockhooks.cli import main

if __name__ == "__main__":
    main()
