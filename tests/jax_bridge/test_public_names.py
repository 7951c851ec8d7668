"""`jax_bridge` has its public names, and its modules, from the moment that they are asked for."""

from __future__ import annotations

import importlib

import pytest

import jax_bridge
from jax_bridge import public


@pytest.mark.parametrize("name", public.__all__)
def test_a_public_name_is_that_of_its_module(name):
    assert getattr(jax_bridge, name) is getattr(public, name)
    assert name in dir(jax_bridge)


def test_the_list_of_names_is_sorted_and_whole():
    assert public.__all__ == sorted(public.__all__, key=lambda name: (not name.isupper(), name))
    assert jax_bridge.__all__ == public.__all__


@pytest.mark.parametrize("name", ["runtime", "processes", "reference", "errors"])
def test_a_module_is_there_without_being_imported_by_name(name):
    assert getattr(jax_bridge, name) is importlib.import_module(f"jax_bridge.{name}")


@pytest.mark.parametrize("name", ["AsyncEmbeding", "__no_such__", "_private"])
def test_any_other_name_is_an_attribute_error(name):
    with pytest.raises(AttributeError, match=f"module 'jax_bridge' has no attribute '{name}'"):
        getattr(jax_bridge, name)
