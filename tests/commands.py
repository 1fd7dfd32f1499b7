"""Commands as a user types them, for the tests of the command line."""

from wfilter.cli import main as cli


def untrain_words(weights, *more):
    words = ["untrain", "wfilter:cnn-digits", "--weights", str(weights), "--dataset", "digits"]
    soft = ["--set", "gates=soft", "--set", "start=none", "--set", "depth=1.0"]
    return [*words, "--recipe", "distill", *soft, "--steps", "2", "--batch-size", "8", *more]


def complaint(capsys, *words, code=1):
    """The one line that a mistaken call prints."""
    assert cli.run([str(word) for word in words]) == code
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1, printed
    assert "Traceback" not in printed
    assert printed.startswith("wfilter: ")
    return printed
