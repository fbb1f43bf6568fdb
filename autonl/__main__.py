"""`python -m autonl`: the command line."""

from autonl.cli import main

if __name__ == "__main__":
    main()
