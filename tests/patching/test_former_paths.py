"""Test that former import paths of public names still work, with a warning that names the new ones."""

import pytest

import mcore_ckpt_ext
import mcore_ckpt_ext.hooks
from mcore_ckpt_ext.families import settings


@pytest.mark.parametrize("name", ["install", "uninstall", "status"])
def test_the_former_path_warns_and_works(name: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"{name} is now {name} of mcore_ckpt_ext$"):
        assert getattr(mcore_ckpt_ext.hooks, name) is getattr(mcore_ckpt_ext, name)


def test_no_other_name_is_there() -> None:
    assert not hasattr(mcore_ckpt_ext.hooks, "wrap")


@pytest.mark.parametrize(
    ("former", "name"), [("Fact", "MetadataDifference"), ("SeamStatus", "PatchPointStatus"), ("Unread", "UnreadState")]
)
def test_a_former_public_name_warns_and_works(former: str, name: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"{former} is now {name}"):
        assert getattr(mcore_ckpt_ext, former) is getattr(mcore_ckpt_ext, name)


@pytest.mark.parametrize("former", ["Same", "Fixed", "Needs", "Sets", "Both", "Without"])
def test_a_former_name_of_a_familys_settings_warns_and_works(former: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"{former} is now"):
        assert issubclass(getattr(settings, former), settings.Setting)
