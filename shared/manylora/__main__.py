"""`python -m manylora`: the same as the command `manylora`."""

from manylora.cli import main

if __name__ == "__main__":
    main()
