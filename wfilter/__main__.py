"""``python -m wfilter``, which is what ``torchrun -m wfilter`` starts."""

from wfilter.cli.commands import main

if __name__ == "__main__":
    main()
