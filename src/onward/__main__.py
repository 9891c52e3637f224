"""`python -m onward` is `onward`."""

from onward.cli import main

if __name__ == "__main__":
    main()
