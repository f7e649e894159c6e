"""Former import paths of public names keep working, with a warning that names the new one."""

import pytest

import mcore_ckpt_ext
import mcore_ckpt_ext.hooks


@pytest.mark.parametrize("name", ["install", "uninstall", "status"])
def test_the_former_path_warns_and_works(name: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"import {name} from mcore_ckpt_ext"):
        assert getattr(mcore_ckpt_ext.hooks, name) is getattr(mcore_ckpt_ext, name)


def test_no_other_name_is_there() -> None:
    assert not hasattr(mcore_ckpt_ext.hooks, "wrap")
