"""Mixed precision under a size: the part that loses most for its bytes gets them first."""

from __future__ import annotations

from itertools import product

from quire.quantize.allocate import Form, allocate


def forms(*pairs: tuple[int, float]) -> list[Form]:
    return [Form(nbytes, loss) for nbytes, loss in pairs]


def test_the_most_sensitive_part_gets_the_bytes() -> None:
    parts = [forms((4, 1.0), (8, 0.1)), forms((4, 9.0), (8, 0.9)), forms((40, 9.0), (80, 0.9))]
    assert allocate(parts, 48) == [0, 0, 0]
    assert allocate(parts, 52) == [0, 1, 0]
    assert allocate(parts, 56) == [1, 1, 0]
    assert allocate(parts, 96) == [1, 1, 1]
    assert allocate(parts, 47) == []


def test_a_form_that_loses_more_is_never_chosen() -> None:
    assert allocate([forms((4, 1.0), (6, 1.5), (8, 0.5))], 7) == [0]
    assert allocate([forms((6, 1.0), (4, 1.0))], 10) == [1]


def test_it_is_near_the_best_of_all_choices() -> None:
    parts = [forms((5 + i, 2.0**i), (7 + i, 2.0**i / 3), (12 + i, 2.0**i / 20)) for i in range(5)]
    for most in range(35, 72, 4):
        chosen = allocate(parts, most)
        loss = sum(own[i].loss for own, i in zip(parts, chosen, strict=True))
        fits = [c for c in product(*parts) if sum(form.nbytes for form in c) <= most]
        assert loss <= 1.5 * min(sum(form.loss for form in c) for c in fits)
