"""Lines of the pruning benchmark join, and none takes another's figures away."""

import pruning
from pruning_lines import tables

SWEPT = {
    **{"kind": "sweep", "key": "timm/resnet10t", "parameters": [10, 6], "seconds": 1.0},
    **{"multiply_adds": [4, 2], "eager_ms": {"whole": 4.0, "pruned": 3.0}, "left": []},
    **{"difference_float64": 1e-15, "left_units": 0},
}
COMPILED = {
    **{"kind": "compiled", "key": "timm/resnet10t", "parameters": [10, 6]},
    "compiled_ms": {"whole": 2.0, "pruned": 1.0},
}
FAILED = {"kind": "compiled", "key": "timm/resnet10t", "error": "TooLong: it took too long"}


def row(*lines) -> str:
    found = [text for text in tables(list(lines)).splitlines() if "| timm" in text]
    assert len(found) == 1
    return found[0]


def test_a_compiled_time_joins_the_line_that_is_there():
    assert "| 0.750 | - |" in row(SWEPT)
    assert "| 0.750 | 0.500 |" in row(SWEPT, COMPILED)


def test_a_failure_to_compile_takes_no_figure_away_and_is_told():
    assert "| 0.750 | - |" in row(SWEPT, FAILED)
    assert "| 0.750 | 0.500 |" in row(SWEPT, COMPILED, FAILED)
    assert "- timm/resnet10t: TooLong" in tables([SWEPT, FAILED])
    assert "TooLong" not in tables([SWEPT, FAILED, COMPILED])


def test_a_compiled_time_of_other_cuts_is_left_out():
    assert "| 0.750 | - |" in row(SWEPT, {**COMPILED, "parameters": [10, 5]})


def test_what_has_been_compiled_or_stays_whole_is_not_compiled_again():
    other = {**SWEPT, "key": "timm/vgg11", "seconds": 0.5}
    whole = {**SWEPT, "key": "timm/densenet121", "parameters": [10, 10]}
    todo = [a.key for a in pruning.to_compile([SWEPT, other, whole])]
    assert todo == ["timm/vgg11", "timm/resnet10t"]  # the faster first
    assert [a.key for a in pruning.to_compile([SWEPT, other, COMPILED])] == ["timm/vgg11"]
    assert [a.key for a in pruning.to_compile([SWEPT, FAILED])] == []
    assert [a.key for a in pruning.to_compile([SWEPT, FAILED], retry=True)] == [SWEPT["key"]]


def test_what_was_cut_otherwise_since_is_pruned_again_if_asked():
    other = {**COMPILED, "parameters": [10, 5]}

    def is_next(*lines, retry=True):
        return any(a.key == SWEPT["key"] for a in pruning.to_prune(list(lines), retry))

    assert is_next(SWEPT, other)
    assert not is_next(SWEPT, other, retry=False)
    assert not is_next(SWEPT, COMPILED)
    assert not is_next(SWEPT, other, {**SWEPT, "parameters": [10, 5]})
