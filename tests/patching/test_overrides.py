from types import SimpleNamespace

import pytest

from mcore_ckpt_ext.patching.overrides import overridden


def test_names_mean_something_else_within_and_the_same_afterwards():
    arguments = SimpleNamespace(step=1, other=2)
    with pytest.raises(ZeroDivisionError), overridden(vars(arguments), step=7):
        assert (arguments.step, arguments.other) == (7, 2)
        1 / 0  # noqa: B018
    assert vars(arguments) == {"step": 1, "other": 2}


def test_a_name_that_is_not_there_is_no_name_to_rebind():
    namespace = {"one": 1}
    with pytest.raises(KeyError, match="two"), overridden(namespace, one=3, two=2):
        pass
    assert namespace == {"one": 1}
