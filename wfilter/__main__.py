"""``python -m wfilter``, which is what ``torchrun -m wfilter`` starts."""

from wfilter.cli.main import main

if __name__ == "__main__":
    main()
